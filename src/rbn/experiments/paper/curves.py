"""The curves of the paper's figures, as numbers."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

from rbn.experiments.paper.lines import PAPER, Line

FIGURES = (
    *("fig1a", "fig1b", "fig2-mnist", "fig2-pmnist", "fig3a", "fig3b"),
    *("fig4a", "fig4b", "fig6"),
)


@cache
def _table() -> dict[str, dict[str, list[tuple[float, float]]]]:
    text = files(__package__).joinpath("curves.csv").read_text(encoding="utf-8")
    rows = (row for row in text.splitlines() if not row.startswith("#"))
    table: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in csv.DictReader(rows):
        points = table.setdefault(row["figure"], {}).setdefault(row["series"], [])
        points.append((float(row["x"]), float(row["y"])))
    return table


def paper_lines(figure: str) -> dict[str, Line]:
    """The curves of one of `FIGURES` by name, read from the paper's vector graphics."""
    if figure not in FIGURES:
        raise ValueError(f"figure must be one of {', '.join(FIGURES)}, got {figure!r}")
    lines = {}
    for series, points in _table()[figure].items():
        x, y = zip(*points, strict=True)
        lines[series] = Line(series, PAPER, x, y)
    return lines


def source() -> str:
    """Where the curves come from, as a sentence."""
    text = files(__package__).joinpath("curves.csv").read_text(encoding="utf-8")
    return " ".join(row[2:] for row in text.splitlines() if row.startswith("#"))
