"""The training of one of the demo's two models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rbn
from rbn.data import Split, Splits
from rbn.data.digits import CLASSES
from rbn.experiments.demo.result import Settings, Trained
from rbn.models import SequenceClassifier
from rbn.training import Record, accuracy, train


def build(name: str, settings: Settings) -> SequenceClassifier:
    """The LSTM or the BN-LSTM. With one seed, both start from the same weights."""
    torch.manual_seed(settings.seed)
    options: dict[str, Any] = {"hidden_noise": settings.hidden_noise}
    if name == "LSTM":
        return SequenceClassifier(rbn.LSTM(1, settings.hidden_size, **options), CLASSES)
    options |= {"gamma": settings.gamma, "input_stats": settings.input_stats}
    return SequenceClassifier(rbn.BatchNormLSTM(1, settings.hidden_size, **options), CLASSES)


def reach(model: SequenceClassifier, data: Split, batch_size: int) -> float:
    """The norm of the loss's gradient at the first eighth of the steps, over that at the last.

    Near 1, the model can learn from all steps alike; near 0, only from the last ones. Measured on
    the first `batch_size` sequences, in training mode.
    """
    inputs = data.inputs[:, :batch_size].clone().requires_grad_()
    loss = F.cross_entropy(model.train()(inputs), data.labels[:batch_size])
    (gradient,) = torch.autograd.grad(loss, inputs)
    eighth = max(1, len(inputs) // 8)
    return float(gradient[:eighth].norm() / gradient[-eighth:].norm())


def fit(
    name: str,
    settings: Settings,
    data: Splits,
    on_step: Callable[[int, float], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
    device: torch.device | str = "cpu",
) -> Trained:
    """Train, return to the best parameters, estimate the population statistics exactly, test.

    On another device the initial weights and the minibatches are the same, the noise is not.
    """
    data = data.to(device)
    best_parameters: dict[str, Tensor] = {}
    best_accuracy = -1.0

    def keep_best(record: Record) -> None:
        nonlocal best_parameters, best_accuracy
        if record.valid_population > best_accuracy:
            best_accuracy = record.valid_population
            best_parameters = {key: value.clone() for key, value in model.state_dict().items()}
        if on_record:
            on_record(record)

    with torch.random.fork_rng(devices=[]):
        reached = reach(build(name, settings).to(device), data.train, settings.batch_size)
        model = build(name, settings).to(device)  # untouched by that
        records = train(
            model,
            torch.optim.Adam(model.parameters(), lr=settings.learning_rate),
            data.train,
            data.valid,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            evaluate_every=settings.evaluate_every,
            seed=settings.seed,
            clip=settings.clip,
            on_step=on_step,
            on_record=keep_best,
        )
        model.load_state_dict(best_parameters)
        batches = math.ceil(len(data.train) / settings.batch_size)
        rbn.update_population_stats(model, data.train.inputs.tensor_split(batches, dim=1))
    return Trained(
        name,
        sum(parameter.numel() for parameter in model.parameters()),
        tuple(records),
        accuracy(model, data.test, settings.batch_size),
        reached,
    )
