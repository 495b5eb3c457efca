"""Rows of a benchmark's table in a JSON file that grows with each of them, so that an interrupted run loses none."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nearfar.evaluation.file_lock import held_lock
from nearfar.modeling.atomic_file import write_beside


class KeptRows:
    """Rows, written to a file as they come; those of an earlier run are there already.

    Several processes may add to one file: each takes in what the others have added whenever it adds a row itself or
    asks whether one is there. What two of them measured alike counts once. Each row has the machine that it was
    measured on, which older files do not tell.

    Args:
        path: the file, made with the first row; None keeps nothing.
        settings: what all rows have in common, JSON-ready. They are written beside the rows.
        machine: `machine_report()`, of which the device must stay the same.
        order: of a row, what rows are sorted by, and what tells one from all others.
        unnamed: values of settings that files of older releases do not name, where these are not None.

    Raises:
        ValueError: the file is not such a file, or its rows were measured with other settings or on another device;
            also from `has` and `add`, where another process has begun the file meanwhile.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        machine: Mapping[str, Any],
        *,
        order: Callable[[dict[str, Any]], Any],
        unnamed: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.machine, self._order = path, dict(machine), order
        self.rows: list[dict[str, Any]] = []
        self._settings, self._unnamed = dict(settings), dict(unnamed or {})
        self._begun_on = self.machine  # what the file names for rows that name none
        self._seen: tuple[int, ...] | None = None  # the file that was read last
        self._refresh()

    def _refresh(self) -> None:
        """Take in what the file has, if it is another than was read before."""
        path, settings = self.path, self._settings
        if path is None or not path.is_file():
            return
        # Files are replaced by new ones, never written into. Looked at before it is read: if it is replaced in
        # between, it is read once too often.
        status = path.stat()
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen == self._seen:
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            rows, machine = [dict(row) for row in found["rows"]], dict(found["machine"])
            device, there = machine["device"], [self._order(row) for row in rows]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} does not hold rows of this benchmark ({type(error).__name__}: {error}): give another --out"
            ) from error
        before = {name: found.get(name, self._unnamed.get(name)) for name in settings} | {"device": device}
        for name, value in {**settings, "device": self.machine["device"]}.items():
            if before[name] != value:
                raise ValueError(
                    f"{path} was measured with {name} = {before[name]!r}, now it is {value!r}: give another --out"
                )
        self.rows[:] = [*rows, *(row for row in self.rows if self._order(row) not in there)]
        self.rows.sort(key=self._order)
        self._begun_on, self._seen = machine, seen

    def has(self, **key: Any) -> bool:
        """Whether a row with these values is there, of this process or of another."""
        self._refresh()
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Put a row in its place, and write the file; a row that another process has added meanwhile stays."""
        if self.path is None:
            self._put(row)
            return
        with held_lock(self.path.with_name(f".{self.path.stem}.lock")):
            self._seen = None  # a clock may be coarse, and no row is to be lost
            self._refresh()
            self._put(row)
            record = {**self._settings, "machine": self._begun_on, "rows": self.rows}
            text = json.dumps(record, indent=2) + "\n"
            write_beside(self.path, lambda file: file.write_text(text, encoding="utf-8"))

    def _put(self, row: dict[str, Any]) -> None:
        if self._order(row) not in map(self._order, self.rows):
            self.rows.append({"machine": self.machine, **row})
        self.rows.sort(key=self._order)

    def machine_lines(self) -> list[str]:
        """Where the rows come from, one line a machine, if there is more than one."""
        counts = collections.Counter(json.dumps(row.get("machine")) for row in self.rows)
        unknown = f"a machine that was not noted; the file names {json.dumps(self._begun_on)}"
        return [
            f"{count:,} row{'s' if count > 1 else ''} measured on {unknown if machine == 'null' else machine}"
            for machine, count in counts.items()
            if len(counts) > 1
        ]
