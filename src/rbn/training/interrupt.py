"""Ctrl-C that waits until an extension is loaded.

Extensions in C++ that make Python's enums while they are loaded, as Triton's does, end the process
with SIGABRT when an interrupt comes in between.
"""

from __future__ import annotations

import signal
import threading
from importlib.machinery import ExtensionFileLoader
from types import CodeType, FrameType

_LATER = 0.05  # seconds
_LOADING: tuple[CodeType, ...] = (
    ExtensionFileLoader.create_module.__code__,
    ExtensionFileLoader.exec_module.__code__,
)


def wait_for_extensions() -> None:
    """Let Ctrl-C raise KeyboardInterrupt as it does, but not inside an extension's loading."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    here = frame
    while here is not None:
        if here.f_code in _LOADING:
            again = threading.Timer(_LATER, _send, (number,))
            again.daemon = True
            again.start()
            return
        here = here.f_back
    raise KeyboardInterrupt


def _send(number: int) -> None:
    """To the main thread, which may be waiting for something."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)
