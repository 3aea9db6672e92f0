"""The fair comparison: every model at its best learning rate, with the same number of steps."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

from rbn.experiments.paper.numbers import NAMES
from rbn.experiments.paper.published import Result

COLUMNS = ("model", "test, each seed", "learning rate", "time (LSTM = 1)")
READER_TAG = "best-rate"
_READER_TASK = "dailymail-built"
_IMAGES = "--set epochs=40 --set evaluate_every=1000 --set decay_from=0.5"
_OPTIONS = {
    "ptb": "--precision bf16-mixed --set epochs=10 --set decay_from=0.5",
    "pmnist": _IMAGES,
    "mnist": _IMAGES,
}
_MODELS = ("lstm", "bn-lstm", "ln-lstm")
_READERS = ("lstm", "bi-lstm", "bn-lstm", "bn-everywhere", "bn-e*", "bn-e**")
_NEEDED = (
    "task",
    "phase",
    "model",
    "rate",
    "seed",
    "state",
    "steps",
    "of_steps",
    "test",
    "seconds",
)


@dataclass(frozen=True)
class _Task:
    title: str
    unit: str
    percent: bool
    higher_is_better: bool

    def shown(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.percent else f"{value:.3f}"


_TASKS = {
    "ptb": _Task("Penn Treebank", "bits per character", False, False),
    "pmnist": _Task("Permuted MNIST", "accuracy, %", True, True),
    "mnist": _Task("MNIST in order", "accuracy, %", True, True),
}
_READER = _Task("Attentive Reader, four sentences", "error rate, %", True, False)


@dataclass(frozen=True)
class _ModelRuns:
    """The runs of a model at its best learning rate; without values, why there are none."""

    model: str
    rate: str = ""
    values: tuple[float, ...] = ()
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The models on one task.

    Attributes:
        title: the task, the number of steps and the unit.
        rows: a row for each model, one cell for each of `COLUMNS`.
        verdict: a sentence about the best model.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    verdict: str


def read_comparison(path: Path) -> list[dict[str, str]]:
    """The rows of ``comparison.csv``, which ``benchmarks/compare_rates.py`` writes."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        absent = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
        if absent:
            raise ValueError(f"{path} is not a comparison: it has no column {', '.join(absent)}")
        return list(reader)


def compare(rows: Sequence[dict[str, str]], runs: Iterable[Result]) -> list[Comparison]:
    """A comparison for each task: those in `rows`, and the reader's from its published runs."""
    found = []
    for name, task in _TASKS.items():
        own = [row for row in rows if row["task"] == name]
        best = [row for row in own if row["phase"] == "best"]
        if best:
            steps = max(int(row["of_steps"]) for row in best)
            found.append(_comparison(task, steps, [_from_rows(own, model) for model in _MODELS]))
    readers = [run for run in runs if (run.task, run.tag) == (_READER_TASK, READER_TAG)]
    if readers:
        steps = max(int(run.values["steps"]) for run in readers)
        models = [_from_results(readers, model) for model in _READERS]
        found.append(_comparison(_READER, steps, [each for each in models if each.values]))
    return found


def rate_table(rows: Sequence[dict[str, str]], task: str) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a task's test results at every learning rate, for one seed."""
    grid = [row for row in rows if (row["task"], row["phase"]) == (task, "grid")]
    rates = sorted({row["rate"] for row in grid}, key=float)
    cells = []
    for model in _MODELS:
        by_rate = {row["rate"]: _state(row, _TASKS[task]) for row in grid if row["model"] == model}
        if by_rate:
            cells.append([NAMES[model], *(by_rate.get(rate, "") for rate in rates)])
    return ["model", *rates], cells


