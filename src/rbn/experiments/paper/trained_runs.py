"""Measurements of trained models for Figures 3b and 5, saved next to the results."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch

from rbn.experiments import run_folder, trained_models
from rbn.experiments.base_task import has_statistics
from rbn.experiments.config import Config
from rbn.experiments.paper.lines import OURS, Line
from rbn.experiments.paper.numbers import NAMES
from rbn.training import CheckpointError
from rbn.training.atomic_files import write_atomic

LENGTHS = tuple(range(100, 1001, 100))
WHOLE = "whole"
UNITS = 30  # units shown for each statistic, as in the paper's Figure 5
STATISTICS = {
    "recurrent mean": ("stats_h_l0", "mean"),
    "cell mean": ("stats_c_l0", "mean"),
    "recurrent variance": ("stats_h_l0", "var"),
    "cell variance": ("stats_c_l0", "var"),
}


def lengths_path(results: Path, config: Config, seed: int) -> Path:
    """The file with a run's bits per character for each window length."""
    return results / config.task / f"lengths-{config.name}-seed{seed}.csv"


def statistics_path(results: Path, config: Config, seed: int) -> Path:
    """The file with the population statistics of some units."""
    return results / config.task / f"statistics-{config.name}-seed{seed}.csv"


def measure_lengths(
    run: Path,
    results: Path,
    device: torch.device,
    root: Path | None = None,
    lengths: tuple[int, ...] = LENGTHS,
) -> Path:
    """Figure 3b: test bits per character of a trained run, by window length.

    Args:
        run: run folder with ``final.safetensors``.
        results: folder of results.
        device: the device to use.
        root: the data folder.
        lengths: window lengths in characters; the whole sequence is measured as well.
    """
    config, seed = _finished(run)
    _, task = trained_models.open_task(run, device, root)
    kinds = ("population", "batch") if has_statistics(task.model) else ("population",)
    rows: list[tuple[str, str, float]] = []
    for kind in kinds:
        for length in lengths:
            value = trained_models.evaluate(task, "test", kind, str(length))
            rows.append((str(length), kind, value))
    rows.append((WHOLE, "population", trained_models.evaluate(task, "test", "population", "full")))
    path = lengths_path(results, config, seed)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("length", "statistics", "bits"))
    writer.writerows((length, kind, f"{value:.6f}") for length, kind, value in rows)
    write_atomic(path, file.getvalue())
    return path


def read_lengths(path: Path, model: str) -> tuple[list[Line], float | None]:
    """The lines in a file of `measure_lengths`, and the value for the whole sequence."""
    points: dict[str, list[tuple[float, float]]] = {}
    total = None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["length"] == WHOLE:
                    total = float(row["bits"])
                else:
                    point = (float(row["length"]), float(row["bits"]))
                    points.setdefault(row["statistics"], []).append(point)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{path} does not contain bits per character by length: {error}"
        ) from error
    lines = []
    for kind, pairs in points.items():
        x, y = zip(*pairs, strict=True)
        name = NAMES[model]
        series = f"{name} {kind} statistics" if "batch" in points else name
        lines.append(Line(series, OURS, x, y))
    return lines, total


def save_statistics(run: Path, results: Path) -> Path:
    """Figure 5: save the population statistics of some units of a trained run at every step."""
    config, seed = _finished(run)
    tensors, _ = trained_models.load_weights(run)
    generator = torch.Generator().manual_seed(1)
    columns: dict[str, list[float]] = {}
    for title, (module, name) in STATISTICS.items():
        key = next((k for k in tensors if k.endswith(f"{module}.{name}")), None)
        if key is None:
            raise ValueError(f"{run} holds a {config.model}, which has no population statistics")
        values = tensors[key]  # [steps, features]
        chosen = torch.randperm(values.shape[1], generator=generator)[:UNITS].sort().values
        for unit in chosen.tolist():
            columns[f"{title} {unit}"] = values[:, unit].tolist()
    path = statistics_path(results, config, seed)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("step", *columns))
    for step, row in enumerate(zip(*columns.values(), strict=True), start=1):
        writer.writerow((step, *(f"{value:.5g}" for value in row)))
    write_atomic(path, file.getvalue())
    return path


def read_statistics(path: Path) -> dict[str, list[Line]]:
    """The lines in a file of `save_statistics`, by statistic."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines: dict[str, list[Line]] = {title: [] for title in STATISTICS}
    try:
        x = tuple(float(row["step"]) for row in rows)
        for column in rows[0]:
            title, _, unit = column.rpartition(" ")
            if title in lines:
                y = tuple(float(row[column]) for row in rows)
                lines[title].append(Line(f"unit {unit}", OURS, x, y))
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(f"{path} does not contain population statistics: {error}") from error
    return lines


def _finished(run: Path) -> tuple[Config, int]:
    if not (run / "final.safetensors").exists():
        raise CheckpointError(f"{run} is not finished: it has no final.safetensors")
    return run_folder.read_config(run)
