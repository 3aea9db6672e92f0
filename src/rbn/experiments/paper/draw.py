"""Draws figures as SVG and PNG."""

from __future__ import annotations

import io
import math
import textwrap
from pathlib import Path
from typing import Any

from rbn.experiments.paper.lines import OURS, PAPER, Figure, Line, Panel, write_csv
from rbn.experiments.paper.svg import compact
from rbn.training.atomic_files import naming_file, write_atomic

# The Okabe-Ito palette, which colour-blind readers can tell apart.
COLOURS = {
    "LSTM": "#D55E00",
    "BN-LSTM": "#0072B2",
    "BN-LSTM population statistics": "#0072B2",
    "BN-LSTM batch statistics": "#009E73",
    "BN-everywhere": "#009E73",
    "BN-e*": "#CC79A7",
    "BN-e**": "#000000",
    "mean derivative": "#0072B2",
}
# Markers distinguish lines in greyscale.
MARKS = {
    "LSTM": "s",
    "BN-LSTM": "o",
    "BN-LSTM population statistics": "o",
    "BN-LSTM batch statistics": "^",
    "BN-everywhere": "^",
    "BN-e*": "v",
    "BN-e**": "D",
}
_MARKED = 10  # markers on a line
_OTHER = "#56B4E9"
_DASHED, _DOTTED = (0, (4, 2)), (0, (1, 1.2))
_MOST_NAMED = 12  # entries of a legend
_WIDTH, _HEIGHT = 4.6, 3.6


def draw(figure: Figure, folder: Path) -> list[Path]:
    """Write ``NAME.svg``, ``NAME.png`` and ``NAME.csv``. Deterministic."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib: pip install 'recurrent-batchnorm[plots]'"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    columns = 2 if len(figure.panels) > 1 else 1
    rows = max(1, math.ceil(len(figure.panels) / columns))
    width = _WIDTH * columns if columns > 1 else 6.4
    # Not pyplot, which looks for a display and keeps figures open.
    settings: Any = {"svg.hashsalt": figure.name, "svg.fonttype": "path"}
    with matplotlib.rc_context(settings):
        picture = Picture(figsize=(width, _HEIGHT * rows), dpi=150, layout="constrained")
        grid: Any = picture.subplots(rows, columns, squeeze=False)
        colours = _colours(figure)
        for axes, panel in zip(grid.flat, figure.panels, strict=False):
            _draw_panel(axes, panel, colours, figure.many)
        for axes in list(grid.flat)[len(figure.panels) :]:
            axes.set_axis_off()
        _legend(picture, figure, colours, round(15 * width))
        svg, png = folder / f"{figure.name}.svg", folder / f"{figure.name}.png"
        drawn = io.StringIO()
        picture.savefig(drawn, format="svg", metadata={"Date": None})
        write_atomic(svg, compact(drawn.getvalue()))
        with naming_file(png):
            picture.savefig(png, metadata={"Software": None})
    table = folder / f"{figure.name}.csv"
    write_csv(figure.panels, table)
    return [svg, png, table]


def _colours(figure: Figure) -> dict[str, Any]:
    import matplotlib

    names = {line.series: None for panel in figure.panels for line in panel.lines}
    if not figure.many:
        return {name: COLOURS.get(name, _OTHER) for name in names}
    # Dark to light, also in greyscale, without the brightest yellow on white.
    scale = matplotlib.colormaps["viridis"]
    ordered = sorted(names) if len(names) <= _MOST_NAMED else list(names)
    last = max(1, len(ordered) - 1)
    return {name: scale(0.92 * k / last) for k, name in enumerate(ordered)}


def _style(line: Line) -> dict[str, Any]:
    if line.source == PAPER:
        return {"linewidth": 1.0, "linestyle": _DASHED, "alpha": 0.9}
    return {"linewidth": 1.2, "linestyle": _DOTTED} if line.detail else {"linewidth": 1.9}


def _draw_panel(axes: Any, panel: Panel, colours: dict[str, Any], many: bool) -> None:
    crowded = many and len(panel.lines) > 2 * _MOST_NAMED
    for line in panel.lines:
        style = _style(line)
        if crowded:
            style["linewidth"] = 0.7
        elif line.series in MARKS and not line.detail:
            size = 4 if line.source == OURS else 2.5
            every = max(1, len(line.x) // _MARKED)
            style |= {"marker": MARKS[line.series], "markersize": size, "markevery": every}
        if len(line.x) == 1:
            style["marker"] = "o"
        axes.plot(line.x, line.y, color=colours[line.series], **style)
        if line.low:
            colour = colours[line.series]
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    if panel.y_range:
        axes.set_ylim(*panel.y_range)
    if panel.note:
        where: Any = {"transform": axes.transAxes, "va": "bottom", "size": 8}
        axes.text(0.03, 0.04, panel.note, bbox={"color": "white", "pad": 1}, **where)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(picture: Any, figure: Figure, colours: dict[str, Any], letters: int) -> None:
    from matplotlib.lines import Line2D

    handles = []
    if len(colours) <= _MOST_NAMED:
        for name, colour in colours.items():
            mark = MARKS.get(name, "")
            handles.append(Line2D([], [], color=colour, linewidth=2, marker=mark, label=name))
    lines = [line for panel in figure.panels for line in panel.lines]
    grey: dict[str, Any] = {"color": "#555555"}
    if any(line.source == PAPER for line in lines):
        handles.append(Line2D([], [], label="paper", linestyle=_DASHED, linewidth=1.0, **grey))
        if any(line.source == OURS for line in lines):
            handles.append(Line2D([], [], label="ours", linewidth=1.9, **grey))
    for detail in dict.fromkeys(line.detail for line in lines if line.detail):
        label = f"ours, {detail}"
        handles.append(Line2D([], [], label=label, linestyle=_DOTTED, linewidth=1.2, **grey))
    text = "\n".join(textwrap.wrap(_absent(figure), letters)) or None
    if handles:
        columns = min(5 if len(figure.panels) > 1 else 3, len(handles))
        picture.legend(
            handles=handles,
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize=8.5,
            title=text,
            title_fontsize=8.5,
        )
    elif text:
        picture.supxlabel(text, fontsize=8.5)


def _absent(figure: Figure) -> str:
    if not figure.missing:
        return ""
    more = f" and {len(figure.missing) - 3} more" if len(figure.missing) > 4 else ""
    few = figure.missing[:3] if more else figure.missing
    return f"Still missing: {'; '.join(few)}{more}."
