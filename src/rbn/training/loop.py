"""The training of a classifier, from the first step to the last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rbn.nn import PopulationStatistics, batch_statistics


class Examples(Protocol):
    """Sequences with one label each, as `rbn.data` gives them."""

    @property
    def inputs(self) -> Tensor:
        """Time first, ``[T, N, features]``."""

    @property
    def labels(self) -> Tensor:
        """Class numbers, int64 ``[N]``."""


@dataclass(frozen=True)
class Record:
    """What one evaluation saw.

    Attributes:
        step: optimisation steps taken so far.
        seconds: time spent on them, evaluations left out.
        train_loss: mean cross-entropy, in nats, of the minibatches since the last record.
        valid_batch: validation accuracy from 0 to 1 with minibatch statistics, as the paper plots.
        valid_population: the same with population statistics, a running average. A model without
            statistics has the same accuracy twice.
    """

    step: int
    seconds: float
    train_loss: float
    valid_batch: float
    valid_population: float


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    training: Examples,
    validation: Examples,
    *,
    epochs: int,
    batch_size: int,
    evaluate_every: int,
    seed: int,
    clip: float = 1.0,
    on_step: Callable[[int, float], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Minimise the cross-entropy of the model's logits over shuffled minibatches.

    An epoch is ``N // batch_size`` full minibatches; the few sequences left over wait for another
    epoch's order. The model is in training mode afterwards.

    Args:
        model: takes ``[T, B, features]`` and returns logits ``[B, classes]``.
        optimizer: of the model's parameters.
        training: sequences to fit.
        validation: sequences to evaluate on, in batches no larger than those of training.
        epochs: passes over the training set.
        batch_size: sequences in a minibatch.
        evaluate_every: steps between evaluations; there is one after the last step as well.
        seed: of the order of the sequences. What the model itself draws, it draws from torch's
            global generator.
        clip: largest global norm of all gradients together; longer ones are scaled down to it.
        on_step: called after every step with its number, from 1, and its loss.
        on_record: called after every evaluation.

    Returns:
        The evaluations in order.

    Raises:
        FloatingPointError: as soon as a loss or a gradient is not finite.
    """
    for name, value in (("epochs", epochs), ("evaluate_every", evaluate_every)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    size = len(training.labels)
    if not 1 <= batch_size <= size:
        raise ValueError(f"batch_size must be from 1 to the {size} sequences, got {batch_size}")

    records: list[Record] = []
    losses: list[float] = []
    last = epochs * (size // batch_size)
    seconds = 0.0
    model.train()
    for step, rows in enumerate(_minibatches(size, batch_size, epochs, seed), 1):
        began = time.perf_counter()
        loss = F.cross_entropy(model(training.inputs[:, rows]), training.labels[rows])
        _require_finite("loss", loss, step)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        _require_finite("gradient's norm", norm, step)
        optimizer.step()
        losses.append(loss.item())
        seconds += time.perf_counter() - began
        if on_step:
            on_step(step, losses[-1])
        if step % evaluate_every == 0 or step == last:
            mean = math.fsum(losses) / len(losses)
            records.append(Record(step, seconds, mean, *_validate(model, validation, batch_size)))
            losses.clear()
            if on_record:
                on_record(records[-1])
    return records


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples, batch_size: int) -> float:
    """The part of the examples, from 0 to 1, whose most probable class is the right one.

    The model is in `eval()` meanwhile. Batches are as equal in size as can be, none larger than
    `batch_size`: minibatch statistics of a small rest would say little.
    """
    was_training = model.training
    model.eval()
    size = len(examples.labels)
    right = 0
    for rows in torch.arange(size).tensor_split(math.ceil(size / batch_size)):
        predicted = model(examples.inputs[:, rows]).argmax(dim=-1)
        right += int((predicted == examples.labels[rows]).sum())
    model.train(was_training)
    return right / size


def _minibatches(size: int, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Row numbers, int64 ``[batch_size]``, in a new order every epoch."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(size, generator=generator)
        for start in range(0, size - batch_size + 1, batch_size):
            yield order[start : start + batch_size]


def _validate(model: nn.Module, examples: Examples, batch_size: int) -> tuple[float, float]:
    """Accuracy with minibatch statistics, and with population statistics."""
    population = accuracy(model, examples, batch_size)
    if not any(isinstance(module, PopulationStatistics) for module in model.modules()):
        return population, population
    with batch_statistics(model):
        return accuracy(model, examples, batch_size), population


def _require_finite(name: str, value: Tensor, step: int) -> None:
    if not bool(value.isfinite()):
        raise FloatingPointError(f"the {name} is {value.item()} at step {step}: training diverged")
