"""The paper's sequence tasks: what is measured, and how."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rbn.data import Minibatches, Split, Splits, Text, Windows
from rbn.experiments.measured import Measured, Measurement
from rbn.training import Ranks


def right_and_nats(logits: Tensor, classes: Tensor) -> Tensor:
    """How many are answered rightly, and the sum of the cross-entropies, ``[2]``.

    Args:
        logits: ``[B, classes]``.
        classes: the right ones, ``[B]``.
    """
    right = (logits.argmax(dim=-1) == classes).sum()
    return torch.stack((right, F.cross_entropy(logits.float(), classes, reduction="sum")))


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

    def measure(self, part: str) -> Measurement:
        """Accuracy, and the cross-entropy beside it."""
        split: Split = getattr(self.splits, part)
        size = len(split)
        # Both in one tensor, which comes to the host at once.
        sums = torch.zeros(2, dtype=torch.float64, device=split.labels.device)
        # As equal in size as can be: minibatch statistics of a small rest would say little.
        pieces = torch.arange(size).tensor_split(math.ceil(size / self.batches.batch_size))
        ranks = Ranks.here()
        for rows in ranks.share(pieces):
            piece = slice(int(rows[0]), int(rows[-1]) + 1)
            sums += right_and_nats(self.model(split.inputs[:, piece]), split.labels[piece])
        right, nats = ranks.total(*sums.tolist())
        return Measurement(right / size, nats / size)

    def population_batches(self, batch_size: int) -> Iterator[Tensor]:
        """The training inputs once, for exact population statistics."""
        inputs = self.splits.train.inputs
        for start in range(0, inputs.shape[1], batch_size):
            yield inputs[:, start : start + batch_size]


class NextSymbol(Measured):
    """The next character of a text; measured in bits per character.

    Args:
        model: a `rbn.models.LanguageModel`, or another that takes symbols ``[T, B]``, states and
            ``start`` and returns logits and states; with ``targets`` and ``reduction`` the loss
            instead, if it takes those.
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
        # Asked now: what wraps the model for training takes anything.
        self._has_loss = "targets" in inspect.signature(model.forward).parameters
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
        return self._loss(symbols, targets, reduction)[0]

    def _loss(
        self, symbols: Tensor, targets: Tensor, reduction: str, *states: Any, **start: int
    ) -> tuple[Tensor, Any]:
        """The loss and the states after the symbols, from those before and their time step."""
        if self._has_loss:
            options = {"targets": targets, "reduction": reduction}
            loss, after = self.model(symbols, *states, **start, **options)
            return loss, after
        logits, after = self.model(symbols, *states, **start)
        logits = logits.float().flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction=reduction), after

    def measure(self, part: str, length: int | None = None) -> Measurement:
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
        return Measurement(total / characters / math.log(2))

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
            symbols, targets = window[:-1, None], window[1:, None]
            loss, states = self._loss(symbols, targets, "sum", states, start=start)
            nats += loss
        self.model.train(was_training)
        return float(nats) / (len(stream) - 1) / math.log(2)

    def population_batches(self, batch_size: int) -> Iterator[Tensor]:
        """The training windows once, for exact population statistics."""
        windows = Windows(self.text.train, self.length, batch_size, shuffle=False)
        for k in range(windows.batches_per_epoch):
            yield windows.batch(0, k)[0]
