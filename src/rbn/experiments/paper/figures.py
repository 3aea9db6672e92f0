"""The paper's figures, from the available results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rbn.experiments.paper.curves import paper_lines
from rbn.experiments.paper.lines import Figure, Line, Panel, read_csv
from rbn.experiments.paper.numbers import NAMES
from rbn.experiments.paper.paper_tasks import BEST_RATE, PaperTask
from rbn.experiments.paper.plan import READERS, SWEEP
from rbn.experiments.paper.published import Result, finished, mean_curve, mean_line
from rbn.experiments.paper.result_set import COMPUTED, ResultSet
from rbn.experiments.paper.trained_runs import read_lengths, read_statistics

_STEPS, _BITS = "training steps", "bits per character"


@dataclass
class _Curves:
    """The curves of a panel, the runs they show, and which runs are missing or diverged."""

    lines: list[Line] = field(default_factory=list)
    runs: list[Result] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)


def _seeds(results: Iterable[Result]) -> str:
    """A sentence with the seeds of some results."""
    seeds = sorted({result.seed for result in results})
    many = "s" if len(seeds) > 1 else ""
    return f" Seed{many} {', '.join(map(str, seeds))}." if seeds else ""


def _origin(results: Iterable[Result]) -> str:
    """A sentence with the settings and seeds of some results."""
    known = list(results)
    names = ", ".join(dict.fromkeys(result.settings for result in known))
    return f" Settings: {names}.{_seeds(known)}" if known else ""


def figure(name: str, results: ResultSet) -> Figure:
    """Make one of the paper's figures, by its name."""
    makers = {
        "fig1a": _gradient_flow,
        "fig1b": _derivative,
        "fig2": _images,
        "fig3a": _text,
        "fig3b": _lengths,
        "fig4a": _reader_small,
        "fig4b": _reader_full,
        "fig5": _stationarity,
        "fig6": _sensitivity,
    }
    return makers[name](results)


def _learning_curves(results: ResultSet, task: PaperTask, models: Sequence[str]) -> _Curves:
    """Validation curves of some models, with both kinds of statistics if they differ."""
    curves = _Curves()
    for model, every in task.comparable(results.runs, models).items():
        group = finished(every)
        name = NAMES[model]
        line = mean_curve(group, "valid_batch", name)
        if line is None:
            curves.missing.append(f"{name} on {task.title}")
            continue
        curves.diverged += [
            f"{name} on {task.title}, seed {result.seed}, after {result.diverged_at:,} steps"
            for result in every
            if result.diverged_at is not None
        ]
        other = mean_curve(group, "valid_population", name, "population statistics")
        for each in (line, other):
            if each is None or (each is other and each.y == line.y):
                continue
            curves.lines.append(each)
        curves.runs += group
    return curves


def _images(results: ResultSet) -> Figure:
    panels, missing, diverged = [], [], []
    shown: list[Result] = []
    for name in ("mnist", "pmnist"):
        task = results.tasks[name]
        curves = _learning_curves(results, task, ("lstm", "bn-lstm"))
        lines = (*results.paper_lines(f"fig2-{name}").values(), *curves.lines)
        missing += curves.missing
        diverged += curves.diverged
        shown += curves.runs
        label = "validation accuracy"
        panels.append(Panel(task.title, _STEPS, label, lines, y_range=(0.0, 1.0)))
    caption = (
        "Validation accuracy with minibatch statistics, and for the BN-LSTM also with population "
        "statistics. The paper does not say which of the two it plots."
    ) + _origin(shown)
    if diverged:
        caption += (
            f" Diverged runs: {'; '.join(diverged)}. A line shows the other runs, or these if "
            "there are no others."
        )
    return Figure(
        "fig2",
        "Learning curves on pixel-by-pixel MNIST",
        caption,
        tuple(panels),
        tuple(missing),
    )


def _text(results: ResultSet) -> Figure:
    task = results.tasks["ptb"]
    curves = _learning_curves(results, task, ("lstm", "bn-lstm"))
    paper = results.paper_lines("fig3a").values()
    limits = None if results.quick else (1.4, 2.3)
    panel = Panel(task.title, _STEPS, _BITS, (*paper, *curves.lines), y_range=limits)
    return Figure(
        "fig3a",
        "Learning curves on Penn Treebank",
        "Bits per character on validation windows of the training length, with minibatch "
        "statistics as in the paper, and for the BN-LSTM also with population statistics."
        + _origin(curves.runs),
        (panel,),
        tuple(curves.missing),
    )


def _measurement_path(result: Result, kind: str) -> Path:
    """The file with measurements of a result's trained model."""
    return result.path.with_name(f"{kind}-{result.path.stem}.csv")


def _measured(results: ResultSet, kind: str) -> list[Result]:
    return [result for result in results.runs if _measurement_path(result, kind).exists()]


