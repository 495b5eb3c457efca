"""Writing a file so that nobody ever sees half of it."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_beside(path: str | Path, write: Callable[[Path], Any]) -> Path:
    """Let `write` fill a new file in the target's folder, then rename it to `path`.

    The folder is made if it is missing. When `write` fails, what stood at `path` stays as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    beside = Path(name)
    try:
        write(beside)
        umask = os.umask(0)
        os.umask(umask)
        beside.chmod(0o666 & ~umask)  # mkstemp's files are private to their owner
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path
