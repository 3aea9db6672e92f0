"""The result of a run: tests it, writes it, publishes it."""

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
from rbn.experiments.base_task import BaseTask, has_statistics
from rbn.experiments.config import Config, check_seed
from rbn.training import Trainer, checkpoint
from rbn.training.atomic_files import read_checked, write_atomic, write_checked
from rbn.training.schedule import Progress

CURVE = ("step", "seconds", "train", "valid_batch", "valid_population")
_CURVE_CHECKSUM = "metrics_sha256"  # checksum of the result's learning curve
NATS = ("valid_batch_nats", "valid_population_nats")  # if the metric is not the cross-entropy


@torch.no_grad()
def exact_statistics(config: Config, task: BaseTask) -> None:
    """Compute the current model's population statistics on the training set, as in the paper."""
    if has_statistics(task.model):
        task.estimate_population(config.population_batch)


def finished(folder: Path, progress: Progress) -> dict[str, Any] | None:
    """The content of ``result.json``; None if the run has not been tested since its last step.

    A finished run that is resumed on another machine or with another version is not tested again.
    """
    try:
        result = read_checked(folder / "result.json")
        current = (progress.step, progress.best_step, progress.diverged_at)
        tested = (result["steps"], result["best_step"], result["diverged_at"]) == current
        has_numbers = all(isinstance(result[name], float) for name in ("valid", "test"))
    except (OSError, KeyError, TypeError, ValueError):
        return None
    is_complete = tested and has_numbers and "metric" in result
    return result if is_complete and _is_intact(folder / "final.safetensors") else None


def _is_intact(path: Path) -> bool:
    try:
        checkpoint.load(path)
    except checkpoint.CheckpointError:
        return False
    return True


def finish(config: Config, seed: int, trainer: Trainer, command: str) -> dict[str, Any]:
    """Test the best model with exact statistics, in the precision it was trained in.

    Writes ``result.json``, and the model with those statistics as ``final.safetensors``. All
    processes of the run must call it.

    Args:
        config: the run's config.
        seed: the run's seed.
        trainer: the trainer of the run.
        command: the command that reproduces the run.
    """
    task, progress = trainer.task, trainer.progress
    assert isinstance(task, BaseTask)
    trainer.load_best()
    with trainer.isolated():
        exact_statistics(config, task)
        metrics = task.final_metrics()
        tensors = {f"model.{k}": v for k, v in task.model.state_dict().items()}
        final = trainer.folder / "final.safetensors"
        trainer.ranks.from_first(lambda: checkpoint.save(final, tensors, task.model_metadata()))
    curve = trainer.ranks.from_first(trainer.write_history)
    on_gpu = next(task.model.parameters()).is_cuda
    result = {
        "task": config.task,
        "model": config.model,
        "tag": config.tag,
        "seed": seed,
        "metric": task.kind.result_metric,
        **metrics,
        "stats": "population",
        "steps": progress.step,
        "best_step": progress.best_step,
        "diverged_at": progress.diverged_at,
        "skipped": progress.skipped,
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
        _CURVE_CHECKSUM: hashlib.sha256(curve.encode()).hexdigest(),
    }
    path = trainer.folder / "result.json"
    trainer.ranks.from_first(lambda: write_checked(path, result))
    return result


def publish(run: Path, to: Path, replace: bool = False) -> Path:
    """Copy a run's result and learning curve to ``TASK/MODEL[-TAG]-seedN.json`` and ``.csv``.

    replace: overwrite the result of a run with other settings.
    """
    path = run / "result.json"
    try:
        result = read_checked(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{run} has no result: it has no {path.name}") from error
    try:
        # A config refuses names that could lead outside the folder.
        named = Config(result["task"], result["model"], result["tag"])
        check_seed("seed", result["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the result of a run: {error}") from error
    target = to / named.task / f"{named.name}-seed{result['seed']}.json"
    records = _records(run / "metrics.jsonl", result.pop(_CURVE_CHECKSUM, None))
    if not replace:
        _check_target(target, result)
    columns = [*CURVE, *(name for name in NATS if any(name in record for record in records))]
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_rounded, records))
    write_atomic(target.with_suffix(".csv"), table.getvalue())
    write_atomic(
        target, json.dumps(result, indent=2) + "\n"
    )  # last: it marks the result as published
    return target


def _records(curve: Path, sha256: str | None) -> list[dict[str, Any]]:
    """The evaluations of a run, checked for all columns of a published learning curve."""
    try:
        content = curve.read_bytes()
        lines = content.decode().splitlines()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{curve.parent} has no learning curve: it has no {curve.name}"
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
            f"{curve} is damaged or was edited: it does not match the result; "
            f"rbn resume {curve.parent} writes it again"
        )
    return records


def _record(line: str) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"it must contain numbers by name, got {record!r}")
    for name in (*CURVE, *(name for name in NATS if name in record)):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number, got {value!r}")
    return record


def _check_target(target: Path, result: dict[str, Any]) -> None:
    try:
        existing = json.loads(target.read_text())["config"]
    except FileNotFoundError:
        return
    except (KeyError, TypeError, ValueError):
        existing = None
    if existing != result.get("config"):
        raise ValueError(
            f"{target} is the result of a run with other settings: publish to another folder "
            "(--to), or use --replace"
        )


def _rounded(record: dict[str, float]) -> dict[str, float]:
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}


def commit() -> str:
    """The commit of the running source, from git or from RBN_COMMIT.

    ``unknown`` if the source is not in its own repository.
    """
    named = os.environ.get("RBN_COMMIT")
    if named:
        return named
    here = Path(__file__)
    try:
        # Installed inside another project's repository: its commits are not ours.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=10")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *words: str) -> str:
    command = ["git", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.strip()
