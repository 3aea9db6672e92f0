"""Processes that help and end with the one they help."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import Any


def helpers(
    count: int, start: Callable[..., None] | None = None, *shared: Any
) -> ProcessPoolExecutor:
    """Some fresh processes.

    Args:
        count: how many.
        start: called once in each of them, with what is `shared`.
        shared: anything that can be pickled.
    """
    return ProcessPoolExecutor(
        count, get_context("spawn"), initializer=_begin, initargs=(start, shared)
    )


def _begin(start: Callable[..., None] | None, shared: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who is helped
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(*shared)


def _end_with_parent() -> None:
    """Wait until the process that is helped is gone, however it ended."""
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
