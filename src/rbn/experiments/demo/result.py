"""The demo's options and results."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rbn.experiments.config import LARGEST, LARGEST_RATE
from rbn.training.atomic_files import naming_file, write_atomic

THRESHOLDS = (0.8, 0.9)  # validation accuracies; we report when each is first reached
_MOST_THREADS = 1024


@dataclass(frozen=True)
class Settings:
    """The demo's options, then the hyperparameters, which both models share.

    Attributes:
        permuted: read the pixels in one fixed random order instead of row by row.
        seed: seed of the initial weights, the noise and the order of the minibatches.
        epochs: passes over the training images, for each model.
        threads: CPU threads. A second thread gains little on matrices this small, and if another
            program uses its core, both threads wait at every step.
        learning_rate: learning rate of Adam. At 0.01 the LSTM learns faster, the BN-LSTM does not.
        hidden_size: units of each LSTM.
        batch_size: sequences in a minibatch.
        clip: largest global norm of the gradients.
        gamma: initial value of the normalization's scales.
        hidden_noise: standard deviation of the noise on the initial hidden state in training. The
            first pixels are the same in all images, so without noise there is no variance.
        input_stats: ``"sequence"`` shares the input term's statistics over time. Pixels at the
            edge are blank in all but a few images; per-step statistics would blow those few up.
        evaluate_every: steps between evaluations on the validation images.
    """

    permuted: bool = False
    seed: int = 1
    epochs: int = 25
    threads: int = 1
    learning_rate: float = 5e-3
    hidden_size: int = 100
    batch_size: int = 100
    clip: float = 1.0
    gamma: float = 0.1
    hidden_noise: float = 0.1
    input_stats: str = "sequence"
    evaluate_every: int = 12

    def __post_init__(self) -> None:
        for name, least, most in (
            ("seed", 0, LARGEST),
            ("epochs", 1, LARGEST),
            ("threads", 1, _MOST_THREADS),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if self.learning_rate > LARGEST_RATE:
            raise ValueError(
                f"learning_rate must be at most {LARGEST_RATE}, got {self.learning_rate}"
            )

    @property
    def task(self) -> str:
        """The task in words."""
        return "permuted sequential digits" if self.permuted else "sequential digits"

    @property
    def command(self) -> str:
        """The command that runs the demo with these options."""
        words = ["rbn demo"]
        if self.permuted:
            words.append("--permuted")
        for name in ("seed", "epochs", "threads", "learning_rate"):
            value = getattr(self, name)
            if value != getattr(Settings, name):
                words.append(f"--{name.replace('_', '-')} {value}")
        return " ".join(words)


@dataclass(frozen=True)
class Record:
    """One evaluation on the validation images.

    Attributes:
        step: optimization steps so far.
        seconds: training time so far, without evaluations.
        train_loss: mean cross-entropy in nats of the minibatches since the previous record.
        valid_batch: validation accuracy from 0 to 1 with minibatch statistics.
        valid_population: the same with population statistics, re-estimated at the current
            weights. For a model without statistics both are equal.
    """

    step: int
    seconds: float
    train_loss: float
    valid_batch: float
    valid_population: float


@dataclass(frozen=True)
class Trained:
    """The training of one model.

    Attributes:
        name: ``"LSTM"`` or ``"BN-LSTM"``.
        parameters: number of learned parameters.
        records: the evaluations in order.
        test_accuracy: from 0 to 1, with the parameters of the best validation accuracy and, for the
            BN-LSTM, exact population statistics.
        reach: gradient at the first pixels relative to the last, before training: see
            `rbn.experiments.demo.train.reach`.
    """

    name: str
    parameters: int
    records: tuple[Record, ...]
    test_accuracy: float
    reach: float

    @property
    def best(self) -> Record:
        """The first evaluation with the highest validation accuracy."""
        return max(self.records, key=lambda record: record.valid_population)

    @property
    def last(self) -> Record:
        """The evaluation after the last step."""
        return self.records[-1]

    def reached(self, threshold: float) -> Record | None:
        """The first evaluation with at least this validation accuracy."""
        return next((r for r in self.records if r.valid_population >= threshold), None)


@dataclass(frozen=True)
class Result:
    """A run of the demo.

    Attributes:
        settings: the settings.
        sizes: number of training, validation and test images.
        lstm: the training of the baseline.
        bn_lstm: the training of the batch-normalized model.
        environment: names and versions of the software and the machine.
        seconds: total time, including evaluations.
    """

    settings: Settings
    sizes: tuple[int, int, int]
    lstm: Trained
    bn_lstm: Trained
    environment: dict[str, str]
    seconds: float

    @property
    def models(self) -> tuple[Trained, Trained]:
        """Both models, the baseline first."""
        return self.lstm, self.bn_lstm

    def as_dict(self) -> dict[str, Any]:
        """Everything except the curves, for JSON."""
        models = {}
        for model in self.models:
            reached = {f"{100 * t:.0f}%": model.reached(t) for t in THRESHOLDS}
            models[model.name] = {
                "parameters": model.parameters,
                "reach_before_training": model.reach,
                "steps": model.last.step,
                "training_seconds": model.last.seconds,
                "best_valid_accuracy": model.best.valid_population,
                "best_valid_step": model.best.step,
                "best_valid_accuracy_batch_statistics": max(r.valid_batch for r in model.records),
                "test_accuracy": model.test_accuracy,
                "steps_to_valid": {name: r and r.step for name, r in reached.items()},
                "seconds_to_valid": {name: r and r.seconds for name, r in reached.items()},
            }
        return {
            "task": self.settings.task,
            "command": self.settings.command,
            "settings": asdict(self.settings),
            "images": dict(zip(("train", "valid", "test"), self.sizes, strict=True)),
            "models": models,
            "seconds": self.seconds,
            "environment": self.environment,
        }

    def write_json(self, path: Path) -> None:
        """Write everything except the curves."""
        write_atomic(path, json.dumps(self.as_dict(), indent=2) + "\n")

    def write_csv(self, path: Path) -> None:
        """Write the curves, one row for each evaluation of a model."""
        with naming_file(path), path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["model", *Record.__dataclass_fields__])
            for model in self.models:
                for record in model.records:
                    writer.writerow([model.name, *asdict(record).values()])
