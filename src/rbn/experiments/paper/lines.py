"""The numbers of a figure: lines, panels and figures before they are drawn."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rbn.training.atomic_files import write_atomic

PAPER, OURS = "paper", "ours"
_COLUMNS = ("panel", "series", "source", "x", "y", "low", "high")


@dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
        series: what it shows, such as ``BN-LSTM``. Lines of the same series share a colour.
        source: ``paper`` or ``ours``.
        x: the positions, from left to right.
        y: the values at `x`.
        low: lower edge of a band around the line; empty without a band.
        high: upper edge of the band.
        detail: distinguishes lines of ours in the same series.
    """

    series: str
    source: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    detail: str = ""

    @property
    def name(self) -> str:
        """Series and detail."""
        return f"{self.series}, {self.detail}" if self.detail else self.series


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_y: bool = False
    y_range: tuple[float, float] | None = None
    note: str = ""
    log_x: bool = False


@dataclass(frozen=True)
class Figure:
    """One figure of the paper.

    Attributes:
        name: such as ``fig3a``.
        title: a few words.
        caption: full sentences.
        panels: its panels, from left to right.
        missing: a phrase for each line that is still missing.
        many: whether the lines are values of one quantity, coloured from dark to bright.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    missing: tuple[str, ...] = ()
    many: bool = False

    @property
    def has_ours(self) -> bool:
        """Whether it shows any of our results."""
        return any(line.source == OURS for panel in self.panels for line in panel.lines)


def thinned(values: Sequence[float], most: int) -> list[int]:
    """At most `most` evenly spaced indices, including the first and the last."""
    count = len(values)
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})


def write_csv(panels: Iterable[Panel], path: Path) -> None:
    """Write one row per point. Identical lines of the paper are written only once."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    seen: set[Line] = set()
    for panel in panels:
        for line in panel.lines:
            if line.source == PAPER and line in seen:
                continue
            seen.add(line)
            for k, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
                band = [f"{edge[k]:.6g}" if edge else "" for edge in (line.low, line.high)]
                row = (panel.title, line.name, line.source, f"{x:.8g}", f"{y:.6g}", *band)
                writer.writerow(row)
    write_atomic(path, file.getvalue())


def read_csv(path: Path) -> dict[str, list[Line]]:
    """The lines in a file of `write_csv`, by panel. The series includes the detail."""
    points: dict[tuple[str, str, str], list[list[float]]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                key = (row["panel"], row["series"], row["source"])
                numbers = [float(row[name]) for name in ("x", "y", "low", "high") if row[name]]
                points.setdefault(key, []).append(numbers)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is not a file of lines: {error}") from error
    panels: dict[str, list[Line]] = {}
    for (panel, series, source), rows in points.items():
        x, y, *band = (tuple(column) for column in zip(*rows, strict=True))
        low, high = band or ((), ())
        panels.setdefault(panel, []).append(Line(series, source, x, y, low, high))
    return panels
