"""Rows of a benchmark's table in a JSON file that grows with each of them, so that an interrupted run loses none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nearfar.modeling.atomic_file import write_beside


class KeptRows:
    """Rows, written to a file as they come; those of an earlier run are there already.

    Args:
        path: the file, made with the first row; None keeps nothing.
        settings: what all rows have in common, JSON-ready. They are written beside the rows.
        machine: `machine_report()`, of which the device must stay the same.
        order: of a row, what rows are sorted by.
        unnamed: values of settings that files of older releases do not name, where these are not None.

    Raises:
        ValueError: the file is not such a file, or its rows were measured with other settings or on another device.
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
        self.path, self._order = path, order
        self.rows: list[dict[str, Any]] = []
        self._record: dict[str, Any] = {**settings, "machine": dict(machine), "rows": self.rows}
        if path is None or not path.is_file():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            rows, device = [dict(row) for row in found["rows"]], found["machine"]["device"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} does not hold rows of this benchmark ({type(error).__name__}: {error}): give another --out"
            ) from error
        before = {name: found.get(name, (unnamed or {}).get(name)) for name in settings} | {"device": device}
        for name, value in {**settings, "device": machine["device"]}.items():
            if before[name] != value:
                raise ValueError(
                    f"{path} was measured with {name} = {before[name]!r}, now it is {value!r}: give another --out"
                )
        self.rows += rows

    def has(self, **key: Any) -> bool:
        """Whether a row with these values is there."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Put a row in its place, and write the file."""
        self.rows.append(row)
        self.rows.sort(key=self._order)
        if self.path is not None:
            text = json.dumps(self._record, indent=2) + "\n"
            write_beside(self.path, lambda file: file.write_text(text, encoding="utf-8"))
