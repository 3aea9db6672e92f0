"""The entry point of the `rbn` script.

It is a module of its own because importing any part of the package `rbn` imports torch first, which
takes seconds. Ctrl-C or SIGTERM in that time ends the command with one line.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any


def main() -> None:
    """Run the command line."""
    usual: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    ours = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    for number in ours:
        signal.signal(number, _exit)
    from rbn.cli import main as run

    for number in ours:
        signal.signal(number, usual[number])
    run()


def _exit(number: int, frame: FrameType | None) -> None:
    """Exit at once: an exception inside the import of a C++ extension can abort the process."""
    os.write(2, b"rbn: stopped before it started\n")
    os._exit(128 + number)
