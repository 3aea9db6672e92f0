"""Trains one of the demo's two models."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import rbn
from rbn.data import Split, Splits
from rbn.data.digits import CLASSES
from rbn.experiments.demo.result import Record, Settings, Trained
from rbn.experiments.tasks import Classification
from rbn.models import SequenceClassifier
from rbn.training import Diverged, Progress, Schedule, Trainer


def build(name: str, settings: Settings) -> SequenceClassifier:
    """Build the LSTM or the BN-LSTM. With the same seed, both start from the same weights."""
    torch.manual_seed(settings.seed)
    options: dict[str, Any] = {"hidden_noise": settings.hidden_noise}
    if name == "LSTM":
        return SequenceClassifier(rbn.LSTM(1, settings.hidden_size, **options), CLASSES)
    options |= {"gamma": settings.gamma, "input_stats": settings.input_stats}
    return SequenceClassifier(rbn.BatchNormLSTM(1, settings.hidden_size, **options), CLASSES)


def reach(model: SequenceClassifier, data: Split, batch_size: int) -> float:
    """The norm of the loss's gradient at the first eighth of the steps, relative to the last.

    Near 1, the model can learn from all steps; near 0, only from the last ones. Measured on
    the first `batch_size` sequences, in training mode.
    """
    inputs = data.inputs[:, :batch_size].clone().requires_grad_()
    loss = F.cross_entropy(model.train()(inputs), data.labels[:batch_size])
    (gradient,) = torch.autograd.grad(loss, inputs)
    eighth = max(1, len(inputs) // 8)
    return float(gradient[:eighth].norm() / gradient[-eighth:].norm())


class _Timed(Classification):
    """Measures the time of evaluations."""

    spent = 0.0

    def evaluate(self) -> dict[str, float]:
        began = time.perf_counter()
        metrics = super().evaluate()
        self.spent += time.perf_counter() - began
        return metrics


def fit(
    name: str,
    settings: Settings,
    data: Splits,
    on_step: Callable[[int], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
    device: torch.device | str = "cpu",
) -> Trained:
    """Train a model, load its best parameters, compute exact population statistics and test it.

    Args:
        name: ``"LSTM"`` or ``"BN-LSTM"``.
        settings: what to train, and how.
        data: the sequences.
        on_step: called after every step with its number, from 1.
        on_record: called after every evaluation on the validation data.
        device: the device to train on. The noise depends on the type of device.
    """
    data = data.to(device)
    records: list[Record] = []
    spent = 0.0  # seconds of earlier evaluations

    def record(evaluation: dict[str, float]) -> None:
        nonlocal spent
        figures = [evaluation[key] for key in ("train", "valid_batch", "valid_population")]
        records.append(Record(int(evaluation["step"]), evaluation["seconds"] - spent, *figures))
        spent = task.spent
        if on_record:
            on_record(records[-1])

    def step(now: Progress) -> None:
        if on_step:
            on_step(now.step)

    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        reached = reach(build(name, settings).to(device), data.train, settings.batch_size)
        model = build(name, settings).to(device)  # a new one, since `reach` changes the statistics
        task = _Timed(model, data, settings.batch_size, settings.seed)
        steps = settings.epochs * task.batches_per_epoch
        trainer = Trainer(
            task,
            torch.optim.Adam(model.parameters(), lr=settings.learning_rate),
            Schedule(steps, settings.evaluate_every, clip=settings.clip, checkpoint_seconds=60.0),
            Path(folder),
            on_step=step,
            on_record=record,
        )
        try:
            trainer.run()
        except Diverged:  # its message names files in the temporary folder
            at = trainer.progress.diverged_at
            raise Diverged(f"the training of the {name} diverged at step {at}") from None
        trainer.load_best()
        task.model = model
        batches = math.ceil(len(data.train) / settings.batch_size)
        rbn.update_population_stats(model, data.train.inputs.tensor_split(batches, dim=1))
        right = task.measure_with("test", "population")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Trained(name, parameters, tuple(records), right, reached)
