"""Runs that are trained in turns, and what Ctrl-C does to them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rbn.training.ranks import Ranks


class Diverged(FloatingPointError):
    """A loss, or too many gradients in a row, that are not finite."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after which all runs finished their step and were saved."""


class Advancing(Protocol):
    """A run that goes on step by step: a `Trainer`."""

    def advance(self) -> bool:
        """Make one step and what is due after it. False when there is nothing more to do."""

    def save(self) -> None:
        """Write the checkpoint to go on from."""

    def alone(self) -> AbstractContextManager[None]:
        """Inside, torch uses the run's own random numbers and stream."""


def train_together(trainers: Sequence[Advancing]) -> None:
    """Train several runs in turns, a step each, until all are over.

    Each has its own random numbers and on a GPU its own stream, so the numbers are those of
    training one after another. Small models that leave most of a GPU idle take hardly longer than
    one of them.

    Raises:
        Diverged: when one of the runs does, after the others have come to their end.
        Interrupted: on Ctrl-C, after all have finished their step and were saved; on a second one a
            KeyboardInterrupt at once.
    """
    active = list(trainers)
    diverged: list[Diverged] = []

    def goes_on(trainer: Advancing) -> bool:
        try:
            return trainer.advance()
        except Diverged as error:
            diverged.append(error)
            return False

    ranks = Ranks.here()
    with _Interrupts() as interrupts:
        interrupted = False
        while active and not interrupted:
            active = [trainer for trainer in active if goes_on(trainer)]
            # It may have come to one process, or between other steps of the others.
            interrupted = ranks.any(interrupts.seen)
        if interrupted:
            for trainer in active:
                with trainer.alone():
                    trainer.save()
            raise Interrupted
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
