"""Handling of Ctrl-C and SIGTERM: not lost, and not in the middle of work that must complete.

Python raises KeyboardInterrupt wherever the main thread happens to be. Inside a weakref callback or
a `__del__`, Python prints and drops it; inside a database transaction, it can leave the lock held.
So long-running commands only remember the signal (`remembered`) and check it where it is safe to
stop. An interrupt that Python dropped is sent again (`handle_signals`).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from types import CodeType, FrameType
from typing import Any

_LATER = 0.05  # seconds
# An interrupt while a C++ extension creates Python enums at import, as Triton's does, aborts the
# process.
_LOADING: tuple[CodeType, ...] = (
    ExtensionFileLoader.create_module.__code__,
    ExtensionFileLoader.exec_module.__code__,
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def handle_signals() -> None:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt, with the signal's number.

    While an extension is being loaded, the signal is sent again later instead. So is an interrupt
    that Python dropped, as in a weakref callback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupted)
    if sys.unraisablehook is not _dropped:
        global _before
        _before, sys.unraisablehook = sys.unraisablehook, _dropped


_before: Any = sys.unraisablehook


def _dropped(unraisable: Any) -> None:
    """Send a dropped interrupt again."""
    error = unraisable.exc_value
    if isinstance(error, KeyboardInterrupt):
        _send_later(exit_signal(error))
    else:
        _before(unraisable)


def exit_signal(error: KeyboardInterrupt) -> int:
    """The number of the signal behind an interrupt; SIGINT if it has none."""
    number = error.args[0] if error.args else None
    return number if isinstance(number, int) else int(signal.SIGINT)


def _interrupted(number: int, frame: FrameType | None) -> None:
    global _sent_again
    _sent_again = False
    here = frame
    while here is not None:
        if here.f_code in _LOADING:
            _send_later(number)
            return
        here = here.f_back
    raise KeyboardInterrupt(number)


_sent_again = False


def _send_later(number: int) -> None:
    global _sent_again
    _sent_again = True
    again = threading.Timer(_LATER, send_to_main, (number,))
    again.daemon = True
    again.start()


def send_to_main(number: int = signal.SIGINT) -> None:
    """Send a signal to the main thread, even if it is blocked."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, raised after all runs finished their step and were saved."""


class Interrupts:
    """The signals that `remembered` has caught.

    Attributes:
        seen: the number of the first signal; 0 if there was none.
        count: number of signals, without those that were sent again.
    """

    def __init__(self, raise_second: bool = True) -> None:
        self.seen = 0
        self.count = 0
        self._raise_second = raise_second
        self._breakable = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal."""
        if self.seen:
            raise KeyboardInterrupt(self.seen)

    def wait(self, seconds: float) -> None:
        """Sleep until the time is over or a signal arrives."""
        end = time.monotonic() + seconds
        while not self.seen and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LATER))

    @contextlib.contextmanager
    def breakable(self) -> Iterator[None]:
        """Inside the ``with`` block, a signal raises at once: for work that can be repeated."""
        before, self._breakable = self._breakable, True
        try:
            self.check()
            yield
        finally:
            self._breakable = before
        self.check()  # in case the interrupt was swallowed

    def _handle(self, number: int, frame: FrameType | None) -> None:
        global _sent_again
        self.seen = self.seen or number
        again, _sent_again = _sent_again, False
        self.count += not again
        if self._breakable:
            _interrupted(number, frame)
        elif self.count > 1 and self._raise_second and not again:
            raise KeyboardInterrupt(number)


_active: Interrupts | None = None


@contextlib.contextmanager
def remembered(raise_second: bool = True) -> Iterator[Interrupts]:
    """Inside the ``with`` block, catch the first Ctrl-C (and SIGTERM, after `handle_signals`).

    It is remembered instead of raised. A nested block shares the signals of the outer one. Only the
    main thread can handle signals; in other threads the block has no effect.

    Args:
        raise_second: whether a second signal raises KeyboardInterrupt at once.
    """
    global _active
    if threading.current_thread() is not threading.main_thread():
        yield Interrupts()
        return
    if _active is not None:
        yield _active
        return
    _active = interrupts = Interrupts(raise_second)
    handlers: dict[int, Any] = {signal.SIGINT: signal.getsignal(signal.SIGINT)}
    if signal.getsignal(signal.SIGTERM) is _interrupted:
        handlers[signal.SIGTERM] = _interrupted
    for number in handlers:
        signal.signal(number, interrupts._handle)
    try:
        yield interrupts
    finally:
        _active = None
        for number, handler in handlers.items():
            signal.signal(number, handler)


def pending() -> bool:
    """Whether an enclosing `remembered` block has caught a signal."""
    return _active is not None and bool(_active.seen)


# Child processes ---------------------------------------------------------------------------------


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Start child processes inside this block: it holds signals back until all are started."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # starting it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started(forget: bool) -> None:
    """Call this first in a child process started in a `starting` block.

    Args:
        forget: drop signals that were held back; otherwise they are delivered now.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return
    for number in _SIGNALS if forget else ():
        handler = signal.signal(number, signal.SIG_IGN)  # drops a pending signal
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
