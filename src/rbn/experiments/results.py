"""From a trained run to its published result."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import rbn
from rbn.experiments.config import Config, check_seed
from rbn.experiments.measured import has_statistics
from rbn.experiments.reading import ReadingTask
from rbn.experiments.tasks import Classification, NextSymbol
from rbn.training import Trainer, checkpoint
from rbn.training.atomic_files import read_checked, write_atomic, write_checked
from rbn.training.schedule import Progress

CURVE = ("step", "seconds", "train", "valid_batch", "valid_population")
_CURVE_SUM = "metrics_sha256"  # of the learning curve that belongs to a result
NATS = ("valid_batch_nats", "valid_population_nats")  # where the figure is not the cross-entropy


@torch.no_grad()
def exact_statistics(config: Config, task: Classification | NextSymbol | ReadingTask) -> None:
    """Population statistics of the training set at the model as it is, as the paper reports."""
    if has_statistics(task.model):
        task.estimate_population(config.population_batch)


def finished(folder: Path, progress: Progress) -> dict[str, Any] | None:
    """What ``result.json`` says of a run that has been tested as it is now; None where it does not.

    It stays what it was when the run is gone on with on another machine, or by another version.
    """
    try:
        found = read_checked(folder / "result.json")
        wanted = (progress.step, progress.best_step, progress.diverged_at)
        tested = (found["steps"], found["best_step"], found["diverged_at"]) == wanted
        numbers = all(isinstance(found[name], float) for name in ("valid", "test"))
    except (OSError, KeyError, TypeError, ValueError):
        return None
    whole = tested and numbers and "metric" in found and _is_whole(folder / "final.safetensors")
    return found if whole else None


def _is_whole(path: Path) -> bool:
    try:
        checkpoint.load(path)
    except checkpoint.CheckpointError:
        return False
    return True


def finish(config: Config, seed: int, trainer: Trainer, command: str) -> dict[str, Any]:
    """Test the best model with exact statistics, in the precision it was trained in.

    Writes ``result.json``, and the model with those statistics as ``final.safetensors``. Of several
    processes all must call it.

    Args:
        config: of the run.
        seed: of the run.
        trainer: that trained it.
        command: with which it can be done again.
    """
    task, progress = trainer.task, trainer.progress
    assert isinstance(task, Classification | NextSymbol | ReadingTask)
    trainer.load_best()
    with trainer.isolated():
        exact_statistics(config, task)
        figures = {
            "valid": task.measure_with("valid", "population"),
            "valid_batch": task.measure_with("valid", "batch"),
            "test_batch": task.measure_with("test", "batch"),
        }
        if isinstance(task, NextSymbol):
            figures["test_windows"] = task.measure_with("test", "population")
            figures["test"] = task.measure_whole("test")
            metric = "bits per character, whole sequence"
        else:
            figures["test"] = task.measure_with("test", "population")
            metric = "error rate" if isinstance(task, ReadingTask) else "accuracy"
        if isinstance(task, ReadingTask) and "test-cnn" in task.parts:
            figures["test_cnn"] = task.measure_with("test-cnn", "population")
            figures["test_cnn_batch"] = task.measure_with("test-cnn", "batch")
        tensors = {f"model.{k}": v for k, v in task.model.state_dict().items()}
        facts: dict[str, Any] = {}
        if isinstance(task, NextSymbol):
            facts["symbols"] = task.text.symbols
        final = trainer.folder / "final.safetensors"
        trainer.ranks.from_first(lambda: checkpoint.save(final, tensors, facts))
    curve = trainer.ranks.from_first(trainer.write_history)
    on_gpu = next(task.model.parameters()).is_cuda
    result = {
        "task": config.task,
        "model": config.model,
        "tag": config.tag,
        "seed": seed,
        "metric": metric,
        **figures,
        "stats": "population",
        "steps": progress.step,
        "best_step": progress.best_step,
        "diverged_at": progress.diverged_at,
        "skipped": progress.skipped,  # steps whose gradient was not finite
        "seconds": round(progress.seconds, 1),
        "together": progress.together,
        "devices": trainer.ranks.count,
        "params": sum(p.numel() for p in task.model.parameters()),
        "config": asdict(config),
        "versions": f"rbn {rbn.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "commit": commit(),
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        _CURVE_SUM: hashlib.sha256(curve.encode()).hexdigest(),
    }
    path = trainer.folder / "result.json"
    trainer.ranks.from_first(lambda: write_checked(path, result))
    return result


def publish(run: Path, to: Path, replace: bool = False) -> Path:
    """Copy a run's result and learning curve to ``TASK/MODEL[-TAG]-seedN.json`` and ``.csv``.

    replace: also where there is one of a run with other settings.
    """
    path = run / "result.json"
    try:
        result = read_checked(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{run} has no result: there is no {path.name} in it") from error
    try:
        # A config refuses what is no part of a file's name.
        named = Config(result["task"], result["model"], result["tag"])
        check_seed("seed", result["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the result of a run: {error}") from error
    target = to / named.task / f"{named.name}-seed{result['seed']}.json"
    records = _records(run / "metrics.jsonl", result.pop(_CURVE_SUM, None))
    if not replace:
        _check_place(target, result)
    columns = [*CURVE, *(name for name in NATS if any(name in record for record in records))]
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_rounded, records))
    write_atomic(target.with_suffix(".csv"), table.getvalue())
    write_atomic(target, json.dumps(result, indent=2) + "\n")  # last: it is what says published
    return target


def _records(curve: Path, sha256: str | None) -> list[dict[str, Any]]:
    """The evaluations of a run, each with all that a published learning curve has."""
    try:
        content = curve.read_bytes()
        lines = content.decode().splitlines()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{curve.parent} has no learning curve: {curve.name} is not there"
        ) from error
    except ValueError as error:
        raise ValueError(f"{curve} is damaged: {error}") from error
    if not lines:
        raise ValueError(f"{curve} is empty: there is no learning curve to publish")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_record(line))
        except ValueError as error:
            raise ValueError(f"{curve} is damaged: line {number}: {error}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(
            f"{curve} is damaged or was edited: it is not the learning curve of the result; "
            f"rbn resume {curve.parent} writes it again"
        )
    return records


def _record(line: str) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"it must hold figures by name, got {record!r}")
    for name in (*CURVE, *(name for name in NATS if name in record)):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {value!r}")
    return record


def _check_place(target: Path, result: dict[str, Any]) -> None:
    try:
        there = json.loads(target.read_text())["config"]
    except FileNotFoundError:
        return
    except (KeyError, TypeError, ValueError):
        there = None
    if there != result.get("config"):
        raise ValueError(
            f"{target} is the result of a run with other settings: publish to another folder "
            "(--to), or give --replace"
        )


def _rounded(record: dict[str, float]) -> dict[str, float]:
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}


def commit() -> str:
    """The state of the source that runs, as git describes it, or as RBN_COMMIT says.

    ``unknown`` where the source is not in a repository of its own.
    """
    named = os.environ.get("RBN_COMMIT")
    if named:
        return named
    here = Path(__file__)
    try:
        # Installed inside of another project's repository, it is not of that one's commits.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=10")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *words: str) -> str:
    command = ["git", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.strip()