def _lengths(results: ResultSet) -> Figure:
    task = results.tasks["ptb"]
    lines, missing, totals_by_model = list(results.paper_lines("fig3b").values()), [], []
    groups = task.comparable(_measured(results, "lengths"), ("lstm", "bn-lstm"))
    for model, group in groups.items():
        measured, totals = [], []
        for result in group:
            lines_of_run, total = read_lengths(_measurement_path(result, "lengths"), model)
            measured.append(lines_of_run)
            totals += [] if total is None else [total]
        if not measured:
            missing.append(f"{NAMES[model]}, measured on longer windows of {task.title}")
        for same in zip(*measured, strict=True):
            lines.append(mean_line(same))
        if totals:
            mean = sum(totals) / len(totals)
            totals_by_model.append(f"{NAMES[model]} {mean:.3f}")
    caption = "Bits per character on the test sequence, cut into windows of growing length."
    caption += _origin(result for group in groups.values() for result in group)
    if totals_by_model:
        caption += f" Whole sequence: {', '.join(totals_by_model)}."
    panel = Panel(task.title, "window length in characters", _BITS, tuple(lines))
    return Figure("fig3b", "Longer sequences than in training", caption, (panel,), tuple(missing))


def _reader(results: ResultSet, name: str, where: str, models: Sequence[str]) -> Figure:
    task = results.tasks[where]
    curves = _learning_curves(results, task, models)
    paper = [
        replace(line, series=series.removesuffix(" valid"))
        for series, line in results.paper_lines(name).items()
        if series.endswith(" valid")
    ]
    # The paper's runs are far longer than ours; a logarithmic axis shows both.
    lines = [_after_start(line) for line in (*paper, *curves.lines)]
    groups = task.comparable(results.runs, models)
    shown = [result for group in groups.values() for result in group]
    trained = (mean_curve(group, "train", NAMES[model]) for model, group in groups.items())
    losses = tuple(line for line in trained if line is not None)
    title = task.title_of(shown)
    panels = [Panel(f"{title}: validation", _STEPS, "error rate", tuple(lines), log_x=True)]
    if losses:
        panels.insert(0, Panel(f"{title}: training", _STEPS, "cross-entropy, nats", losses))
    caption = (
        "Left: our training loss since the previous evaluation. Right: the error rate on the "
        "validation set with minibatch statistics."
    )
    caption += _origin(shown)
    if not task.uses_paper_data(shown) and not task.stand_in:
        caption += (
            f" Ours is {shown[0].task}, questions that rbn data build-cloze makes from articles; "
            "the paper uses CNN, whose archive was not available. "
        )
        caption += note_on_rates(shown)
    return Figure(
        name,
        f"The Attentive Reader, {title}",
        caption,
        tuple(panels),
        tuple(curves.missing),
    )


def note_on_rates(shown: Sequence[Result]) -> str:
    """A sentence about the learning rates of readers of built questions."""
    if all(result.tag == BEST_RATE for result in shown):
        rates = {result.config["optimizer"]["lr"] for result in shown}
        rate = f" {rates.pop():g}" if len(rates) == 1 else ""
        return (
            "Every variant has the same batch size, the same number of steps and the learning rate"
            f"{rate} that was best in shorter runs. The fair comparison has more rates."
        )
    return (
        "The variants have the paper's learning rates, which differ and decide their order: the "
        "fair comparison trains each at its best rate."
    )


def _after_start(line: Line) -> Line:
    """A copy of a line without step 0, which a logarithmic axis cannot show."""
    kept = [k for k, x in enumerate(line.x) if x > 0]
    columns = (line.x, line.y, line.low, line.high)
    x, y, low, high = (tuple(c[k] for k in kept) if c else () for c in columns)
    return replace(line, x=x, y=y, low=low, high=high)


def _reader_small(results: ResultSet) -> Figure:
    task = results.tasks["cnn"]
    more = any(task.includes(result) and result.model == "bi-lstm" for result in results.runs)
    return _reader(results, "fig4a", "cnn", (*READERS, *(["bi-lstm"] if more else [])))


def _reader_full(results: ResultSet) -> Figure:
    return _reader(results, "fig4b", "cnn-full", ("lstm", "bn-e**"))


def _stationarity(results: ResultSet) -> Figure:
    task = results.tasks["ptb"]
    panels: list[Panel] = []
    shown = ""
    for result in task.comparable(_measured(results, "statistics"), ("bn-lstm",))["bn-lstm"][:1]:
        for title, lines in read_statistics(_measurement_path(result, "statistics")).items():
            panels.append(Panel(title, "time step", "value", tuple(lines)))
        shown = _origin([result])
    missing = () if panels else (f"population statistics of a BN-LSTM on {task.title}",)
    return Figure(
        "fig5",
        "Population statistics over time",
        "Mean and variance of the recurrent term and the cell at each time step. Each line is a "
        f"randomly chosen unit.{shown} The paper's figure has no readable numbers to compare to.",
        tuple(panels),
        missing,
        many=True,
    )


