"""A plot of a sweep: learning curves, and each setting against the result."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rbn.experiments.search.status import SweepStatus
from rbn.training.atomic_files import naming_file

# From the Okabe-Ito palette, which colour-blind readers can tell apart; line styles help in grey.
_COLOURS = {
    "complete": "#0072B2",
    "pruned": "#D55E00",
    "running": "#009E73",
    "waiting": "#999999",
    "failed": "#000000",
}
_STYLES = {"complete": "-", "pruned": "--", "running": "-.", "waiting": ":", "failed": ":"}
_MARKS = {"complete": "o", "pruned": "x", "running": "^", "waiting": "s", "failed": "v"}
FORMATS = (".svg", ".png", ".pdf")
_WIDTH, _HEIGHT = 4.2, 3.4


def check(path: Path) -> None:
    """Reject a file name that is not a plot's, and check that matplotlib is installed."""
    if path.suffix not in FORMATS:
        raise ValueError(f"plot must be a file ending in {', '.join(FORMATS)}, got {path}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib: pip install 'recurrent-batchnorm[plots]'"
        ) from error


def draw(now: SweepStatus, path: Path) -> None:
    """Write the plot. The same trials give the same file."""
    import matplotlib
    from matplotlib.figure import Figure

    check(path)
    names = now.parameters
    panels = 1 + len(names)
    columns = min(3, panels)
    rows = math.ceil(panels / columns)
    settings: Any = {"svg.hashsalt": now.name, "svg.fonttype": "path"}
    with matplotlib.rc_context(settings):
        # Not pyplot, which looks for a display and keeps figures open.
        size = (_WIDTH * columns, _HEIGHT * rows)
        picture = Figure(figsize=size, dpi=150, layout="constrained")
        grid: Any = picture.subplots(rows, columns, squeeze=False)
        axes = list(grid.flat)
        _curves(axes[0], now)
        for place, name in zip(axes[1:], names, strict=False):
            _against(place, now, name)
        for place in axes[panels:]:
            place.set_axis_off()
        picture.suptitle(now.summary(), fontsize=10)
        _legend(picture, now)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {
            ".svg": {"Date": None},
            ".png": {"Software": None},
            ".pdf": {"CreationDate": None},
        }
        with naming_file(path):
            picture.savefig(path, metadata=metadata[path.suffix])


def _curves(axes: Any, now: SweepStatus) -> None:
    for row in now.rows:
        if row.curve:
            looks = range(1, len(row.curve) + 1)
            mark = _MARKS[row.state] if len(row.curve) == 1 else ""
            style: dict[str, Any]
            style = {"color": _COLOURS[row.state], "linestyle": _STYLES[row.state], "marker": mark}
            axes.plot(
                looks, row.curve, linewidth=1.2, alpha=0.8, gid=f"trial-{row.number}", **style
            )
    axes.set_xlabel("evaluations on the validation data")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _finish(axes, now)


def _against(axes: Any, now: SweepStatus, name: str) -> None:
    """The best validation metric of each trial, over the values of one setting."""
    rows = [row for row in now.rows if name in row.parameters and row.best is not None]
    values = [row.parameters[name] for row in rows]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if numeric:
        places = values
        if values and min(values) > 0 and max(values) >= 10 * min(values):
            axes.set_xscale("log")
    else:
        kinds = list(dict.fromkeys(map(str, values)))
        places = [kinds.index(str(value)) for value in values]
        axes.set_xticks(range(len(kinds)), kinds)
        axes.margins(x=0.2)
    for row, place in zip(rows, places, strict=True):
        mark, colour = _MARKS[row.state], _COLOURS[row.state]
        axes.plot([place], [row.best], marker=mark, color=colour, linestyle="", alpha=0.8)
    axes.set_xlabel(name)
    _finish(axes, now)


def _finish(axes: Any, now: SweepStatus) -> None:
    axes.set_ylabel(f"validation {now.figure}")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(picture: Any, now: SweepStatus) -> None:
    from matplotlib.lines import Line2D

    states = [state for state in _COLOURS if any(r.state == state and r.curve for r in now.rows)]
    handles = []
    for state in states:
        style: Any = {"linestyle": _STYLES[state], "marker": _MARKS[state]}
        handles.append(Line2D([], [], color=_COLOURS[state], label=state, **style))
    if handles:
        picture.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
