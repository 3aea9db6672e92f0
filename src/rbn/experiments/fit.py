"""Training runs with a progress bar, one or several at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rbn.experiments import build, results, runs
from rbn.experiments.config import Config
from rbn.experiments.reading import ReadingTask
from rbn.experiments.tasks import Classification, NextSymbol
from rbn.training import Diverged, Progress, Trainer, train_together

if TYPE_CHECKING:
    from rich.console import Console

Wanted = tuple[Path, Config, int]  # folder, settings, seed


class Fit:
    """Runs that are trained in turns on one device.

    Args:
        wanted: folder, settings and seed of each.
        device: of all.
        root: where the data are; ``RBN_DATA`` by default.
        command: with which they could be done again, less the seed; by default a short one.
    """

    def __init__(
        self,
        wanted: Sequence[Wanted],
        device: torch.device,
        root: Path | None = None,
        command: str | None = None,
    ) -> None:
        for folder, config, seed in wanted:
            runs.check_free(folder, config, seed)
        self.wanted, self.device, self.root, self.command = list(wanted), device, root, command
        self.trainers: list[Trainer] = []
        self.diverged: Diverged | None = None  # what the first run that diverged says

    def train(
        self,
        graph: bool | None = None,
        tensorboard: bool = False,
        max_minutes: float | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Train all, from where they are, to their end or until the time is over.

        graph: whether steps are CUDA graphs; None: on a GPU, where the precision allows it.
        """
        loaded: dict[str, Any] = {}
        for folder, config, seed in self.wanted:
            key = f"{config.task} {sorted(config.data.items())}"
            try:
                if key not in loaded:
                    loaded[key] = build.load(config, self.device, self.root)
                task = build.build(config, seed, self.device, loaded=loaded[key])
            except TypeError as error:  # an option that the layer or the data set does not have
                raise ValueError(f"the settings do not fit: {error}") from error
            runs.start(folder, config, seed, self.command)
            captured = self.device.type == "cuda" and config.precision != "16-mixed"
            trainer = build.make_trainer(
                config, task, folder, max_minutes, graph=captured if graph is None else graph
            )
            self.trainers.append(trainer)
            if watch is not None:
                watch.add(trainer, config, task)
            if tensorboard:
                self._write_scalars(trainer)
        try:
            train_together(self.trainers)
        except Diverged as error:
            self.diverged = error

    @staticmethod
    def _write_scalars(trainer: Trainer) -> None:
        from rbn.training.scalars import Scalars

        scalars = Scalars(trainer.folder / "tensorboard", trainer.progress.step)
        shown = trainer.on_record

        def on_record(record: dict[str, float]) -> None:
            scalars.write(record)
            if shown is not None:
                shown(record)

        trainer.on_record = on_record

    def results(self, console: Console | None = None) -> Iterator[str]:
        """Test the runs that are over, and say what came out of each in a sentence.

        A run that diverged is over too: its best model is from before that.
        """
        for (folder, config, seed), trainer in zip(self.wanted, self.trainers, strict=True):
            now = trainer.progress
            if not (now.finished or (now.diverged_at is not None and trainer.best.exists())):
                continue
            if console is not None and self.device.type == "cpu":
                console.print(f"Testing {folder} ...", style="dim", soft_wrap=True)
            command = runs.command_of(folder)
            result = results.finish(config, seed, trainer, command, len(self.wanted))
            yield (
                f"{config.task}, {config.name}, seed {seed}: test {result['test']:.4f} "
                f"({result['metric']}), validation {result['valid']:.4f}, best at step "
                f"{now.best_step:,} of {now.step:,}. "
                f"In {folder / 'result.json'}."
            )


class Watch:
    """A progress bar for each of the runs of a `Fit`: speed, time left, loss and validation."""

    def __init__(self, fit: Fit, console: Console) -> None:
        from rich.progress import Progress as Bars
        from rich.progress import SpinnerColumn, TextColumn, TimeRemainingColumn

        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TextColumn("step {task.completed:,} of {task.total:,}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]} {task.fields[valid]}"),
            console=console,
        )
        self._several = len(fit.wanted) > 1

    def __enter__(self) -> Watch:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bars as they are."""
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
        unit = "characters" if config.is_text else "sequences"
        begun: list[tuple[int, float]] = []

        def on_step(now: Progress) -> None:
            if not begun:
                begun.append((now.step, now.seconds))
            elif now.step % 10 == 0:
                speed = (now.step - begun[0][0]) / max(now.seconds - begun[0][1], 1e-9)
                text = f"{speed:,.1f} steps/s, {speed * task.items_per_step:,.0f} {unit}/s"
                shown = f"loss {now.loss:.3f}"
                self._bars.update(line, completed=now.step, loss=shown, speed=text)

        def on_record(record: dict[str, float]) -> None:
            text = f"validation {record['valid_batch']:.4f}, {record['valid_population']:.4f}"
            self._bars.update(line, valid=text)

        trainer.on_step, trainer.on_record = on_step, on_record
