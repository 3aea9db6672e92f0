"""Training runs of two processes, in a folder that both write to."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

import torch
from letters_task import Letters

from rbn.data import Split, Splits, Text
from rbn.experiments import build, config, results
from rbn.training import (
    CheckpointError,
    Diverged,
    Ranks,
    Schedule,
    Trainer,
    World,
    make_fabric,
)

CPU = torch.device("cpu")
SMALL = {
    "digits": ["batch_size=301", "evaluate_every=2", "epochs=2", "layer.hidden_noise=0"],
    "pydoc": ["batch_size=33", "length=12", "epochs=1", "evaluate_every=4"],
    "cloze": ["batch_size=15", "epochs=1", "evaluate_every=2", "data.sizes=[60,20,20]"],
}
RUNS = {  # task, model, whether statistics are those of all rows
    "digits": ("digits", "bn-lstm", True),
    "digits, simple": ("digits", "bn-rnn", True),
    "digits, plain": ("digits", "lstm", False),
    "pydoc": ("pydoc", "bn-lstm", True),
    "pydoc, by layer": ("pydoc", "ln-lstm", False),
    "cloze": ("cloze", "bn-e**", True),
}


def settings(task: str, model: str, sync: bool) -> config.Config:
    found = config.from_mapping(config.for_model(config.published(task), model))
    changes = ["hidden_size=6", "population_batch=40", *SMALL[task]]
    if sync:
        changes.append("normalization.sync_stats=true")
    return config.with_settings(found, changes)


def task_of(wanted: config.Config) -> Any:
    """A task in float64, so that two orders of summation agree closely."""
    loaded: Any = build.load(wanted, CPU)
    if isinstance(loaded, Splits):
        parts = (loaded.train, loaded.valid, loaded.test)
        rows = slice(24, 40)  # two of the image's eight: every step of two processes takes time
        loaded = Splits(*(Split(p.inputs[rows].double(), p.labels) for p in parts))
    elif isinstance(loaded, Text):
        cut = {name: getattr(loaded, name)[:size] for name, size in TEXT.items()}
        loaded = Text(**cut, symbols=loaded.symbols)
    task = build.build(wanted, 1, CPU, loaded=loaded)
    task.model.double()
    return task


TEXT = {"train": 3000, "valid": 1500, "test": 500}


def world(rank: int) -> World:
    return World(rank, 2, rank, 2)


def run(name: str, folder: Path, rank: int | None = None, stop: int | None = None) -> Any:
    """Train a run to its end, or to a step. Returns the trainer. rank: of two, or None."""
    wanted = settings(*RUNS[name])
    fabric = make_fabric(CPU, "32-true", None if rank is None else world(rank))
    trainer = build.make_trainer(wanted, task_of(wanted), folder, fabric=fabric)
    if stop is None:
        trainer.run()
        if trainer.ranks.count > 1:
            results.finish(wanted, 1, trainer, "")
        return trainer
    for progress in trainer.steps():
        if progress.step == stop:
            break
    with trainer.isolated():
        trainer.save()
    return trainer


def prepare(folder: Path) -> None:
    """A checkpoint of one process, for two to resume."""
    run("digits", folder / "one-then-two", stop=3)


# Two processes when something happens to one of them ----------------------------------------------


class Parted(Letters):
    row_dims = (1, 1)


def letters(folder: Path, rank: int, task: Any = None, steps: int = 12, **options: Any) -> Trainer:
    task = task or Parted()
    optimizer = torch.optim.Adam(task.model.parameters(), 0.01)
    schedule = Schedule(steps, evaluate_every=5, checkpoint_every=3)
    fabric = make_fabric(CPU, "32-true", world(rank))
    return Trainer(task, optimizer, schedule, folder, fabric=fabric, **options)


def stopped_and_resumed(rank: int, folder: Path) -> None:
    """With noise, zoneout and dropout; statistics per process."""
    letters(folder / "whole", rank).run()
    first = letters(folder / "stopped", rank)
    for progress in first.steps():
        if progress.step == 7:
            break
    with first.isolated():
        first.save()
    torch.manual_seed(99 + rank)
    letters(folder / "stopped", rank, Parted(seed=99)).run()


def interrupted(rank: int, folder: Path) -> int:
    """Only the second process gets Ctrl-C, in the middle of the fifth step."""

    class Interrupted(Parted):
        def batch(self, step: int) -> Any:
            if step == 4 and rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return super().batch(step)

    trainer = letters(folder, rank, Interrupted())
    try:
        trainer.run()
    except KeyboardInterrupt:
        return trainer.progress.step
    raise AssertionError("it went on")


def diverged(rank: int, folder: Path) -> str:
    """The loss of the second process is not finite."""

    class Bad(Parted):
        def loss(self, *batch: Any) -> Any:
            bad = rank == 1 and self.seen == 3
            self.seen += 1
            return super().loss(*batch) * (torch.nan if bad else 1)

        seen = 0

    try:
        letters(folder, rank, Bad()).run()
    except Diverged as error:
        return str(error)
    raise AssertionError("it went on")


def full_disk(rank: int, folder: Path) -> str:
    """The first process cannot write."""
    trainer = letters(folder, rank)
    next(trainer.steps())
    if rank == 0:
        folder.joinpath("last.safetensors").unlink()
        folder.joinpath("last.safetensors").mkdir()  # has the effect of a full disk
    try:
        with trainer.isolated():
            trainer.save()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it went on")


def refused(rank: int, folder: Path) -> list[str]:
    said = []
    for work in (
        lambda: letters(folder, rank, Letters()),
        lambda: Ranks.here().part((torch.zeros(3, 1),), (1,)),
        lambda: Ranks.here().part((torch.zeros(3, 2), torch.zeros(2)), (1,)),
    ):
        try:
            work()
        except ValueError as error:
            said.append(str(error))
    return said


def drawn(rank: int, folder: Path) -> torch.Tensor:
    """The random numbers of the second step."""
    seen = []

    class Drawing(Parted):
        def loss(self, *batch: Any) -> Any:
            seen.append(torch.rand(4))
            return super().loss(*batch)

    letters(folder, rank, Drawing(), steps=2).run()
    return seen[1]


def cases(folder: Path) -> dict[str, Any]:
    """What to call with the rank."""
    found: dict[str, Any] = {
        f"run {name}": lambda rank, name=name: run(name, folder / name, rank).progress.history
        for name in RUNS
    }
    found["one, then two"] = lambda rank: run("digits", folder / "one-then-two", rank).progress.step
    found["two, then one"] = lambda rank: (
        run("digits", folder / "two-then-one", rank, stop=3).progress.step
    )
    others = (stopped_and_resumed, interrupted, diverged, full_disk, refused, drawn)
    for work in others:
        found[work.__name__] = lambda rank, work=work: work(rank, folder / work.__name__)
    return found
