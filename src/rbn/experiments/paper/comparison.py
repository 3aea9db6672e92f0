"""The fair comparison: every model at its best learning rate, with the same number of steps."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rbn.experiments.paper.numbers import NAMES

COLUMNS = ("model", "test, each seed", "learning rate", "steps to the goal", "time (LSTM = 1)")
_IMAGES = "--set epochs=40 --set evaluate_every=1000 --set decay_from=0.5"
_OPTIONS = {
    "ptb": "--precision bf16-mixed --set epochs=10 --set decay_from=0.5",
    "text8": "--precision bf16-mixed --set epochs=1 --set decay_from=0.5 "
    "--set population_batch=128 --set evaluate_every=250 --set valid_windows=5000 "
    "--set 'data.characters=[57600179, 5000000, 200000]'",
    "pmnist": _IMAGES,
    "mnist": _IMAGES,
    "dailymail-built": "--precision bf16-mixed --set epochs=12 --set evaluate_every=1000",
}
# Without noise on the first hidden state, its gradient overflows at every rate.
_OWN_OPTIONS = {("pmnist", "ln-lstm"): " --set layer.hidden_noise=0.1"}
_LAYERS = ("lstm", "bn-lstm", "ln-lstm")
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
    "valid",
    "target",
    "target_step",
    "test",
    "seconds",
)


@dataclass(frozen=True)
class _Task:
    title: str
    unit: str
    percent: bool
    higher_is_better: bool
    tested_on: str = ""
    models: tuple[str, ...] = _LAYERS

    def shown(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.percent else f"{value:.3f}"

    def goal(self, value: float) -> str:
        return f"{100 * value:g} %" if self.percent else f"{value:.2f}"


_TASKS = {
    "ptb": _Task("Penn Treebank", "bits per character", False, False),
    "text8": _Task(
        "text8", "bits per character", False, False, "the first 200,000 test characters"
    ),
    "pmnist": _Task("Permuted MNIST", "accuracy, %", True, True),
    "mnist": _Task("MNIST in order", "accuracy, %", True, True),
    "dailymail-built": _Task(
        "Attentive Reader, four sentences", "error rate, %", True, False, models=_READERS
    ),
}


@dataclass(frozen=True)
class _ModelRuns:
    """The runs of a model at its best learning rate.

    Attributes:
        model: its name.
        rate: the best learning rate; empty if there is none.
        values: test results of the finished runs.
        cells: for each seed, its test result or why there is none; without runs, only why.
        reached: for each seed, the first step that reaches the validation goal, or "never".
        seconds: mean time of the runs that made all steps.
    """

    model: str
    rate: str = ""
    values: tuple[float, ...] = ()
    cells: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """The models on one task.

    Attributes:
        title: the task, the number of steps and the unit.
        rows: a row for each model, one cell for each of `COLUMNS`.
        verdict: a sentence that ranks the models.
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


def compare(rows: Sequence[dict[str, str]]) -> list[Comparison]:
    """A comparison for each task in `rows`."""
    comparisons = []
    for name, task in _TASKS.items():
        own = [row for row in rows if row["task"] == name]
        best = [row for row in own if row["phase"] == "best"]
        if best:
            steps, goal = max(int(row["of_steps"]) for row in best), float(best[0]["target"])
            models = [_from_rows(own, model, task) for model in task.models]
            comparisons.append(_comparison(task, steps, goal, models))
    return comparisons


def rate_table(rows: Sequence[dict[str, str]], task: str) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a task's test results at every learning rate, for one seed."""
    grid = [row for row in rows if (row["task"], row["phase"]) == (task, "grid")]
    rates = sorted({row["rate"] for row in grid}, key=float)
    cells = []
    for model in _TASKS[task].models:
        by_rate = {row["rate"]: _state(row, _TASKS[task]) for row in grid if row["model"] == model}
        if by_rate:
            cells.append([NAMES[model], *(by_rate.get(rate, "") for rate in rates)])
    return ["model", *rates], cells


