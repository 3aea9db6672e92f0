"""Training runs with a progress bar, one or several at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from rbn.experiments import build, results, runs, shown
from rbn.experiments.config import Config
from rbn.experiments.reading import ReadingTask
from rbn.experiments.tasks import Classification, NextSymbol
from rbn.training import (
    Diverged,
    Progress,
    Ranks,
    Trainer,
    World,
    check_devices,
    make_fabric,
    train_interleaved,
)

if TYPE_CHECKING:
    from rich.console import Console

Wanted = tuple[Path, Config, int]  # folder, settings, seed
_NARROWEST = 11  # characters of the words that a progress bar ends with


class Watcher(Protocol):
    """Something that wants to know of the runs of a `Fit`."""

    def add(
        self, trainer: Trainer, config: Config, task: Classification | NextSymbol | ReadingTask
    ) -> None:
        """Called with each run before it is trained."""


def check_together(
    wanted: Sequence[Wanted], device: torch.device, local: int, count: int, graph: bool | None
) -> None:
    """Refuse, before any work, what several processes cannot train.

    Args:
        wanted: folder, settings and seed of each run.
        device: what each process is to have one of.
        local: processes on this machine.
        count: processes on all machines.
        graph: whether CUDA graphs were asked for.
    """
    check_devices(device, local)
    if count == 1:
        return
    if len(wanted) > 1:
        raise ValueError(
            f"{len(wanted)} runs at once share one device; with {count} devices train one run at "
            "a time"
        )
    if graph:
        raise ValueError(f"graph is for one device, and there are {count}")
    for _, config, _ in wanted:
        if config.batch_size < count:
            raise ValueError(
                f"batch_size must be at least 1 for each of {count} devices, "
                f"got {config.batch_size}"
            )


class Fit:
    """Runs that are trained in turns on one device, or one that several processes train together.

    Args:
        wanted: folder, settings and seed of each.
        device: of all; of several processes, of this one.
        root: where the data are; ``RBN_DATA`` by default.
        command: with which they could be done again, less the seed: of all, or of each; by default
            a short one.
        loaded: data that others have loaded on this device, and where these leave theirs.
        world: where this process stands among several; alone by default.
    """

    def __init__(
        self,
        wanted: Sequence[Wanted],
        device: torch.device,
        root: Path | None = None,
        command: str | Sequence[str] | None = None,
        loaded: dict[str, build.Loaded] | None = None,
        world: World | None = None,
    ) -> None:
        for folder, config, seed in wanted:
            runs.check_free(folder, config, seed)
        self.wanted, self.device, self.root = list(wanted), device, root
        self.commands: list[str | None] = (
            [command] * len(self.wanted)
            if command is None or isinstance(command, str)
            else list(command)
        )
        self.loaded = {} if loaded is None else loaded
        self.world = world
        self.trainers: list[Trainer] = []
        self.diverged: Diverged | None = None  # what the first run that diverged says

    def train(
        self,
        graph: bool | None = None,
        tensorboard: bool = False,
        max_minutes: float | None = None,
        watch: Watcher | None = None,
    ) -> None:
        """Train all, from where they are, to their end or until the time is over.

        graph: whether steps are CUDA graphs; None: on a GPU, where the precision allows it.
        """
        with contextlib.ExitStack() as held:
            for wanted, command in zip(self.wanted, self.commands, strict=True):
                trainer, task = self._begin(wanted, command, graph, max_minutes, held)
                self.trainers.append(trainer)
                if watch is not None:
                    watch.add(trainer, wanted[1], task)
                if tensorboard and trainer.ranks.first:
                    self._write_scalars(trainer)
            unfinished = [trainer for trainer in self.trainers if not trainer.progress.finished]
            for trainer in unfinished:
                trainer.progress.together = max(trainer.progress.together, len(unfinished))
            try:
                train_interleaved(self.trainers)
            except Diverged as error:
                self.diverged = error

    def _begin(
        self,
        wanted: Wanted,
        command: str | None,
        graph: bool | None,
        max_minutes: float | None,
        held: contextlib.ExitStack,
    ) -> tuple[Trainer, Classification | NextSymbol | ReadingTask]:
        """A run's trainer, where it is; its folder is held until the stack is closed."""
        folder, config, seed = wanted
        fabric = make_fabric(self.device, config.precision, self.world)
        ranks = Ranks.here()
        try:
            build.check(config)
            loaded = ranks.in_turn(partial(self.load, config))
            task = build.build(config, seed, self.device, loaded=loaded)
        except TypeError as error:  # an option that the layer or the data set does not have
            raise ValueError(f"the settings do not fit: {error}") from error
        there = ranks.from_first((folder / "config.json").exists)
        if there:
            ranks.from_first(partial(_hold, held, folder))
        captured = self.device.type == "cuda" and config.precision != "16-mixed"
        captured = captured and ranks.count == 1
        trainer = build.make_trainer(
            config,
            task,
            folder,
            max_minutes,
            fabric=fabric,
            graph=captured if graph is None else graph,
        )
        if not there:  # after the trainer: a mistake in the options leaves no folder
            ranks.from_first(partial(runs.start, folder, config, seed, command))
            ranks.from_first(partial(_hold, held, folder))
        return trainer, task

    def load(self, config: Config) -> build.Loaded:
        """The data of a config, which runs on the same share."""
        key = f"{config.task} {sorted(config.data.items())}"
        if key not in self.loaded:
            self.loaded[key] = build.load(config, self.device, self.root)
        return self.loaded[key]

    @staticmethod
    def _write_scalars(trainer: Trainer) -> None:
        from rbn.training.tensorboard import TensorBoardLog

        log = TensorBoardLog(trainer.folder / "tensorboard", trainer.progress.step)
        trainer.record_callbacks.append(log.write)

    def results(self, console: Console | None = None) -> Iterator[str]:
        """Test the runs that are over, and say what came out of each in a sentence.

        A run that diverged is over too: its best model is from before that.
        """
        for (folder, config, seed), trainer in zip(self.wanted, self.trainers, strict=True):
            now = trainer.progress
            diverged = now.diverged_at is not None
            if not (now.finished or (diverged and trainer.ranks.from_first(trainer.best.exists))):
                continue
            result = trainer.ranks.from_first(partial(results.finished, folder, now))
            if result is None:
                if console is not None and self.device.type == "cpu":
                    said = f"Testing {folder} ..."
                    console.print(said, style="dim", soft_wrap=True, markup=False)
                result = results.finish(config, seed, trainer, runs.command_of(folder))
            yield (
                f"{config.task}, {config.name}, seed {seed}: test "
                f"{shown.figure(config, result['test'])} ({shown.test_kind(config)}), validation "
                f"{shown.figure(config, result['valid'])}{' (windows)' if config.is_text else ''}, "
                f"best at step {now.best_step:,} of {now.step:,}. In {folder / 'result.json'}."
            )


