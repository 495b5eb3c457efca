"""Rows of a table in one file: several processes, several machines, files of older releases."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nearfar.evaluation.kept_rows import KeptRows

MACHINE = {"cpu": "one", "device": "cpu"}
OTHER = {"cpu": "two", "device": "cpu"}


def kept(path: Path | None, machine: dict[str, str] = MACHINE, **settings: Any) -> KeptRows:
    return KeptRows(path, {"seed": 0, **settings}, machine, order=lambda row: row["tokens"], unnamed={"size": 8})


def tokens(rows: list[dict[str, Any]]) -> list[int]:
    return [row["tokens"] for row in rows]


def test_two_processes_lose_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    one, two = kept(path), kept(path)
    one.add({"tokens": 2, "ms": 1.0})
    two.add({"tokens": 1, "ms": 1.0})
    two.add({"tokens": 2, "ms": 5.0})  # both have measured it: the first counts
    one.add({"tokens": 3, "ms": 1.0})
    written = json.loads(path.read_text())["rows"]
    assert tokens(written) == tokens(one.rows) == [1, 2, 3] and tokens(two.rows) == [1, 2]
    assert [row["ms"] for row in written] == [1.0] * 3 and two.has(tokens=2, ms=1.0) and not two.has(tokens=2, ms=5.0)
    assert kept(path).rows == written
    # A file that somebody deletes comes back whole.
    path.unlink()
    one.add({"tokens": 4})
    assert tokens(kept(path).rows) == [1, 2, 3, 4]


def test_a_row_of_another_process_is_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    one, two = kept(path), kept(path)
    assert not one.has(tokens=2)
    two.add({"tokens": 2})
    assert one.has(tokens=2) and tokens(one.rows) == [2]
    two.add({"tokens": 1})
    assert one.has(tokens=1) and tokens(one.rows) == [1, 2]
    # A file that is the same still is not read again.
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("read again"))
        assert one.has(tokens=1) and not one.has(tokens=3)
    # One that is gone takes no rows away; one that was begun anew with other settings is refused.
    path.unlink()
    assert one.has(tokens=1)
    kept(path, seed=1).add({"tokens": 4})
    with pytest.raises(ValueError, match="was measured with seed = 1, now it is 0: give another --out"):
        one.has(tokens=1)


def test_many_at_once_lose_no_rows(tmp_path: Path) -> None:
    def write(number: int) -> None:
        rows = kept(tmp_path / "rows.json")
        for place in range(10):
            rows.add({"tokens": 10 * number + place})

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    assert tokens(kept(tmp_path / "rows.json").rows) == list(range(30))


def test_a_process_with_other_settings_that_came_first(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    one, two = kept(path), kept(path, seed=1)
    one.add({"tokens": 1})
    with pytest.raises(ValueError, match="was measured with seed = 0, now it is 1: give another --out"):
        two.add({"tokens": 2})
    assert tokens(kept(path).rows) == [1]


def test_rows_say_what_they_were_measured_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    one = kept(path)
    one.add({"tokens": 1})
    assert one.rows == [{"machine": MACHINE, "tokens": 1}] and one.machine_lines() == []
    two = kept(path, OTHER)
    assert two.machine_lines() == []
    two.add({"tokens": 2})
    two.add({"tokens": 3})
    data = json.loads(path.read_text())
    assert data["machine"] == MACHINE and [row["machine"]["cpu"] for row in data["rows"]] == ["one", "two", "two"]
    assert two.machine_lines() == [
        f"1 row measured on {json.dumps(MACHINE)}",
        f"2 rows measured on {json.dumps(OTHER)}",
    ]
    alone = kept(None)
    alone.add({"tokens": 1})
    assert alone.rows[0]["machine"] == MACHINE and alone.machine_lines() == []


def test_files_of_older_releases(tmp_path: Path) -> None:
    """Their rows name no machine; the one at the beginning is not replaced by that of rows that are added."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"seed": 0, "machine": MACHINE, "rows": [{"tokens": 1}]}))
    with pytest.raises(ValueError, match="size = 8, now it is 9"):
        kept(path, OTHER, size=9)
    rows = kept(path, OTHER, size=8)
    assert rows.machine_lines() == []
    rows.add({"tokens": 2})
    data = json.loads(path.read_text())
    assert data["machine"] == MACHINE and data["rows"] == [{"tokens": 1}, {"machine": OTHER, "tokens": 2}]
    assert kept(path, OTHER, size=8).machine_lines() == [
        f"1 row measured on a machine that was not noted; the file names {json.dumps(MACHINE)}",
        f"1 row measured on {json.dumps(OTHER)}",
    ]
    path.write_text(json.dumps({"seed": 0, "machine": MACHINE, "rows": [{"length": 1}]}))
    with pytest.raises(ValueError, match="does not hold rows of this benchmark"):
        kept(path)