def commands(rows: Sequence[dict[str, str]]) -> list[str]:
    """The commands that train the runs in ``comparison.csv``."""
    lines = []
    for task, options in _OPTIONS.items():
        grid = [row for row in rows if (row["task"], row["phase"]) == (task, "grid")]
        groups: dict[str, list[str]] = {}
        for model in dict.fromkeys(row["model"] for row in grid):
            groups.setdefault(_OWN_OPTIONS.get((task, model), ""), []).append(model)
        rates = ",".join(sorted({row["rate"] for row in grid}, key=float))
        command = f"python benchmarks/compare_rates.py {task}"
        for own, models in groups.items():
            named = shlex.quote(",".join(models))
            lines.append(f"{command} --models {named} --rates {rates} {options}{own}")
            lines.append(f"{command} --best runs/rates/rates.csv --seeds 1,2,3 {options}{own}")
    return lines


def exceptions(rows: Sequence[dict[str, str]]) -> list[str]:
    """Sentences about learning rates whose choice is uncertain."""
    sentences, edges = [], []
    models = ((name, task, model) for name, task in _TASKS.items() for model in task.models)
    for name, task, model in models:
        own = [row for row in rows if (row["task"], row["model"]) == (name, model)]
        shown = [row for row in own if row["phase"] == "best"]
        grid = [row for row in own if (row["phase"], row["state"]) == ("grid", "finished")]
        if not grid or not shown:
            continue
        sign = -1 if task.higher_is_better else 1
        rate = shown[0]["rate"]
        best = min(grid, key=lambda row: sign * float(row["valid"]))
        average = mean(float(row["valid"]) for row in shown)
        if best["rate"] != rate:
            tried = [row for row in own if row["rate"] == best["rate"]]
            failed = [row for row in tried if row["state"] != "finished"]
            why = ", ".join(f"seed {row['seed']} {_state(row, task)}" for row in failed)
            reason = f"other seeds did not finish ({why})"
            if not failed:
                by_seed = {row["seed"]: float(row["valid"]) for row in tried}
                average_of_other = task.shown(mean(by_seed.values()))
                own_average = task.shown(average)
                if average_of_other == own_average:
                    reason = f"the same mean of {len(by_seed)} seeds ({average_of_other})"
                else:
                    reason = f"a worse mean of {len(by_seed)} seeds"
                    reason += f" ({average_of_other} against {own_average})"
            sentences.append(
                f"{task.title}, {NAMES[model]}: {best['rate']} has the better validation result "
                f"for one seed ({task.shown(float(best['valid']))}), but {reason}."
            )
        others = [
            r
            for r in grid
            if r["rate"] != rate
            and sign * float(r["valid"]) < sign * average
            and sum(other["rate"] == r["rate"] and other["phase"] == "other" for other in own) == 0
        ]
        if others and best["rate"] == rate:
            seeds = ", ".join(f"{r['rate']} ({task.shown(float(r['valid']))})" for r in others)
            sentences.append(
                f"{task.title}, {NAMES[model]}: {rate} was chosen with seed 1. The mean validation "
                f"result of all seeds ({task.shown(average)}) is worse than that of seed 1 at "
                f"{seeds}."
            )
        above = [
            row["state"] == "finished" and sign * float(row["valid"]) > sign * average
            for row in own
            if float(row["rate"]) > float(rate) and row["of_steps"] == shown[0]["of_steps"]
        ]
        tried_higher = bool(above) and all(above)
        if not tried_higher and float(rate) == max(float(row["rate"]) for row in grid):
            edges.append(f"{task.title}, {NAMES[model]} ({rate}{_higher_rates(own, shown[0])})")
    if edges:
        sentences.append(f"The best rate is the highest of the grid: {'; '.join(edges)}.")
    return sentences


