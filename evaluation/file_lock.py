"""Locks between processes that share a folder, as files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def held_lock(path: str | Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock while the block runs; it goes with its process, however that ends.

    Args:
        path: of the lock, an empty file; its folder is made.
        wait: until no other process holds it; the file then stays behind. Otherwise the block runs without the lock,
            and who held it deletes the file.

    Yields:
        False where another process holds it. Where a file system has no locks, True.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    except NotImplementedError:
        yield True
        return
    held = path.exists()  # a file that its holder deleted in this moment locks nothing
    try:
        yield held
    finally:
        if held and not wait:
            with suppress(OSError):  # a system that deletes no open files
                path.unlink()
        lock.release()
