"""Locks between processes that share a folder, as files."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

# How file systems say that they have no locks. Of the first, some releases of filelock make a NotImplementedError.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
# Some releases put a marker file in place of a lock that cannot be; a process that is killed leaves it there.
_NO_MARKERS: dict[str, Any] = {"fallback_to_soft": False}
if "fallback_to_soft" not in inspect.signature(FileLock).parameters:
    _NO_MARKERS.clear()


class _OwnLock(FileLock):
    def _fallback_to_soft_lock(self) -> None:  # where they cannot be told so, as 3.29
        raise NotImplementedError("this file system has no locks")


def file_lock(path: str | Path) -> FileLock:
    """A lock of the operating system's; where there are none, `lacks_locks` knows the error of `acquire`."""
    return _OwnLock(path, **_NO_MARKERS)


def lacks_locks(error: Exception) -> bool:
    """Whether what taking a lock raised says that the file system has none."""
    return isinstance(error, NotImplementedError) or (isinstance(error, OSError) and error.errno in _NO_LOCKS)


@contextmanager
def held_lock(path: str | Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock while the block runs; it goes with its process, however that ends.

    Args:
        path: of the lock, an empty file; its folder is made.
        wait: until no other process holds it; the file then stays behind. Otherwise the block runs without the lock,
            and who held it deletes the file.

    Yields:
        False where another process holds it. Where a file system has no locks, always True.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = file_lock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    except (NotImplementedError, OSError) as error:
        if not lacks_locks(error):
            raise
        try:
            yield True
        finally:
            if not wait:
                with suppress(OSError):  # whoever else has used it may have deleted it
                    path.unlink()
        return
    held = path.exists()  # a file that its holder deleted in this moment locks nothing
    try:
        yield held
    finally:
        if held and not wait:
            with suppress(OSError):  # a system that deletes no open files
                path.unlink()
        lock.release()
