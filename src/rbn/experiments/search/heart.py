"""The signs of life of a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rbn.experiments.search.trials import Trials

_TICK = 0.2  # seconds


class Heart:
    """A thread that beats for the trial in hand, and notices when it is another's.

    Args:
        trials: of this worker.
    """

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._every = trials.sweep.heartbeat
        self._number: int | None = None
        self._lost = False
        self._on_lost: Callable[[], None] | None = None
        self._lock = threading.Lock()  # of the trial in hand: not dropped while beating for it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def hold(self, number: int) -> None:
        """Beat for a trial from now on."""
        with self._lock:
            self._number, self._lost, self._on_lost = number, False, None

    def drop(self) -> None:
        """Beat for none."""
        with self._lock:
            self._number = self._on_lost = None

    @property
    def lost(self) -> bool:
        """Whether the trial was taken by another worker."""
        return self._lost

    def when_lost(self, call: Callable[[], None]) -> None:
        """What to do when the trial is taken by another worker."""
        with self._lock:
            self._on_lost = call

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_TICK):
            if time.monotonic() - last >= self._every - _TICK / 2:
                last = time.monotonic()
                self._sign()

    def _sign(self) -> None:
        with self._lock:
            if self._number is None or self._lost:
                return
            try:
                if self._trials.holds(self._number):
                    self._trials.beat(self._number)
                    return
            except Exception:  # the storage is away: the next beat may reach it
                return
            self._lost = True
            if self._on_lost is not None:
                self._on_lost()
