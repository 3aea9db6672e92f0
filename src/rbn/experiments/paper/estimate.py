"""Estimates how long a run takes, from similar runs or measured rates."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rbn.experiments.config import Config
from rbn.experiments.paper.published import Result

# Optimization steps per epoch with the configs' batch size and length.
_EPOCHS = {"digits": 12, "mnist": 500, "pmnist": 500, "ptb": 790, "text8": 3906, "pydoc": 140}
_EPOCHS |= {"cloze": 60}
# Number of training questions.
_QUESTIONS = {"cnn": 380_298, "cnn-built": 118_037, "dailymail-built": 110_216}
# Seconds per step on two CPU cores and on one H200.
_SECONDS = {
    "cpu": {
        "digits": 0.08,
        "mnist": 0.9,
        "pmnist": 0.9,
        "ptb": 3.0,
        "text8": 40.0,
        "pydoc": 0.1,
        "cloze": 0.1,
        "cnn": 1.0,
        "cnn-built": 1.0,
        "dailymail-built": 1.0,
    },
    "cuda": {"digits": 0.004, "mnist": 0.015, "pmnist": 0.015, "ptb": 0.006, "text8": 0.05},
}
_FULL_DOCUMENTS = 2.0  # full documents take this many times as long as four sentences
_OTHERWISE = {"cpu": 1.0, "cuda": 0.02}
_TESTING = {"cpu": 1.2, "cuda": 1.15}  # adds evaluations and the test


def steps_of(config: Config) -> int:
    """Optimization steps of a run without early stopping."""
    if config.task in _QUESTIONS:
        return config.epochs * (_QUESTIONS[config.task] // config.batch_size)
    return config.epochs * _EPOCHS.get(config.task, 1000)


def seconds_of(config: Config, device: torch.device, results: Iterable[Result]) -> float:
    """Estimate the time of a run.

    Uses the speed of a result with the same task, model and size on the same kind of device if
    there is one, and typical speeds otherwise.
    """
    on_gpu = device.type == "cuda"
    for result in results:
        same = result.task == config.task and result.model == config.model
        same = same and result.config.get("hidden_size") == config.hidden_size
        same = same and result.config.get("data", {}).get("sentences") == config.data.get(
            "sentences"
        )
        if same and bool(result.values.get("gpu")) == on_gpu:
            rate = float(result.values["seconds"]) / max(1, int(result.values["steps"]))
            return rate * steps_of(config)
    rates = _SECONDS.get(device.type, {})
    rate = rates.get(config.task, _OTHERWISE.get(device.type, 1.0))
    if config.task in _QUESTIONS and config.data.get("sentences") is None:
        rate *= _FULL_DOCUMENTS
    return rate * steps_of(config) * _TESTING.get(device.type, 1.2)


def format_duration(seconds: float) -> str:
    """A duration as text."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
