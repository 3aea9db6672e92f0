"""The heartbeat of a sweep's worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rbn.experiments.search.trials import Trials

_TICK = 0.2  # seconds


class Heartbeat:
    """A thread that renews a worker's claim on its trial, and notices when another takes it.

    Args:
        trials: this worker's `Trials`.
    """

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._every = trials.sweep.heartbeat
        self._number: int | None = None
        self._lost = False
        self._on_lost: Callable[[], None] | None = None
        self._lock = threading.Lock()  # the trial does not change during a beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def start(self, number: int) -> None:
        """Start to send heartbeats for a trial."""
        with self._lock:
            self._number, self._lost, self._on_lost = number, False, None

    def pause(self) -> None:
        """Stop sending heartbeats."""
        with self._lock:
            self._number = self._on_lost = None

    @property
    def lost(self) -> bool:
        """Whether another worker has taken the trial."""
        return self._lost

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call a function when another worker has taken the trial."""
        with self._lock:
            self._on_lost = call

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_TICK):
            if time.monotonic() - last >= self._every - _TICK / 2:
                last = time.monotonic()
                self._beat()

    def _beat(self) -> None:
        with self._lock:
            if self._number is None or self._lost:
                return
            try:
                if self._trials.holds(self._number):
                    self._trials.beat(self._number)
                    return
            except Exception:  # the storage cannot be reached: the next beat may succeed
                return
            self._lost = True
            if self._on_lost is not None:
                self._on_lost()
