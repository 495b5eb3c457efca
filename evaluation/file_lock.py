"""Locks between processes that share a folder, as files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def held_lock(path: str | Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock while the block runs; it goes with its process, however that ends.

    Args:
        path: of the lock, a file that stays empty and may stay behind; its folder is made.
        wait: until no other process holds it; otherwise the block runs without it.

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
    try:
        yield True
    finally:
        lock.release()
