"""Runs that are trained in turns, and what Ctrl-C does to them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Any

from rbn.training.trainer import Diverged, Trainer


def train_together(trainers: Sequence[Trainer]) -> None:
    """Train several runs in turns, a step each, until all are over.

    Each has its own random numbers and on a GPU its own stream, so the numbers are those of
    training one after another. Small models that leave most of a GPU idle take hardly longer than
    one of them.

    Raises:
        Diverged: when one of the runs does, after the others have come to their end.
        KeyboardInterrupt: on Ctrl-C, after all have finished their step and were saved.
    """
    active = list(trainers)
    diverged: list[Diverged] = []

    def goes_on(trainer: Trainer) -> bool:
        try:
            return trainer.advance()
        except Diverged as error:
            diverged.append(error)
            return False

    with _Interrupts() as interrupts:
        while active and not interrupts.seen:
            active = [trainer for trainer in active if goes_on(trainer)]
        if interrupts.seen:
            for trainer in active:
                with trainer.alone():
                    trainer.save()
            raise KeyboardInterrupt
    if diverged:
        raise diverged[0]


class _Interrupts:
    """Remembers a Ctrl-C instead of breaking off in the middle of a step; the second one does."""

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def _note(self, number: int, frame: Any) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