def commands(rows: Sequence[dict[str, str]]) -> list[str]:
    """The commands that train the runs of ``comparison.csv``."""
    lines = []
    for task, options in _OPTIONS.items():
        grid = [row for row in rows if (row["task"], row["phase"]) == (task, "grid")]
        if grid:
            models = ",".join(dict.fromkeys(row["model"] for row in grid))
            rates = ",".join(sorted({row["rate"] for row in grid}, key=float))
            command = f"python benchmarks/compare_rates.py {task}"
            lines.append(f"{command} --models {models} --rates {rates} {options}")
            lines.append(f"{command} --best runs/rates/rates.csv --seeds 1,2,3 {options}")
    return lines


def exceptions(rows: Sequence[dict[str, str]]) -> list[str]:
    """Sentences about models that are not shown at the rate with the best validation result."""
    sentences = []
    for (name, task), model in product(_TASKS.items(), _MODELS):
        own = [row for row in rows if (row["task"], row["model"]) == (name, model)]
        shown = {row["rate"] for row in own if row["phase"] == "best"}
        grid = [row for row in own if (row["phase"], row["state"]) == ("grid", "finished")]
        if not grid or not shown:
            continue
        pick = max if task.higher_is_better else min
        best = pick(grid, key=lambda row: float(row["valid"]))["rate"]
        if best not in shown:
            failed = [r for r in own if r["rate"] == best and r["state"] != "finished"]
            why = ", ".join(f"seed {row['seed']} {_state(row, task)}" for row in failed)
            sentences.append(
                f"{task.title}, {NAMES[model]}: {best} has the better validation result for one "
                f"seed, but other seeds did not finish ({why})."
            )
    return sentences


def task_title(task: str) -> str:
    """Title and unit of a task of ``comparison.csv``."""
    return f"{_TASKS[task].title}, {_TASKS[task].unit}"


def _state(row: dict[str, str], task: _Task) -> str:
    if row["state"] == "finished":
        return task.shown(float(row["test"]))
    return f"{row['state']} at step {int(row['steps']):,}" if row["steps"] else row["state"]


def _from_rows(rows: Sequence[dict[str, str]], model: str) -> _ModelRuns:
    own = [row for row in rows if row["model"] == model]
    best = [row for row in own if row["phase"] == "best" and row["state"] == "finished"]
    if best:
        values = tuple(float(row["test"]) for row in best)
        seconds = mean(float(row["seconds"]) for row in best)
        return _ModelRuns(model, best[0]["rate"], values, seconds)
    states = {row["state"] for row in own}
    note = {frozenset(): "not run", frozenset({"diverged"}): "diverges at every rate"}
    return _ModelRuns(model, note=note.get(frozenset(states), "not finished"))


def _from_results(runs: Sequence[Result], model: str) -> _ModelRuns:
    own = sorted((run for run in runs if run.model == model), key=lambda run: run.seed)
    if not own:
        return _ModelRuns(model)
    values = tuple(float(run.values["test"]) for run in own)
    rate = _scientific(own[0].config["optimizer"]["lr"])
    return _ModelRuns(model, rate, values, 60 * mean(run.minutes for run in own))


def _scientific(value: float) -> str:
    """A number such as 2.5e-3."""
    mantissa, exponent = f"{value:.10e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _comparison(task: _Task, steps: int, models: Sequence[_ModelRuns]) -> Comparison:
    baseline = next((each.seconds for each in models if each.model == "lstm"), 0.0)
    rows = []
    for each in models:
        values = ", ".join(map(task.shown, each.values)) or each.note
        time = f"{each.seconds / baseline:.1f}" if baseline and each.values else ""
        rows.append((NAMES[each.model], values, each.rate, time))
    title = f"{task.title}, {steps:,} steps: {task.unit}"
    return Comparison(title, tuple(rows), _verdict(task, models))


def _verdict(task: _Task, models: Sequence[_ModelRuns]) -> str:
    """The models from best to worst, by the mean of their seeds."""
    trained = [each for each in models if each.values]
    trained.sort(key=lambda each: mean(each.values), reverse=task.higher_is_better)
    ranking = ", ".join(f"{NAMES[each.model]} {task.shown(mean(each.values))}" for each in trained)
    return f"{task.title}, mean {task.unit}, best first: {ranking}."
