"""Work that one process does while the others wait for it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def one_at_a_time(path: Path, waiting: str) -> Iterator[None]:
    """Inside, no other process can be inside with the same path: it waits.

    The lock is the system's, on a file that is removed in the end; a process that is killed lets
    go of it. Where the system or the disk has no such locks, as Windows, it has no effect, and
    processes must not begin at the same time.

    Args:
        path: of the file; its folder must be there.
        waiting: logged where another process is inside.
    """
    if find_spec("fcntl") is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        _acquire(path, waiting, stack)
        # Before the lock is gone: who waits for it finds that its file is no longer the one.
        stack.callback(path.unlink, missing_ok=True)
        yield


def _acquire(path: Path, waiting: str, stack: contextlib.ExitStack) -> None:
    """Lock the file of that name, to be closed with the stack."""
    import fcntl

    while True:
        file = stack.enter_context(path.open("ab"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                logging.getLogger(__name__).warning(waiting)
            waiting = ""  # said once
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a disk without locks
            return
        if _is_named(file, path):
            return
        file.close()


def _is_named(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is the one that has the name now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
