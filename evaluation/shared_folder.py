"""Processes that write their results into one folder, and what they know of each other."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from nearfar.evaluation.file_lock import held_lock
from nearfar.modeling.atomic_file import write_beside


class SharedFolder:
    """A folder, as one of the processes sees it that have joined it; see `joined`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self._name = folder, name

    def has_others(self) -> bool:
        """Whether another process has joined at this moment. Where a file system has no locks, False."""
        names = [path.name for path in self.folder.glob(".process-*.lock")]
        return any(_is_running(self.folder, name) for name in names if name != self._name)

    def join_restart(self, what: str) -> str:
        """The name of a restart: a new one, or that of processes which are at it now.

        Results that bear the name have been measured since the restart began, and are not to be thrown away.

        Args:
            what: is started anew; part of the names of two hidden files.
        """
        file = self.folder / f".{what}-restart"
        with held_lock(file.with_name(f"{file.name}.lock")):
            known: dict[str, Any] = {}
            with suppress(OSError, ValueError):
                known = json.loads(file.read_text(encoding="utf-8"))
            running = [name for name in known.get("processes", []) if _is_running(self.folder, name)]
            restart = str(known["restart"]) if running else secrets.token_hex(8)
            text = json.dumps({"restart": restart, "processes": [*running, self._name]})
            write_beside(file, lambda beside: beside.write_text(text, encoding="utf-8"))
        return restart


@contextmanager
def joined(folder: str | Path) -> Iterator[SharedFolder]:
    """Be one of a folder's processes while the block runs; the folder is made."""
    folder = Path(folder)
    with ExitStack() as stack:
        while True:
            name = f".process-{secrets.token_hex(8)}.lock"
            if stack.enter_context(held_lock(folder / name, wait=False)):
                break  # nobody has looked in this moment whether it is held
        yield SharedFolder(folder, name)


def _is_running(folder: Path, name: str) -> bool:
    """Whether a process that has joined still runs; what it has left behind otherwise is deleted."""
    path = folder / name
    if not path.exists():
        return False
    with held_lock(path, wait=False) as free:
        return not free and path.exists()
