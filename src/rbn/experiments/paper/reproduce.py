"""Reproduces tables and figures: trains missing runs, reuses the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rbn import data
from rbn.data.errors import DataNotFound
from rbn.experiments import results as published
from rbn.experiments import run_folder
from rbn.experiments.paper import finding, findings, gradients, plan
from rbn.experiments.paper.estimate import format_duration, seconds_of
from rbn.experiments.paper.lines import Panel, write_csv
from rbn.experiments.paper.plan import Run
from rbn.experiments.paper.published import Result, read_results
from rbn.experiments.paper.result_set import COMPUTED
from rbn.experiments.paper.trained_runs import (
    lengths_path,
    measure_lengths,
    save_statistics,
    statistics_path,
)
from rbn.experiments.progress_bars import ProgressBars
from rbn.experiments.training_session import TrainingSession

if TYPE_CHECKING:
    from rich.console import Console

_BATCH = 100  # sequences of Figure 1a
_SMALL = 128  # largest hidden size that leaves most of a GPU idle
_AT_ONCE = 6  # runs with such layers that share a GPU
_COMPUTED = {"fig1a": 40.0, "fig1b": 2.0}  # seconds, for one seed
_FINDINGS = {"shared-stats": 30.0, "small-gamma": 40.0, "no-noise": 40.0, "data-start": 180.0}


@dataclass
class Reproduction:
    """Tables, figures and findings to reproduce, and the state of the work.

    Attributes:
        targets: names of tables, figures and findings.
        recipe: ``short``, ``paper`` or ``quick``.
        seeds: runs of each model.
        results: folder of published results.
        runs: folder of training runs.
        device: the device to train on.
        root: the data folder.
        precision: overrides the precision of all configs.
        max_minutes: save and stop after this time.
        questions: task of the readers, one of `plan.QUESTIONS`.
        notes: sentences about what could not be done.
        left_out: whether something was skipped because data are missing.
    """

    targets: Sequence[str]
    recipe: str
    seeds: int
    results: Path
    runs: Path
    device: torch.device
    root: Path | None = None
    precision: str | None = None
    max_minutes: float | None = None
    questions: str = plan.QUESTIONS[0]
    notes: list[str] = field(default_factory=list)
    left_out: bool = False

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"max-minutes must be positive, got {self.max_minutes}")
        self._began = time.monotonic()

    @property
    def quick(self) -> bool:
        """Whether small embedded data sets replace the paper's."""
        return self.recipe == "quick"

    def _needed(self, targets: Sequence[str]) -> list[Run]:
        return plan.needed(
            targets, self.recipe, self.seeds, self.runs, self.precision, self.questions
        )

    def to_measure(self) -> list[tuple[Run, str]]:
        """Trained models that have yet to be measured for Figures 3b and 5."""
        paths = {"fig3b": lengths_path, "fig5": statistics_path}
        return [
            (run, target)
            for target, path in paths.items()
            if target in self.targets
            for run in self._needed([target])
            if not path(self.results, run.config, run.seed).exists()
        ]

    def to_train(self) -> list[Run]:
        """Runs without a result, or without a model that a figure needs."""
        known = read_results(self.results)
        models = {run.folder for run, _ in self.to_measure() if not run.has_model}
        return [
            run
            for run in self._needed(self.targets)
            if run.result_in(known) is None or run.folder in models
        ]

    def to_compute(self) -> list[str]:
        """Figures and findings that need no training runs and are still missing."""
        folders = {name: self.results / COMPUTED / f"{name}.csv" for name in _COMPUTED}
        folders |= {n: self.results / finding.FOLDER / f"{n}.json" for n in _FINDINGS}
        return [t for t in self.targets if t in folders and not folders[t].exists()]

    def listing(self) -> tuple[list[tuple[str, str, str]], float]:
        """All work as rows of name, state and estimated time; and the total in seconds."""
        known = read_results(self.results)
        missing = {run.folder for run in self.to_train()}
        total = sum(self._seconds(group, known) for group in self._groups(self.to_train()))
        rows = []
        for run in self._needed(self.targets):
            if run.folder not in missing:
                rows.append((run.title, "done", ""))
                continue
            seconds = self._seconds([run], known)
            state = "to train" if run.result_in(known) is None else "to train again, for its model"
            if (run.folder / "last.safetensors").exists():
                state = "to resume"
            rows.append((run.title, state, format_duration(seconds)))
        for run, target in self.to_measure():
            rows.append((f"{run.title}, for {target}", "to measure", ""))
        for name in self.to_compute():
            seconds = self._compute_seconds(name)
            total += seconds
            rows.append((name, "to compute", format_duration(seconds)))
        return rows, total

    def _seconds(self, group: Sequence[Run], known: list[Result]) -> float:
        return max(seconds_of(run.config, self.device, known) for run in group)

    def _compute_seconds(self, name: str) -> float:
        rate = (_COMPUTED | _FINDINGS)[name]
        return rate / 4 if self.quick else rate * self.seeds

    def _left(self) -> float | None:
        """Minutes left, or None without a limit."""
        if self.max_minutes is None:
            return None
        return self.max_minutes - (time.monotonic() - self._began) / 60

    def work(self, console: Console) -> bool:
        """Do all the work. Returns False if the time ran out."""
        before = torch.get_num_threads()
        if self.quick:  # too small to gain from a second thread, which is slower on busy cores
            torch.set_num_threads(1)
        try:
            return self._work(console)
        finally:
            torch.set_num_threads(before)

    def _work(self, console: Console) -> bool:
        for run in (*self.to_train(), *(run for run, _ in self.to_measure())):
            run_folder.check_available(run.folder, run.config, run.seed)
        groups, computing = self._groups(self.to_train()), self.to_compute()
        known = read_results(self.results)
        seconds = [self._seconds(group, known) for group in groups]
        seconds += [self._compute_seconds(name) for name in computing]
        absent: set[str] = set()
        for number, group in enumerate(groups):
            left = self._left()
            if left is not None and left <= 0:
                return False
            task = group[0].config.task
            if task in absent:
                continue
            _headline(console, number, "; ".join(run.title for run in group), seconds)
            try:
                if not self._train(group, console, left):
                    return False
            except DataNotFound as error:
                absent.add(task)
                self._leave_out(task, error)
        for number, name in enumerate(computing, start=len(groups)):
            left = self._left()
            if left is not None and left <= 0:
                return False
            _headline(console, number, name, seconds)
            self._compute(name)
        return self._measure(console)

    def _leave_out(self, what: str, why: DataNotFound) -> None:
        self.left_out = True
        self.notes.append(f"{what} was skipped: {why}")

    def _groups(self, todo: Sequence[Run]) -> list[list[Run]]:
        """Runs to train together: several small ones of one task on a GPU, otherwise one each."""
        groups: list[list[Run]] = []
        before = None
        for run in todo:
            small = self.device.type == "cuda" and run.config.hidden_size <= _SMALL
            kind = run.config.task if small else None
            if kind is not None and kind == before and len(groups[-1]) < _AT_ONCE:
                groups[-1].append(run)
            else:
                groups.append([run])
            before = kind
        return groups

    def _train(self, group: Sequence[Run], console: Console, minutes: float | None) -> bool:
        """Train runs to the end and publish them. Returns False if the time ran out."""
        todo = [r for r in group if not ((r.folder / "result.json").exists() and r.has_model)]
        in_time = True
        if todo:
            runs = [(run.folder, run.config, run.seed) for run in todo]
            commands = [run.job.command for run in todo]
            session = TrainingSession(runs, self.device, self.root, commands)
            with ProgressBars(console) as bars:
                session.train(max_minutes=minutes, observer=bars)
            for sentence in session.results(console):
                console.print(sentence, soft_wrap=True, highlight=False, markup=False)
            for run, trainer in zip(todo, session.trainers, strict=True):
                step = trainer.progress.diverged_at
                if step is not None:
                    model = run.folder / "diverged.safetensors"
                    self.notes.append(
                        f"{run.title}: training diverged at step {step}. The model when this was "
                        f"detected is in {model}."
                    )
                elif not trainer.progress.finished:
                    in_time = False
        for run in group:
            finished = (run.folder / "result.json").exists()
            if finished and run.result_in(read_results(self.results)) is None:
                published.publish(run.folder, self.results, replace=True)
        return in_time

    def _compute(self, name: str) -> None:
        if name in _FINDINGS:
            findings.run_experiment(name, self.seeds, self.quick, self.results)
            return
        if name == "fig1b":
            panels = [Panel("", "", "", (gradients.tanh_derivative(),))]
        else:
            panels = self._gradient_flow()
        if panels:
            write_csv(panels, self.results / COMPUTED / f"{name}.csv")

    def _gradient_flow(self) -> list[Panel]:
        if self.quick:
            return gradients.gradient_panels(data.digits().train.first(_BATCH), seeds=(1,))
        try:
            images = data.mnist(root=self.root)
        except DataNotFound as error:
            self._leave_out("fig1a", error)
            return []
        seeds = range(1, self.seeds + 1)
        return gradients.gradient_panels(images.train.first(_BATCH), seeds=seeds)

    def _measure(self, console: Console) -> bool:
        for run, target in self.to_measure():
            left = self._left()
            if left is not None and left <= 0:
                return False
            if not run.has_model:
                continue  # its data are missing, or it diverged; `notes` says so
            console.print(f"Measuring {run.title} for {target} ...", style="dim", soft_wrap=True)
            if target == "fig5":
                save_statistics(run.folder, self.results)
            else:
                measure_lengths(run.folder, self.results, self.device, self.root)
        return True


def _headline(console: Console, number: int, title: str, seconds: list[float]) -> None:
    """Print the next job, its estimated time, and the time of all remaining ones."""
    console.print(
        f"[{number + 1} of {len(seconds)}] {title}: about {format_duration(seconds[number])}, "
        f"{format_duration(sum(seconds[number:]))} left in total",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
