"""The paper's sequence tasks: what is measured, and how."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rbn.data import Minibatches, Split, Splits, Text, Windows
from rbn.nn import (
    PopulationStatistics,
    batch_statistics,
    kept_statistics,
    own_statistics,
    update_population_stats,
)
from rbn.training import Ranks

ESTIMATE = 50  # minibatches behind the population statistics of a look at the validation data


def has_statistics(model: nn.Module) -> bool:
    """Whether a model normalizes over batches."""
    return any(isinstance(module, PopulationStatistics) for module in model.modules())


def draws_noise(model: nn.Module) -> bool:
    """Whether initial states are noisy while training."""
    return any(getattr(module, "hidden_noise", 0) > 0 for module in model.modules())


class Measured(abc.ABC):
    """A task that is measured with minibatch statistics and with population statistics.

    Of several processes that train together each measures and estimates with some of the
    minibatches, whole ones, so that the figures are those of one process.

    Attributes:
        estimate: minibatches behind the population statistics of an evaluation; None takes the
            running averages.
        population_batch: rows of the batches that these are cut into, which should be those of the
            final statistics: small ones understate a variance. None: the training minibatches'.
        metric: ``"valid_batch"`` or ``"valid_population"``, which of them names the best model.
        row_dims: along which dimension of each tensor of a minibatch its rows lie.
    """

    model: nn.Module
    batch_size: int
    estimate: int | None = ESTIMATE
    population_batch: int | None = None
    row_dims: tuple[int, ...]
    metric = "valid_population"
    forward: Callable[[nn.Module, Any], object] | None = None  # on one of `population_batches`

    @abc.abstractmethod
    def measure(self, part: str) -> float:
        """The figure on one part of the data, with the statistics that the model uses now."""

    @abc.abstractmethod
    def population_batches(self, batch_size: int) -> Iterator[Any]:
        """The training inputs once, for exact population statistics."""

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The validation figure with both kinds of statistics; once where there are none.

        While the model moves, the running averages lag behind it. So the population statistics are
        estimated from a few minibatches at the model as it is; the running ones stay as they are.
        """
        if not has_statistics(self.model):
            value = self.measure_with("valid", "population")
            return {"valid_batch": value, "valid_population": value}
        found = {"valid_batch": self.measure_with("valid", "batch")}
        if self.estimate is None:
            return found | {"valid_population": self.measure_with("valid", "population")}
        size = self.population_batch or self.batch_size
        with kept_statistics(self.model):
            self.estimate_population(size, math.ceil(self.estimate * self.batch_size / size))
            found["valid_population"] = self.measure_with("valid", "population")
        return found

    @torch.no_grad()
    def estimate_population(self, batch_size: int, count: int | None = None) -> None:
        """Population statistics at the model as it is, of all training data or some minibatches.

        Without dropout and zoneout, as it is evaluated. But with the noise that in-order MNIST has
        in its initial states: while all images are alike, that noise is all there is to normalize,
        and the first images to differ would be many deviations away without it.
        """
        batches = Ranks.here().share(itertools.islice(self.population_batches(batch_size), count))
        with own_statistics(self.model):
            update_population_stats(
                self.model, batches, forward=self.forward, train_mode=draws_noise(self.model)
            )

    @torch.no_grad()
    def measure_with(self, part: str, statistics: str) -> float:
        """The figure on one part, with ``"batch"`` or ``"population"`` statistics."""
        was_training = self.model.training
        self.model.eval()
        try:
            if statistics == "batch" and has_statistics(self.model):
                with batch_statistics(self.model):
                    return self.measure(part)
            return self.measure(part)
        finally:
            self.model.train(was_training)


