"""Measurements in a file of JSON lines that several processes fill together, each going on where the others are.

`evaluation/kept_rows.py` is for fewer rows, in an order of their own: it writes all of them anew with each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nearfar.evaluation.file_lock import held_lock


class Records:
    """Measurements, kept in memory and, if there is a file, appended to it as they come.

    Several processes may append to one file: a line is written at once, under a lock. The first line has the settings
    and the machine that began it, each other one a measurement and the machine that it was made on, which older files
    do not tell. What two processes measured alike counts once.

    Args:
        path: of the file; its folder is made. None keeps them in memory only.
        settings: what all measurements have in common, JSON-ready; None takes what the file says.
        machine: that measures; goes into each row that is added.
        key: of a row, what tells it from all others.
        upgrade: of settings that a file has, the same as they are written now.

    Attributes:
        rows: the measurements.
        settings: of the file.
        begun_on: the machine that began the file.

    Raises:
        ValueError: the file has no beginning and there are no settings, or it was measured with other settings.
    """

    def __init__(
        self,
        path: Path | None,
        settings: dict[str, Any] | None,
        machine: dict[str, Any] | None = None,
        *,
        key: Callable[[dict[str, Any]], Hashable],
        upgrade: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.machine = self.begun_on = machine
        self.settings = settings or {}
        self.file = path
        self._key = key
        self._keys: set[Hashable] = set()
        self._read = 0  # bytes of the file
        if path is None:
            return
        header = self._header()
        if header is None:
            if settings is None:
                raise ValueError(f"{path}: nothing has been measured there")
            path.parent.mkdir(parents=True, exist_ok=True)
            with held_lock(path.with_name(".beginning.lock")):
                header = self._header()  # another process may have been first
                if header is None:
                    header = {"settings": settings, "machine": machine}
                    self._append(header)
        before = header["settings"] if upgrade is None else upgrade(header["settings"])
        self.begun_on = header.get("machine")
        changed = [name for name in settings or {} if before.get(name) != self.settings[name]]
        if changed:
            raise ValueError(
                f"{path} was measured with another {', '.join(changed)}; give another --out, or the same "
                f"arguments as before ({', '.join(f'{name}={before.get(name)}' for name in changed)})"
            )
        self.settings = before
        self.refresh()

    def refresh(self) -> set[Hashable]:
        """Take in what other processes have added; returns the keys of all that is there."""
        for row in self._new_rows():
            if "settings" not in row:
                self._keep(row)
        return self._keys

    def _header(self) -> dict[str, Any] | None:
        """The file's first whole line, once there is one."""
        found = next(iter(self._new_rows()), None)
        self._read = 0
        return found

    def add(self, row: dict[str, Any]) -> None:
        """Keep a measurement, unless another with its key is there already."""
        if self.machine:
            row = {**row, "machine": self.machine}
        if self._keep(row) and self.file is not None:
            self._append(row)

    def _keep(self, row: dict[str, Any]) -> bool:
        key = self._key(row)
        new = key not in self._keys
        if new:
            self._keys.add(key)
            self.rows.append(row)
        return new

    def _new_rows(self) -> list[dict[str, Any]]:
        """Whole lines that were not read before, but for halves that a process which was killed has left."""
        if self.file is None or not self.file.exists():
            return []
        with self.file.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")
        self._read += sum(len(part) for part in whole[:2])
        rows = []
        for line in whole[0].decode().splitlines():
            with suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows

    def _append(self, row: dict[str, Any]) -> None:
        assert self.file is not None
        with held_lock(self.file.with_name(f".{self.file.stem}.lock")), self.file.open("ab+") as file:
            # After a process that was killed in the middle of a line.
            torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
            file.write((b"\n" if torn else b"") + json.dumps(row).encode() + b"\n")