def _hold(stack: contextlib.ExitStack, folder: Path) -> None:
    stack.enter_context(runs.held(folder))


class Watch:
    """A progress bar for each of the runs of a `Fit`: speed, time left, loss and validation.

    Where the console is no terminal, such as a file, a line at each look at the validation data.
    """

    def __init__(self, fit: Fit, console: Console) -> None:
        from rich.progress import Progress as Bars
        from rich.progress import SpinnerColumn, TextColumn, TimeRemainingColumn
        from rich.table import Column

        # Where all of it does not fit into a line, the last column takes several.
        self._bars = Bars(
            SpinnerColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}"),
            TextColumn("{task.completed:,}/{task.total:,}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.fields[loss]} {task.fields[valid]}",
                table_column=Column(no_wrap=False, min_width=_NARROWEST),
            ),
            console=console,
        )
        self._several = len(fit.wanted) > 1
        self._console = console

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bars as they are."""
        if self._console.is_terminal:
            self._bars.stop()

    def add(
        self, trainer: Trainer, config: Config, task: Classification | NextSymbol | ReadingTask
    ) -> None:
        """Show a run."""
        name = trainer.folder.name if self._several else ""
        line = self._bars.add_task(
            name,
            total=trainer.schedule.steps,
            completed=trainer.progress.step,
            loss="",
            valid="",
            speed="",
        )
        unit = "characters" if config.is_text else "questions" if config.is_reading else "images"
        begun: list[tuple[int, float]] = []
        total = trainer.schedule.steps

        def speed_of(now: Progress) -> tuple[float, str]:
            speed = (now.step - begun[0][0]) / max(now.seconds - begun[0][1], 1e-9)
            return speed, f"{speed:,.1f} steps/s, {speed * task.items_per_step:,.0f} {unit}/s"

        def on_step(now: Progress) -> None:
            if not begun:
                begun.append((now.step, now.seconds))
            elif now.step % 10 == 0 or now.step == total:
                loss = f"train loss {now.loss:.3f} nats"
                self._bars.update(line, completed=now.step, loss=loss, speed=speed_of(now)[1])

        def on_record(record: dict[str, float]) -> None:
            text = f"validation {shown.evaluation(config, record)}"
            self._bars.update(line, valid=text)
            if not self._console.is_terminal:
                now = trainer.progress
                said = [
                    f"{trainer.folder}: step {now.step:,}/{total:,}",
                    f"train loss {record['train']:.3f} nats",
                    text,
                ]
                if begun and now.step > begun[0][0]:
                    speed, words = speed_of(now)
                    left = timedelta(seconds=round((total - now.step) / speed))
                    said[1:1] = [words, f"{left} left"]
                self._console.print("  ".join(said), soft_wrap=True, markup=False, highlight=False)
                self._console.file.flush()

        trainer.step_callbacks.append(on_step)
        trainer.record_callbacks.append(on_record)