def _higher_rates(rows: Sequence[dict[str, str]], shown: dict[str, str]) -> str:
    """How runs at higher rates with the same number of steps ended, if there are any."""
    higher: dict[str, list[str]] = {}
    for row in rows:
        if float(row["rate"]) > float(shown["rate"]) and row["of_steps"] == shown["of_steps"]:
            higher.setdefault(row["rate"], []).append(row["state"])
    return "".join(
        f"; at {rate} {states.count('diverged')} of {len(states)} seeds diverge"
        for rate, states in higher.items()
    )


def task_title(task: str) -> str:
    """Title and unit of a task of ``comparison.csv``."""
    return f"{_TASKS[task].title}, {_TASKS[task].unit}"


def _state(row: dict[str, str], task: _Task) -> str:
    """The test result of a run, or why there is none."""
    if row["state"] == "finished":
        return task.shown(float(row["test"]))
    if row["state"] == "stopped" and row["steps"] == row["of_steps"]:
        return f"not tested (validation {task.shown(float(row['valid']))})"
    return f"{row['state']} at step {int(row['steps']):,}" if row["steps"] else row["state"]


def _from_rows(rows: Sequence[dict[str, str]], model: str, task: _Task) -> _ModelRuns:
    own = [row for row in rows if row["model"] == model]
    best = [row for row in own if row["phase"] == "best"]
    if best:
        # Runs of one grid share the GPU in the same way; other and later runs may not.
        grid = [row for row in rows if row["phase"] == "grid"] or rows
        grid = [row for row in grid if row["steps"] == row["of_steps"]]
        same = {(row["rate"], row.get("commit")) for row in grid if row["model"] == "lstm"}
        timed = [row for row in grid if (row["rate"], row.get("commit")) in same]
        seconds = [float(row["seconds"]) for row in timed if row["model"] == model]
        return _ModelRuns(
            model,
            best[0]["rate"],
            tuple(float(row["test"]) for row in best if row["state"] == "finished"),
            tuple(_state(row, task) for row in best),
            tuple(_step(row["target_step"]) for row in best),
            mean(seconds) if seconds else 0.0,
        )
    states = {row["state"] for row in own}
    note = {frozenset(): "not run", frozenset({"diverged"}): "diverges at every rate"}
    return _ModelRuns(model, cells=(note.get(frozenset(states), "not finished"),))


def _step(text: str) -> str:
    return f"{int(text):,}" if text.isdecimal() else text


def _comparison(task: _Task, steps: int, goal: float, models: Sequence[_ModelRuns]) -> Comparison:
    baseline = next((each.seconds for each in models if each.model == "lstm"), 0.0)
    rows = []
    for each in models:
        same = len(set(each.reached)) == 1
        reached = each.reached[0] if same else " / ".join(each.reached)
        time = f"{each.seconds / baseline:.1f}" if baseline and each.seconds else ""
        rows.append((NAMES[each.model], ", ".join(each.cells), each.rate, reached, time))
    where = f" on {task.tested_on}" if task.tested_on else ""
    title = f"{task.title}, {steps:,} steps: {task.unit}{where}; goal: validation {task.goal(goal)}"
    return Comparison(title, tuple(rows), _verdict(task, models))


def _verdict(task: _Task, models: Sequence[_ModelRuns]) -> str:
    """A sentence that ranks the models by the mean of their seeds."""
    trained = [each for each in models if each.values]
    trained.sort(key=lambda each: mean(each.values), reverse=task.higher_is_better)
    ranking = ", ".join(f"{NAMES[each.model]} {_mean(task, each)}" for each in trained)
    return f"{task.title}, mean {task.unit}, best first: {ranking}."


def _mean(task: _Task, runs: _ModelRuns) -> str:
    tested, seeds = len(runs.values), len(runs.cells)
    return task.shown(mean(runs.values)) + (f" ({tested} of {seeds} seeds)" * (tested < seeds))
