"""Processes that share a folder: whether there are others, and what a restart is."""

import errno
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nearfar.evaluation import shared_folder
from nearfar.evaluation.file_lock import held_lock
from nearfar.evaluation.shared_folder import joined


def test_others_are_those_that_still_run(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "runs"
    with joined(folder) as one:
        assert not one.has_others()
        with joined(folder) as two:
            assert one.has_others() and two.has_others()
        assert not one.has_others()
        (folder / ".process-killed.lock").touch()
        assert not one.has_others() and not (folder / ".process-killed.lock").exists()
    assert list(folder.iterdir()) == []


def test_a_restart_lasts_as_long_as_one_of_its_processes(tmp_path: Path) -> None:
    with joined(tmp_path) as beside:  # restarts nothing
        with joined(tmp_path) as one:
            first = one.join_restart("ruler")
            assert one.join_restart("latency") != first
            with joined(tmp_path) as two:
                assert two.join_restart("ruler") == first
        with joined(tmp_path) as three:
            second = three.join_restart("ruler")
            assert second != first and beside.join_restart("ruler") == second
        assert beside.join_restart("ruler") == second
        (tmp_path / ".ruler-restart").write_text("{")  # damaged
        assert beside.join_restart("ruler") not in (first, second)


def test_joining_while_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks whether a lock is free holds it for a moment, and deletes its file."""
    names: list[str] = []

    @contextmanager
    def looked_at(path: Path, **options: Any) -> Any:
        names.append(path.name)
        if len(names) == 1:
            with held_lock(path, wait=False), held_lock(path, **options) as held:
                yield held
        else:
            with held_lock(path, **options) as held:
                yield held

    monkeypatch.setattr(shared_folder, "held_lock", looked_at)
    with joined(tmp_path):
        assert len(set(names)) == 2 and (tmp_path / names[1]).exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has locks")
@pytest.mark.parametrize("name", ["ENOSYS", "ENOTSUP", "EOPNOTSUPP", "ENOLCK"])
def test_where_a_file_system_has_no_locks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody goes on as if alone. No files stand in for locks: those of a killed process would stay."""
    import fcntl

    def flock(*args: Any) -> None:
        raise OSError(getattr(errno, name), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wait in (True, False):
            with held_lock(tmp_path / "a.lock", wait=wait) as one, held_lock(tmp_path / "a.lock", wait=False) as two:
                assert one and two
        with joined(tmp_path) as one_of, joined(tmp_path) as another:
            assert not one_of.has_others() and not another.has_others()
            assert one_of.join_restart("ruler") != another.join_restart("ruler")
    assert not list(tmp_path.glob(".process-*")) and not (tmp_path / "a.lock").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has locks")
def test_other_errors_of_a_lock_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def flock(*args: Any) -> None:
        raise OSError(errno.EIO, "a broken disk")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="a broken disk"), held_lock(tmp_path / "a.lock", wait=False):
        pass
