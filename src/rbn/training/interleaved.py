"""Several runs trained in alternation in one process, one step each."""

from __future__ import annotations

from collections.abc import Sequence

from rbn.training.interrupt import Interrupted, remembered
from rbn.training.ranks import Ranks
from rbn.training.trainer import Diverged, Trainer


def train_interleaved(trainers: Sequence[Trainer]) -> None:
    """Train several runs in alternation, one step each, until all are done.

    Each run has its own random numbers and, on a GPU, its own stream, so the results are the same
    as if the runs were trained one after another. Small models leave most of a GPU idle, so
    training several of them takes hardly longer than one.

    Raises:
        Diverged: at least one run diverged; raised after all others are done.
        Interrupted: Ctrl-C, after all runs finished their step and were saved. A second Ctrl-C
            raises KeyboardInterrupt at once.
    """
    active = {trainer: trainer.steps() for trainer in trainers}
    diverged: list[Diverged] = []
    ranks = Ranks.here()
    with remembered() as interrupts:
        while active:
            for trainer, steps in list(active.items()):
                try:
                    done = next(steps, None) is None
                except Diverged as error:
                    diverged.append(error)
                    done = True
                if done:
                    del active[trainer]
            # The signal may have reached only one of the processes, or each at a different step.
            if ranks.any(bool(interrupts.seen)):
                for trainer in active:
                    with trainer.isolated():
                        trainer.save()
                raise Interrupted(interrupts.seen)
    if diverged:
        raise diverged[0]
