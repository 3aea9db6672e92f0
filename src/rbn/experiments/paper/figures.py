"""The paper's figures, from the available results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rbn.experiments.paper import finding
from rbn.experiments.paper.curves import paper_lines
from rbn.experiments.paper.lines import Figure, Line, Panel, read_csv
from rbn.experiments.paper.numbers import NAMES
from rbn.experiments.paper.places import Place, places
from rbn.experiments.paper.plan import READERS, SWEEP
from rbn.experiments.paper.published import Result, finished, mean_curve, mean_line, read_results
from rbn.experiments.paper.trained_runs import read_lengths, read_statistics

COMPUTED = "figures"  # the folder of figures that need no training, inside the results'
_STEPS, _BITS = "training steps", "bits per character"


@dataclass(frozen=True)
class Shelf:
    """A folder of results, read once.

    Attributes:
        folder: where they are.
        results: of all runs.
        places: which of them stand for which of the paper's tasks.
        quick: whether they are of embedded data, with which the paper's lines are not comparable.
    """

    folder: Path
    results: tuple[Result, ...]
    places: dict[str, Place]
    quick: bool = False

    @staticmethod
    def of(folder: Path, quick: bool = False) -> Shelf:
        """Read a folder of results."""
        return Shelf(folder, tuple(read_results(folder)), places(quick), quick)

    @property
    def has_any(self) -> bool:
        """Whether there is anything to show in tables, figures or findings."""
        trained = any(place.holds(r) for place in self.places.values() for r in self.results)
        sweep = any(result.gamma_tag is not None for result in self.results)
        kept = any(any((self.folder / n).glob("*")) for n in (COMPUTED, finding.FOLDER))
        return trained or sweep or kept

    def paper(self, figure: str) -> dict[str, Line]:
        """The paper's lines, if they are comparable."""
        return {} if self.quick else paper_lines(figure)


@dataclass
class _Gathered:
    """Lines for a panel, their results, what is missing, and which runs diverged."""

    lines: list[Line] = field(default_factory=list)
    shown: list[Result] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)


def _seeds(results: Iterable[Result]) -> str:
    """A sentence that names the seeds of the lines."""
    seeds = sorted({result.seed for result in results})
    many = "s" if len(seeds) > 1 else ""
    return f" Seed{many} {', '.join(map(str, seeds))}." if seeds else ""


def _origin(results: Iterable[Result]) -> str:
    """The same with the names of the settings, as in the tables."""
    known = list(results)
    names = ", ".join(dict.fromkeys(result.settings for result in known))
    return f" Settings: {names}.{_seeds(known)}" if known else ""


def figure(name: str, shelf: Shelf) -> Figure:
    """One of the paper's figures, by its name."""
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
    return makers[name](shelf)


def _learning(shelf: Shelf, place: Place, models: Sequence[str]) -> _Gathered:
    """Validation curves of some models, with both kinds of statistics if there are two."""
    gathered = _Gathered()
    for model, every in place.shown(shelf.results, models).items():
        group = finished(every)
        name = NAMES[model]
        line = mean_curve(group, "valid_batch", name)
        if line is None:
            gathered.missing.append(f"{name} on {place.title}")
            continue
        gathered.diverged += [
            f"{name} on {place.title}, seed {result.seed}, after {result.diverged_at:,} steps"
            for result in every
            if result.diverged_at is not None
        ]
        other = mean_curve(group, "valid_population", name, "population statistics")
        for each in (line, other):
            if each is None or (each is other and each.y == line.y):
                continue
            gathered.lines.append(each)
        gathered.shown += group
    return gathered


def _images(shelf: Shelf) -> Figure:
    panels, missing, diverged = [], [], []
    shown: list[Result] = []
    for name in ("mnist", "pmnist"):
        place = shelf.places[name]
        gathered = _learning(shelf, place, ("lstm", "bn-lstm"))
        lines = (*shelf.paper(f"fig2-{name}").values(), *gathered.lines)
        missing += gathered.missing
        diverged += gathered.diverged
        shown += gathered.shown
        label = "validation accuracy"
        panels.append(Panel(place.title, _STEPS, label, lines, y_range=(0.0, 1.0)))
    caption = (
        "Validation accuracy with the statistics of the minibatch; for the BN-LSTM also with "
        "population statistics. The paper does not say which of the two it plots."
    ) + _origin(shown)
    if diverged:
        caption += (
            f" Runs that diverged: {'; '.join(diverged)}. A line is of the others, or of these "
            "where there are no others."
        )
    return Figure(
        "fig2",
        "Pixel by pixel MNIST, while training",
        caption,
        tuple(panels),
        tuple(missing),
    )


