"""The runs that each table and figure needs."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rbn.experiments import config as configs
from rbn.experiments.config import Config
from rbn.experiments.paper.published import Result

TABLE_TARGETS = ("table1", "table2", "table3", "table4")
FIGURE_TARGETS = (
    *("fig1a", "fig1b", "fig2", "fig3a", "fig3b"),
    *("fig4a", "fig4b", "fig5", "fig6"),
)
FINDING_TARGETS = ("shared-stats", "small-gamma", "no-noise", "data-start")
TARGETS = (*TABLE_TARGETS, *FIGURE_TARGETS, *FINDING_TARGETS)
RECIPES = ("short", "paper", "quick")
SHORT = ("rmsprop", "short")  # tags of the recipe "short"; a task uses the first it has
SWEEP = (0.1, 0.3, 0.5, 0.7, 1.0)  # initial gammas of Figure 6
QUESTIONS = ("cnn-built", "cnn")  # built from articles; the paper's archive
READERS = ("lstm", "bn-lstm", "bn-everywhere", "bn-e*", "bn-e**")
ONE_SEED = ("fig3b", "fig5", "fig6")  # one run for each line, as in the paper

_BOTH = ("lstm", "bn-lstm")
_QUICK_TEXT = ("epochs=1", "length=100", "evaluate_every=40")
_QUICK = {
    "mnist": ("digits", "digits", ("tag=quick", "epochs=8")),
    "pmnist": ("digits", "digits", ("tag=quick-permuted", "epochs=8", "data.permuted=true")),
    "ptb": ("pydoc", "pydoc", ("tag=quick", "hidden_size=48", *_QUICK_TEXT)),
    "text8": ("pydoc", "pydoc", ("tag=quick-large", "hidden_size=64", *_QUICK_TEXT)),
    "cnn": ("cloze", "cloze", ("tag=quick", "epochs=2", "evaluate_every=20")),
    "cnn-full": ("cloze", "cloze", ("tag=quick", "epochs=2", "evaluate_every=20")),
}
_QUICK_SWEEP: dict[str, tuple[str, ...]] = {"pmnist": ("epochs=4",), "ptb": ()}
# Figure 6 compares learning curves at a constant rate; the first epochs are enough for that.
# On images the optimizer is that of the authors' code, with a decay of 0.5.
_SWEEP = {
    "pmnist": ("epochs=40", "optimizer.alpha=0.5", "optimizer.momentum=0"),
    "ptb": ("epochs=8", "patience=null"),
}


@dataclass(frozen=True)
class Job:
    """Settings of a model, without a seed.

    Attributes:
        task: name of the task.
        model: the recurrent layer or reader.
        base: name of the config.
        settings: changes to the config, as ``key=value``.
    """

    task: str
    model: str
    base: str
    settings: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that trains it, without a seed."""
        base = "" if self.base == self.task else f" --config {self.base}"
        changes = "".join(f" --set {setting}" for setting in self.settings)
        return f"rbn train {self.task} --model {shlex.quote(self.model)}{base}{changes}"

    def config(self) -> Config:
        """All settings, combined as in ``rbn train``."""
        values = configs.read_yaml(configs.find(self.base))
        chosen = configs.for_model(values, self.model)
        settings = configs.from_mapping({"task": self.task, **chosen})
        return configs.with_settings(settings, self.settings)


@dataclass(frozen=True)
class Run:
    """A job with a seed and a folder."""

    job: Job
    config: Config
    seed: int
    folder: Path

    @property
    def title(self) -> str:
        """The name shown in lists and progress."""
        return f"{self.config.task}, {self.config.name}, seed {self.seed}"

    @property
    def has_model(self) -> bool:
        """Whether it was trained to the end on this machine."""
        return (self.folder / "final.safetensors").exists()

    def result_in(self, results: Iterable[Result]) -> Result | None:
        """The published result of this run, if there is one."""
        wanted = (self.config.task, self.config.model, self.config.tag, self.seed)
        for result in results:
            if (result.task, result.model, result.tag, result.seed) == wanted:
                return result
        return None


def jobs(target: str, recipe: str = "short", questions: str = QUESTIONS[0]) -> list[Job]:
    """The runs that a target needs; none for targets that need no training."""
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)} or all, got {target!r}")
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    if questions not in QUESTIONS:
        raise ValueError(f"questions must be one of {', '.join(QUESTIONS)}, got {questions!r}")
    wanted: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "table1": (("mnist", "pmnist"), _BOTH),
        "fig2": (("mnist", "pmnist"), _BOTH),
        "table2": (("ptb",), _BOTH),
        "fig3a": (("ptb",), _BOTH),
        "fig3b": (("ptb",), _BOTH),
        "fig5": (("ptb",), ("bn-lstm",)),
        "table3": (("text8",), _BOTH),
        "table4": (("cnn-full",), ("lstm", "bn-e**")),
        "fig4a": (("cnn",), READERS),
        "fig4b": (("cnn-full",), ("lstm", "bn-e**")),
    }
    if target == "fig6":
        return [
            _sweep_job(paper_task, gamma, recipe)
            for paper_task in ("pmnist", "ptb")
            for gamma in SWEEP
        ]
    tasks, models = wanted.get(target, ((), ()))
    return [_job(paper_task, model, recipe, questions) for paper_task in tasks for model in models]


def _job(paper_task: str, model: str, recipe: str, questions: str) -> Job:
    if recipe == "quick":
        task, base, settings = _QUICK[paper_task]
        return Job(task, model, base, settings)
    if paper_task in ("cnn", "cnn-full"):
        return Job(questions, model, questions + paper_task.removeprefix("cnn"))
    known = configs.names() if recipe == "short" else []
    short = (name for tag in SHORT if (name := f"{paper_task}-{tag}") in known)
    return Job(paper_task, model, next(short, paper_task))


def _sweep_job(paper_task: str, gamma: float, recipe: str) -> Job:
    own = (f"tag=gamma-{gamma:g}", f"normalization.gamma={gamma:g}")
    if recipe == "quick":
        task, base, settings = _QUICK[paper_task]
        return Job(task, "bn-lstm", base, (*settings, *_QUICK_SWEEP[paper_task], *own))
    return Job(paper_task, "bn-lstm", paper_task, (*_SWEEP[paper_task], *own))


def needed(
    targets: Iterable[str],
    recipe: str,
    seeds: int,
    folder: Path,
    precision: str | None = None,
    questions: str = QUESTIONS[0],
) -> list[Run]:
    """All runs of some targets, without duplicates. Targets in `ONE_SEED` need only one seed.

    Args:
        targets: names of targets.
        recipe: ``short``, ``paper`` or ``quick``.
        seeds: number of seeds; the first is 1.
        folder: parent of the run folders.
        precision: overrides the config's.
        questions: task of the readers, one of `QUESTIONS`.
    """
    unique: dict[tuple[Job, int], Run] = {}
    for target in targets:
        one = target in ONE_SEED
        for job in jobs(target, recipe, questions):
            if precision is not None:
                changed = (*job.settings, f"precision={precision}")
                job = Job(job.task, job.model, job.base, changed)
            config = job.config()
            for seed in range(1, 2 if one else seeds + 1):
                run_folder = folder / config.task / f"{config.name}-seed{seed}"
                unique.setdefault((job, seed), Run(job, config, seed, run_folder))
    return list(unique.values())
