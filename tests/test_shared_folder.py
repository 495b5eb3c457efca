"""Processes that share a folder: whether there are others, and what a restart is."""

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
