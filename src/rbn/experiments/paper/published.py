"""Reads published results: ``TASK/MODEL[-TAG]-seedN.json`` and their learning curves."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rbn.experiments.paper.lines import OURS, Line
from rbn.experiments.paper.numbers import NAMES
from rbn.experiments.results import CURVE, NATS

_GAMMA = "gamma-"
_NEEDED: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("task", "model", "tag", "command"), str),
    **dict.fromkeys(("test", "seconds"), (int, float)),
    **dict.fromkeys(("seed", "steps"), int),
    "config": dict,
}


@dataclass(frozen=True)
class Result:
    """The result and the learning curve of a run."""

    path: Path
    values: dict[str, Any]
    curve: tuple[dict[str, float], ...]

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.values["task"])

    @property
    def model(self) -> str:
        """The recurrent layer or reader."""
        return str(self.values["model"])

    @property
    def tag(self) -> str:
        """Name of the variant; empty for the paper's settings."""
        return str(self.values["tag"])

    @property
    def seed(self) -> int:
        """Seed of the weights and the data order."""
        return int(self.values["seed"])

    @property
    def config(self) -> dict[str, Any]:
        """All settings."""
        config: dict[str, Any] = self.values["config"]
        return config

    @property
    def settings(self) -> str:
        """The name of the settings in tables."""
        return f"{self.task}-{self.tag}" if self.tag else self.task

    @property
    def gamma_tag(self) -> float | None:
        """The initial gamma of a run of the gamma sweep; None for other runs."""
        if not self.tag.startswith(_GAMMA):
            return None
        try:
            return float(self.tag.removeprefix(_GAMMA))
        except ValueError:
            return None

    @property
    def diverged_at(self) -> int | None:
        """The step at which training diverged; None if it did not."""
        step = self.values.get("diverged_at")
        return None if step is None else int(step)

    @property
    def minutes(self) -> float:
        """Wall time of the training, including evaluations."""
        return float(self.values["seconds"]) / 60


def read_results(folder: Path) -> list[Result]:
    """All results in a folder, sorted by name."""
    results = []
    for path in sorted(folder.glob("*/*-seed*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            _check(values)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the result of a run: {error}") from error
        results.append(Result(path, values, _curve(path.with_suffix(".csv"))))
    return results


def _check(values: dict[str, Any]) -> None:
    """Reject values of the wrong type, as in an edited file."""
    for name, kinds in _NEEDED.items():
        if not isinstance(values[name], kinds) or isinstance(values[name], bool):
            raise ValueError(f"its {name} is {values[name]!r}")
    for name in ("test", "seconds"):
        if not math.isfinite(values[name]):
            raise ValueError(f"its {name} is not finite")
    for name in ("diverged_at", "together"):
        if not isinstance(values.get(name), int | None):
            raise ValueError(f"its {name} is {values[name]!r}")
    if not isinstance(values["config"].get("data", {}), dict):
        raise ValueError(f"its config.data is {values['config']['data']!r}")
    if values["model"] not in NAMES:
        raise ValueError(f"its model is {values['model']!r}, not one of {', '.join(NAMES)}")


def finished(results: Sequence[Result]) -> list[Result]:
    """The results that did not diverge; all results if all diverged."""
    return [result for result in results if result.diverged_at is None] or list(results)


def _curve(path: Path) -> tuple[dict[str, float], ...]:
    if not path.exists():
        return ()
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            absent = [name for name in CURVE if name not in (rows.fieldnames or ())]
            if absent:
                raise ValueError(f"it has no column {', '.join(absent)}")
            return tuple(
                # A run resumed with a newer version lacks these in its first rows.
                {k: float(v) for k, v in row.items() if v or k not in NATS}
                for row in rows
            )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a learning curve: {error}") from error


def mean_curve(
    results: Sequence[Result], field: str, series: str, detail: str = "", factor: float = 1.0
) -> Line | None:
    """Mean and range over runs of one field of the learning curves, at their common steps.

    Ignores runs from before the field was recorded. Returns None if no run has it.
    """
    known = ([row for row in result.curve if field in row] for result in results)
    curves = [{row["step"]: row[field] * factor for row in rows} for rows in known if rows]
    if not curves:
        return None
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[step] for curve in curves] for step in steps]
    band = len(curves) > 1
    return Line(
        series,
        OURS,
        tuple(steps),
        tuple(sum(column) / len(column) for column in columns),
        tuple(min(column) for column in columns) if band else (),
        tuple(max(column) for column in columns) if band else (),
        detail,
    )


def mean_line(lines: Sequence[Line]) -> Line:
    """Mean and range of lines with the same x."""
    first = lines[0]
    if any(line.x != first.x for line in lines):
        raise ValueError(f"the lines of {first.series} have different x")
    columns = list(zip(*(line.y for line in lines), strict=True))
    if len(lines) == 1:
        return first
    return Line(
        first.series,
        first.source,
        first.x,
        tuple(sum(column) / len(column) for column in columns),
        tuple(min(column) for column in columns),
        tuple(max(column) for column in columns),
        first.detail,
    )