def _text(shelf: Shelf) -> Figure:
    place = shelf.places["ptb"]
    gathered = _learning(shelf, place, ("lstm", "bn-lstm"))
    paper = shelf.paper("fig3a").values()
    limits = None if shelf.quick else (1.4, 2.3)
    panel = Panel(place.title, _STEPS, _BITS, (*paper, *gathered.lines), y_range=limits)
    return Figure(
        "fig3a",
        "Penn Treebank, while training",
        "Validation windows of the training length, in bits per character, with the statistics of "
        "the minibatch as in the paper; for the BN-LSTM also with population statistics."
        + _origin(gathered.shown),
        (panel,),
        tuple(gathered.missing),
    )


def _beside(result: Result, kind: str) -> Path:
    """The file with the measurements of a result's model."""
    return result.path.with_name(f"{kind}-{result.path.stem}.csv")


def _measured(shelf: Shelf, kind: str) -> list[Result]:
    return [result for result in shelf.results if _beside(result, kind).exists()]


def _lengths(shelf: Shelf) -> Figure:
    place = shelf.places["ptb"]
    lines, missing, whole = list(shelf.paper("fig3b").values()), [], []
    groups = place.shown(_measured(shelf, "lengths"), ("lstm", "bn-lstm"))
    for model, group in groups.items():
        measured, totals = [], []
        for result in group:
            lines_of_run, total = read_lengths(_beside(result, "lengths"), model)
            measured.append(lines_of_run)
            totals += [] if total is None else [total]
        if not measured:
            missing.append(f"{NAMES[model]}, measured on longer windows of {place.title}")
        for same in zip(*measured, strict=True):
            lines.append(mean_line(same))
        if totals:
            mean = sum(totals) / len(totals)
            whole.append(f"{NAMES[model]} {mean:.3f}")
    caption = "Test sequence cut into windows of growing length, in bits per character."
    caption += _origin(result for group in groups.values() for result in group)
    if whole:
        caption += f" The whole sequence at once: {', '.join(whole)}."
    panel = Panel(place.title, "characters of a window", _BITS, tuple(lines))
    return Figure("fig3b", "Longer sequences than in training", caption, (panel,), tuple(missing))


def _reader(shelf: Shelf, name: str, where: str, models: Sequence[str]) -> Figure:
    place = shelf.places[where]
    gathered = _learning(shelf, place, models)
    paper = [
        replace(line, series=series.removesuffix(" valid"))
        for series, line in shelf.paper(name).items()
        if series.endswith(" valid")
    ]
    # The paper's runs are far longer than ours: on a logarithmic axis both can be seen.
    lines = [_after_start(line) for line in (*paper, *gathered.lines)]
    groups = place.shown(shelf.results, models)
    shown = [result for group in groups.values() for result in group]
    trained = (mean_curve(group, "train", NAMES[model]) for model, group in groups.items())
    losses = tuple(line for line in trained if line is not None)
    title = place.title_of(shown)
    panels = [Panel(f"{title}: validation", _STEPS, "error rate", tuple(lines), log_x=True)]
    if losses:
        panels.insert(0, Panel(f"{title}: training", _STEPS, "cross-entropy, nats", losses))
    caption = (
        "Left: the loss on the training questions since the last look, ours alone. Right: the "
        "error rate on the validation set, with the statistics of the minibatch."
    )
    caption += _origin(shown)
    if not place.is_papers(shown) and not place.stand_in:
        caption += (
            f" Ours is {shown[0].task}, questions made from articles by rbn data build-cloze, the "
            "paper's is CNN, whose archive was not available. The variants have the paper's "
            "learning rates, which differ and decide their order: docs/reading.md compares each at "
            "its best rate."
        )
    return Figure(
        name,
        f"The Attentive Reader, {title}",
        caption,
        tuple(panels),
        tuple(gathered.missing),
    )


def _after_start(line: Line) -> Line:
    """A line without its points at step 0, which a logarithmic axis cannot show."""
    kept = [k for k, x in enumerate(line.x) if x > 0]
    columns = (line.x, line.y, line.low, line.high)
    x, y, low, high = (tuple(c[k] for k in kept) if c else () for c in columns)
    return replace(line, x=x, y=y, low=low, high=high)


def _reader_small(shelf: Shelf) -> Figure:
    return _reader(shelf, "fig4a", "cnn", READERS)


def _reader_full(shelf: Shelf) -> Figure:
    return _reader(shelf, "fig4b", "cnn-full", ("lstm", "bn-e**"))


def _stationarity(shelf: Shelf) -> Figure:
    place = shelf.places["ptb"]
    panels: list[Panel] = []
    shown = ""
    for result in place.shown(_measured(shelf, "statistics"), ("bn-lstm",))["bn-lstm"][:1]:
        for title, lines in read_statistics(_beside(result, "statistics")).items():
            panels.append(Panel(title, "time step", "value", tuple(lines)))
        shown = _origin([result])
    missing = () if panels else (f"population statistics of a BN-LSTM on {place.title}",)
    return Figure(
        "fig5",
        "Population statistics over time",
        "Mean and variance of the recurrent term and of the cell at each time step; each line is a "
        f"unit, chosen at random.{shown} The paper shows the same without numbers to compare with.",
        tuple(panels),
        missing,
        many=True,
    )


