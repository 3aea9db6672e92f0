"""File locks between processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Inside the ``with`` block, no other process holds the lock. A killed process releases it.

    On a disk without locks this has no effect, so processes must not start at the same time.

    Args:
        path: the lock file, which may stay behind; its folder must exist.
        on_wait: called before waiting for another process; may raise instead.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    except OSError:  # the disk has no locks
        pass
    try:
        yield
    finally:
        lock.release()
