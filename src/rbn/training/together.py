"""Runs that are trained in turns, and what Ctrl-C does to them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from rbn.training.interrupt import remembered
from rbn.training.ranks import Ranks


class Diverged(FloatingPointError):
    """A loss, or too many gradients in a row, that are not finite."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after which all runs finished their step and were saved."""


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
    with remembered() as interrupts:
        interrupted = False
        while active and not interrupted:
            active = [trainer for trainer in active if goes_on(trainer)]
            # It may have come to one process, or between other steps of the others.
            interrupted = ranks.any(bool(interrupts.seen))
        if interrupted:
            for trainer in active:
                with trainer.alone():
                    trainer.save()
            raise Interrupted(interrupts.seen)
    if diverged:
        raise diverged[0]
