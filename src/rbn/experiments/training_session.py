"""Trains one or several runs from their configs, and tests them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from rbn.experiments import build, results, run_folder
from rbn.experiments.base_task import BaseTask
from rbn.experiments.config import Config
from rbn.training import (
    Diverged,
    Ranks,
    Trainer,
    World,
    check_devices,
    make_fabric,
    train_interleaved,
)
from rbn.training.tensorboard import TensorBoardLog

if TYPE_CHECKING:
    from rich.console import Console

Run = tuple[Path, Config, int]  # folder, settings, seed


class Observer(Protocol):
    """Observes the runs of a `TrainingSession`, such as `ProgressBars`."""

    def add(self, trainer: Trainer, task: BaseTask) -> None:
        """Called with each run before training; may add callbacks to the trainer."""


def check_processes(
    runs: Sequence[Run], device: torch.device, local: int, count: int, graph: bool | None
) -> None:
    """Reject, before any work, what several processes cannot train.

    Args:
        runs: folder, settings and seed of each run.
        device: device of each process.
        local: number of processes on this machine.
        count: number of processes on all machines.
        graph: whether the user asked for CUDA graphs.
    """
    check_devices(device, local)
    if count == 1:
        return
    if len(runs) > 1:
        raise ValueError(
            f"{len(runs)} runs at once share one device; with {count} devices train one run at a "
            "time"
        )
    if graph:
        raise ValueError(f"graph needs a single device, got {count}")
    for _, config, _ in runs:
        synced = config.normalization.get("sync_stats", False)
        least = 2 if config.batch_normalized and not synced else 1
        if config.batch_size < least * count:
            raise ValueError(
                f"batch_size must be at least {least} for each of {count} devices, "
                f"got {config.batch_size}"
            )


class TrainingSession:
    """Runs that are trained interleaved on one device, or one run trained by several processes.

    Args:
        runs: folder, settings and seed of each run.
        device: device of all runs; with several processes, of this one.
        root: the data folder; ``RBN_DATA`` by default.
        command: command that reproduces the runs, without the seed: one for all, or one for each;
            by default a short one.
        loaded: data that are already loaded on this device; data that these runs load are added.
        world: rank of this process; None for a single process.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        device: torch.device,
        root: Path | None = None,
        command: str | Sequence[str] | None = None,
        loaded: dict[str, build.Loaded] | None = None,
        world: World | None = None,
    ) -> None:
        for folder, config, seed in runs:
            run_folder.check_available(folder, config, seed)
        self.runs, self.device, self.root = list(runs), device, root
        self.commands: list[str | None] = (
            [command] * len(self.runs)
            if command is None or isinstance(command, str)
            else list(command)
        )
        self.loaded = {} if loaded is None else loaded
        self.world = world
        self.trainers: list[Trainer] = []
        self.diverged: Diverged | None = None  # the error of the first run that diverged

    def train(
        self,
        graph: bool | None = None,
        tensorboard: bool = False,
        max_minutes: float | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Train all runs, from their last checkpoints, to the end or until the time runs out.

        Args:
            graph: capture steps as CUDA graphs. Default: on a GPU, if the precision allows it.
            tensorboard: write learning curves for TensorBoard.
            max_minutes: save and stop after this time.
            observer: observes the runs.
        """
        with contextlib.ExitStack() as locks:
            for run, command in zip(self.runs, self.commands, strict=True):
                trainer, task = self._start(run, command, graph, max_minutes, locks)
                self.trainers.append(trainer)
                if observer is not None:
                    observer.add(trainer, task)
                if tensorboard and trainer.ranks.first:
                    log = TensorBoardLog(trainer.folder / "tensorboard", trainer.progress.step)
                    trainer.record_callbacks.append(log.write)
            unfinished = [trainer for trainer in self.trainers if not trainer.progress.finished]
            for trainer in unfinished:
                trainer.progress.together = max(trainer.progress.together, len(unfinished))
            try:
                train_interleaved(self.trainers)
            except Diverged as error:
                self.diverged = error

    def _start(
        self,
        run: Run,
        command: str | None,
        graph: bool | None,
        max_minutes: float | None,
        locks: contextlib.ExitStack,
    ) -> tuple[Trainer, BaseTask]:
        """Make a run's trainer and task. The folder stays locked until `locks` is closed."""
        folder, config, seed = run

        def lock() -> None:
            locks.enter_context(run_folder.locked(folder))

        fabric = make_fabric(self.device, config.precision, self.world)
        ranks = Ranks.here()
        try:
            build.check(config)
            loaded = ranks.in_turn(partial(self.load, config))
            task = build.build(config, seed, self.device, loaded=loaded)
        except TypeError as error:  # an option has the wrong type
            raise ValueError(f"the settings are not valid: {error}") from error
        exists = ranks.from_first((folder / "config.json").exists)
        if exists:
            ranks.from_first(lock)
        if graph is None:
            on_gpu = self.device.type == "cuda"
            graph = on_gpu and config.precision != "16-mixed" and ranks.count == 1
        trainer = build.make_trainer(
            config,
            task,
            folder,
            max_minutes,
            fabric=fabric,
            graph=graph,
        )
        if not exists:  # after the trainer, so that invalid options leave no folder
            ranks.from_first(partial(run_folder.create, folder, config, seed, command))
            ranks.from_first(lock)
        return trainer, task

    def load(self, config: Config) -> build.Loaded:
        """The data of a config. Runs with the same data share them."""
        key = f"{config.task} {sorted(config.data.items())}"
        if key not in self.loaded:
            self.loaded[key] = build.load(config, self.device, self.root)
        return self.loaded[key]

    def results(self, console: Console | None = None) -> Iterator[str]:
        """Test the finished runs, and yield a sentence with the result of each.

        A run that diverged counts as finished: its best model is from before it diverged.
        """
        for (folder, config, seed), trainer in zip(self.runs, self.trainers, strict=True):
            now = trainer.progress
            diverged = now.diverged_at is not None
            if not (now.finished or (diverged and trainer.ranks.from_first(trainer.best.exists))):
                continue
            result = trainer.ranks.from_first(partial(results.finished, folder, now))
            before = "" if result is None else "already finished, "
            if result is None:
                if console is not None and self.device.type == "cpu":
                    message = f"Testing {folder} ..."
                    console.print(message, style="dim", soft_wrap=True, markup=False)
                result = results.finish(config, seed, trainer, run_folder.command_of(folder))
            test = config.kind.format_test(result["test"], config.statistics())
            valid = config.kind.format_valid(result["valid"], config.statistics())
            yield (
                f"{config.task}, {config.name}, seed {seed}: {before}test {test}, "
                f"validation {valid}, best at step {now.best_step:,} of {now.step:,}. "
                f"In {folder / 'result.json'}."
            )
