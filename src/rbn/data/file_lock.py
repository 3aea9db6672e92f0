"""Locks among processes, on files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Inside, no other process holds the lock on a path. A killed process releases it.

    On a disk without locks it has no effect, and processes must not start at the same time.

    Args:
        path: of the lock file, which stays; its folder must exist.
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