def _loss(name: str, part: str) -> tuple[str, float]:
    """The column of a learning curve that has the cross-entropy, and its factor to nats."""
    if part == "train":
        return "train", 1.0
    # For images the metric is accuracy and the loss has its own column; texts are in bits.
    return ("valid_batch_nats", 1.0) if name == "pmnist" else ("valid_batch", math.log(2))


# The authors' plotting script divides the steps of Penn Treebank, not the loss, by ln 2.
_PTB_STEPS = math.log(2)
_SWEEP_NOTE = (
    " The steps of the paper's curves on Penn Treebank are multiplied by ln 2, because its "
    "plotting script divides them by ln 2. Our runs on images use the optimizer of the authors' "
    "code, RMSProp with a decay of 0.5 and no momentum. Runs with momentum showed no effect of "
    "gamma."
)


def _sensitivity(results: ResultSet) -> Figure:
    paper = results.paper_lines("fig6")
    panels, missing = [], []
    shown: list[Result] = []
    for name, of_paper in (("pmnist", "pMNIST"), ("ptb", "PTB")):
        task = results.tasks[name]
        own: dict[float, list[Result]] = {}
        for result in results.runs:
            if result.task == task.tasks[0] and result.gamma_tag is not None:
                own.setdefault(result.gamma_tag, []).append(result)
                shown.append(result)
        missing += [f"gamma {g:g} on {task.title}" for g in SWEEP if g not in own]
        for part in ("train", "valid"):
            scale = _PTB_STEPS if name == "ptb" else 1.0
            lines = [
                replace(line, series=series.rpartition(" ")[2], x=tuple(scale * x for x in line.x))
                for series, line in paper.items()
                if series.startswith(f"{of_paper} {part} ")
            ]
            field, factor = _loss(name, part)
            without_loss = []  # results from before the loss was recorded
            for gamma, runs in sorted(own.items()):
                label = f"gamma={gamma:.2f}" if gamma >= 0.01 else f"gamma={gamma:g}"
                line = mean_curve(runs, field, label, "", factor)
                if line is None:
                    without_loss.append(f"{gamma:g}")
                else:
                    lines.append(line)
            note = f"no loss recorded for gamma {', '.join(without_loss)}" if without_loss else ""
            title = f"{task.title}, {'training' if part == 'train' else 'validation'}"
            panels.append(Panel(title, _STEPS, "nats", tuple(lines), note=note))
    return Figure(
        "fig6",
        "Sensitivity to the initial gamma",
        "Cross-entropy of BN-LSTMs with different initial gammas; validation with minibatch "
        "statistics." + _seeds(shown) + ("" if results.quick else _SWEEP_NOTE),
        tuple(panels),
        tuple(missing),
        many=True,
    )


def _computed(results: ResultSet, name: str) -> dict[str, list[Line]]:
    path = results.folder / COMPUTED / f"{name}.csv"
    return read_csv(path) if path.exists() else {}


def _gradient_flow(results: ResultSet) -> Figure:
    paper = tuple(results.paper_lines("fig1a").values())
    panels = []
    for title, lines in (_computed(results, "fig1a") or {"": []}).items():
        label = "norm of the gradient"
        limits = None if results.quick else (1e-26, 1e2)
        largest = max((max(line.y) for line in lines), default=0.0)
        note = f"ours go up to {largest:.0e}" if limits and largest > limits[1] else ""
        panels.append(Panel(title, "time step", label, (*paper, *lines), True, limits, note))
    own = any(len(panel.lines) > len(paper) for panel in panels)
    return Figure(
        "fig1a",
        "Gradient flow through a batch-normalized tanh RNN",
        "Norm of the loss's gradient with respect to the hidden states before training, for gamma "
        "from 0.1 to 1.0; read from right to left. Ours are geometric means over seeds; the "
        "paper's lines are the same in all panels. The paper does not say how the recurrent "
        "weights are initialized, nor whether both terms are normalized together. With the "
        "identity of section 5.1 and both terms together, as in the RNN of the authors' code, "
        "small gammas preserve the gradient and large ones make it vanish, as in the paper. With "
        "each term normalized on its own, every unit is an independent recurrence, and how far the "
        "gradient fades at small gammas depends on seed and rounding by many orders of magnitude. "
        "With orthogonal weights it vanishes for no gamma and explodes for large ones.",
        tuple(panels),
        () if own else ("our gradient norms",),
        many=True,
    )


def _derivative(results: ResultSet) -> Figure:
    own = [line for lines in _computed(results, "fig1b").values() for line in lines]
    label = "derivative of tanh"
    lines = (*paper_lines("fig1b").values(), *own)
    panel = Panel("", "standard deviation of the input", label, lines, y_range=(0.0, 1.0))
    return Figure(
        "fig1b",
        "Derivative of tanh by standard deviation of its input",
        "Mean over normally distributed inputs. The band spans the first to the third quartile.",
        (panel,),
        () if own else ("our derivatives",),
    )