class Classification(Measured):
    """One label for each sequence; measured by accuracy, from 0 to 1.

    Args:
        model: takes ``[T, B, features]`` and returns logits ``[B, classes]``.
        splits: the data, on the model's device.
        batch_size: of training and of evaluation.
        seed: of the order of the sequences.
    """

    higher_is_better = True
    row_dims = (1, 0)

    def __init__(self, model: nn.Module, splits: Splits, batch_size: int, seed: int) -> None:
        self.model, self.splits, self.batch_size = model, splits, batch_size
        self.batches = Minibatches(splits.train, batch_size, seed)

    @property
    def batches_per_epoch(self) -> int:
        """Minibatches of a pass over the training sequences."""
        return self.batches.batches_per_epoch

    @property
    def items_per_step(self) -> int:
        """Sequences of a minibatch."""
        return self.batches.batch_size

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Inputs ``[T, B, features]`` and labels ``[B]`` of minibatch number `step`."""
        return self.batches.batch(*divmod(step, self.batches_per_epoch))

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, in nats."""
        return F.cross_entropy(self.model(inputs).float(), labels)

    def measure(self, part: str) -> float:
        """Accuracy."""
        split: Split = getattr(self.splits, part)
        size = len(split)
        right = torch.zeros((), dtype=torch.int64, device=split.labels.device)
        # As equal in size as can be: minibatch statistics of a small rest would say little.
        pieces = torch.arange(size).tensor_split(math.ceil(size / self.batches.batch_size))
        ranks = Ranks.here()
        for rows in ranks.share(pieces):
            piece = slice(int(rows[0]), int(rows[-1]) + 1)
            predicted = self.model(split.inputs[:, piece]).argmax(dim=-1)
            right += (predicted == split.labels[piece]).sum()
        return ranks.total(int(right))[0] / size

    def population_batches(self, batch_size: int) -> Iterator[Tensor]:
        """The training inputs once, for exact population statistics."""
        inputs = self.splits.train.inputs
        for start in range(0, inputs.shape[1], batch_size):
            yield inputs[:, start : start + batch_size]


class NextSymbol(Measured):
    """The next character of a text; measured in bits per character.

    Args:
        model: a `rbn.models.LanguageModel`.
        text: the data, on the model's device.
        length: characters of a window.
        batch_size: windows of a minibatch.
        seed: of cuts and orders.
        valid_windows: validation windows to look at, the first ones; None for all.
    """

    higher_is_better = False
    row_dims = (1, 1)

    def __init__(
        self,
        model: nn.Module,
        text: Text,
        length: int,
        batch_size: int,
        seed: int,
        valid_windows: int | None = None,
    ) -> None:
        self.model, self.text, self.length = model, text, length
        self.batch_size = batch_size
        self.valid_windows = valid_windows
        self.batches = Windows(text.train, length, batch_size, seed=seed)

    @property
    def batches_per_epoch(self) -> int:
        """Minibatches of a pass over the training text."""
        return self.batches.batches_per_epoch

    @property
    def items_per_step(self) -> int:
        """Characters that a minibatch predicts."""
        return self.batches.batch_size * (self.length - 1)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Symbols and those that follow them, ``[T, B]``, of minibatch number `step`."""
        return self.batches.batch(*divmod(step, self.batches_per_epoch))

    def loss(self, symbols: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Cross-entropy, in nats per character."""
        logits, _ = self.model(symbols)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)

    def measure(self, part: str, length: int | None = None) -> float:
        """Bits per character of a part's windows, of the training length by default."""
        stream: Tensor = getattr(self.text, part)
        length = self.length if length is None else length
        if part == "valid" and self.valid_windows is not None:
            stream = stream[: self.valid_windows * length]
        windows = Windows(stream, length, self.batches.batch_size, shuffle=False)
        nats = torch.zeros((), dtype=torch.float64, device=stream.device)
        count, ranks = 0, Ranks.here()
        for k in ranks.share(range(windows.batches_per_epoch)):
            symbols, targets = windows.batch(0, k)
            nats += self.loss(symbols, targets, "sum")
            count += targets.numel()
        total, characters = ranks.total(float(nats), count)
        return total / characters / math.log(2)

    @torch.no_grad()
    def measure_whole(self, part: str, piece: int = 10_000) -> float:
        """Bits per character of a part as one sequence, with population statistics.

        The text is read in pieces, each going on from the states of the one before, so memory does
        not grow with its length.
        """
        stream: Tensor = getattr(self.text, part)
        was_training = self.model.training
        self.model.eval()
        nats, states = torch.zeros((), dtype=torch.float64, device=stream.device), None
        for start in range(0, len(stream) - 1, piece):
            window = stream[start : start + piece + 1].to(torch.int64)
            logits, states = self.model(window[:-1, None], states, start=start)
            nats += F.cross_entropy(logits[:, 0].float(), window[1:], reduction="sum")
        self.model.train(was_training)
        return float(nats) / (len(stream) - 1) / math.log(2)

    def population_batches(self, batch_size: int) -> Iterator[Tensor]:
        """The training windows once, for exact population statistics."""
        windows = Windows(self.text.train, self.length, batch_size, shuffle=False)
        for k in range(windows.batches_per_epoch):
            yield windows.batch(0, k)[0]
