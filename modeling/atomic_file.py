"""Writing a file so that nobody ever sees half of it."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def check_writable(folder: str | Path) -> None:
    """See that files can be written in a folder, which need not be there yet; nothing stays behind.

    Raises:
        ValueError: it is a file, or lies in one, or in a folder that takes no files.
    """
    folder = Path(folder)
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{folder} cannot be written: {nearest} is a file; give another folder")
    try:
        with tempfile.TemporaryDirectory(prefix=".nearfar-", dir=nearest):
            pass
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written: {nearest} takes no files ({error.strerror}); give another folder"
        ) from None


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