def _loss(name: str, part: str) -> tuple[str, float]:
    """The column of a learning curve with the cross-entropy, and its factor to nats."""
    if part == "train":
        return "train", 1.0
    # Of images the figure is the accuracy, and the loss beside it; of texts it is bits.
    return ("valid_batch_nats", 1.0) if name == "pmnist" else ("valid_batch", math.log(2))


# The authors' plotting script divides the steps of Penn Treebank, not the loss, by ln 2.
_PTB_STEPS = math.log(2)
_RULE = (
    " The steps of the paper's curves on Penn Treebank are multiplied by ln 2: its plotting script "
    "divided them by that. Our runs on images have the optimizer of the authors' code, RMSProp "
    "with a decay of 0.5 and no momentum. Runs with momentum showed no effect of gamma."
)


def _sensitivity(shelf: Shelf) -> Figure:
    paper = shelf.paper("fig6")
    panels, missing = [], []
    shown: list[Result] = []
    for name, of_paper in (("pmnist", "pMNIST"), ("ptb", "PTB")):
        place = shelf.places[name]
        own: dict[float, list[Result]] = {}
        for result in shelf.results:
            if result.task == place.tasks[0] and result.gamma_tag is not None:
                own.setdefault(result.gamma_tag, []).append(result)
                shown.append(result)
        missing += [f"gamma {g:g} on {place.title}" for g in SWEEP if g not in own]
        for part in ("train", "valid"):
            scale = _PTB_STEPS if name == "ptb" else 1.0
            lines = [
                replace(line, series=series.rpartition(" ")[2], x=tuple(scale * x for x in line.x))
                for series, line in paper.items()
                if series.startswith(f"{of_paper} {part} ")
            ]
            field, factor = _loss(name, part)
            without = []  # published before the loss was recorded
            for gamma, results in sorted(own.items()):
                line = mean_curve(results, field, f"gamma={gamma:.2f}", "", factor)
                if line is None:
                    without.append(f"{gamma:g}")
                else:
                    lines.append(line)
            note = f"no loss recorded for gamma {', '.join(without)}" if without else ""
            title = f"{place.title}, {'training' if part == 'train' else 'validation'}"
            panels.append(Panel(title, _STEPS, "nats", tuple(lines), note=note))
    return Figure(
        "fig6",
        "Sensitivity to the initial gamma",
        "Cross-entropy of BN-LSTMs that start from different gammas; validation with the "
        "statistics of the minibatch." + _seeds(shown) + ("" if shelf.quick else _RULE),
        tuple(panels),
        tuple(missing),
        many=True,
    )


def _computed(shelf: Shelf, name: str) -> dict[str, list[Line]]:
    path = shelf.folder / COMPUTED / f"{name}.csv"
    return read_csv(path) if path.exists() else {}


def _gradient_flow(shelf: Shelf) -> Figure:
    paper = tuple(shelf.paper("fig1a").values())
    panels = []
    for title, lines in (_computed(shelf, "fig1a") or {"": []}).items():
        label = "norm of the gradient"
        limits = None if shelf.quick else (1e-26, 1e2)
        largest = max((max(line.y) for line in lines), default=0.0)
        note = f"ours go up to {largest:.0e}" if limits and largest > limits[1] else ""
        panels.append(Panel(title, "time step", label, (*paper, *lines), True, limits, note))
    own = any(len(panel.lines) > len(paper) for panel in panels)
    return Figure(
        "fig1a",
        "Gradient flow through a batch-normalized tanh RNN",
        "Norm of the loss's gradient at the hidden states before training, for gamma from 0.1 to "
        "1.0; read from right to left. Ours are geometric means over seeds; the paper's lines are "
        "the same in all panels. The paper does not say how the recurrent weights start, nor "
        "whether both terms are normalized together. With the identity of section 5.1 and both "
        "terms together, as in the RNN of the authors' code, small gammas keep the gradient and "
        "large ones make it vanish, as in the paper. With each term on its own, every unit is a "
        "recurrence by itself, and how far the gradient fades at small gammas depends on seed and "
        "rounding by many orders of magnitude. With orthogonal weights it vanishes for no gamma; "
        "for large ones it explodes.",
        tuple(panels),
        () if own else ("our gradient norms",),
        many=True,
    )


def _derivative(shelf: Shelf) -> Figure:
    own = [line for lines in _computed(shelf, "fig1b").values() for line in lines]
    label = "derivative of tanh"
    lines = (*paper_lines("fig1b").values(), *own)
    panel = Panel("", "standard deviation of the input", label, lines, y_range=(0.0, 1.0))
    return Figure(
        "fig1b",
        "Derivative of tanh against the deviation of its input",
        "Mean over inputs drawn from a normal distribution; the band goes from the first to the "
        "third quartile.",
        (panel,),
        () if own else ("our derivatives",),
    )
