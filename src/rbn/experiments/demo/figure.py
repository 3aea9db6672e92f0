"""Draws the learning curves."""

from __future__ import annotations

from pathlib import Path

from rbn.experiments.demo.result import THRESHOLDS, Result
from rbn.training.atomic_files import naming_file

# The Okabe-Ito palette, which colour-blind readers can tell apart.
COLOURS = {"LSTM": "#D55E00", "BN-LSTM": "#0072B2"}
_GREY = "#767676"
_LABEL_GAP = 7.0  # accuracy points between the labels, at least


def draw(result: Result, path: Path) -> None:
    """Draw the validation accuracy of both models by training step, as a PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the learning curves need matplotlib: pip install 'recurrent-batchnorm[demo]'"
        ) from error
    # Not pyplot, which looks for a display and keeps figures open.
    figure = Figure(figsize=(7.5, 4.4), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for threshold in THRESHOLDS:
        axes.axhline(100 * threshold, color=_GREY, linewidth=0.8, linestyle=(0, (1, 3)))
    for model in result.models:
        steps = [r.step for r in model.records]
        colour = COLOURS[model.name]
        curve = [100 * r.valid_population for r in model.records]
        axes.plot(steps, curve, color=colour, linewidth=2.4, marker="o", ms=4, clip_on=False)
        in_batch = [100 * r.valid_batch for r in model.records]
        if in_batch != curve:
            axes.plot(steps, in_batch, color=colour, linewidth=1.4, linestyle=(0, (4, 2)))
            # Label the early part, where the curves differ most, above both of them.
            first_quarter = len(steps) // 4 + 1
            axes.annotate(
                f"{model.name} with\nbatch statistics",
                (steps[0], max(curve[:first_quarter] + in_batch[:first_quarter])),
                xytext=(0, 6),
                textcoords="offset points",
                color=colour,
                fontsize=11,
                linespacing=1.05,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
    last = max(model.last.step for model in result.models)
    ends = _spread([100 * model.last.valid_population for model in result.models])
    for model, height in zip(result.models, ends, strict=True):
        axes.annotate(
            model.name,
            (last, height),
            xytext=(9, 0),
            textcoords="offset points",
            color=COLOURS[model.name],
            fontsize=14,
            fontweight="bold",
            verticalalignment="center",
            annotation_clip=False,
        )
    axes.set_xlim(0, last)
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 20))
    axes.tick_params(labelsize=11)
    axes.set_xlabel("training steps", fontsize=12)
    axes.set_ylabel("validation accuracy, %", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    with naming_file(path):
        figure.savefig(path, format="png")


def _spread(heights: list[float]) -> list[float]:
    """Move two heights apart if their labels would overlap."""
    first, second = heights
    missing = max(0.0, _LABEL_GAP - abs(first - second)) / 2
    apart = missing if first > second else -missing
    return [first + apart, second - apart]
