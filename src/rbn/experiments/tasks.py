"""Sequence classification, and prediction of the next character of a text."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rbn import data
from rbn.data import Minibatches, Split, Splits, Text, Windows
from rbn.experiments.base_task import BaseTask, Measurement
from rbn.experiments.config import Config, check_names
from rbn.experiments.recurrent_layers import check_layer, recurrent_layer
from rbn.experiments.task_kinds import IMAGES, TEXT
from rbn.models import LanguageModel, SequenceClassifier
from rbn.training import Ranks

CLASSES = 10


def correct_and_nats(logits: Tensor, classes: Tensor) -> Tensor:
    """The number of correct predictions, and the sum of the cross-entropies, ``[2]``.

    Args:
        logits: ``[B, classes]``.
        classes: the correct ones, ``[B]``.
    """
    correct = (logits.argmax(dim=-1) == classes).sum()
    return torch.stack((correct, F.cross_entropy(logits.float(), classes, reduction="sum")))


class Classification(BaseTask):
    """One label per sequence; the metric is the accuracy, from 0 to 1.

    Args:
        model: maps ``[T, B, features]`` to logits ``[B, classes]``.
        splits: the data, on the model's device.
        batch_size: batch size in training and evaluation.
        seed: random seed of the order of the sequences.
    """

    kind = IMAGES
    row_dims = (1, 0)

    def __init__(self, model: nn.Module, splits: Splits, batch_size: int, seed: int) -> None:
        self.model, self.splits, self.batch_size = model, splits, batch_size
        self.batches = Minibatches(splits.train, batch_size, seed)

    @staticmethod
    def load_data(config: Config, root: Path | None = None) -> Splits:
        """The images of a config."""
        loader: Any = getattr(data, config.task)
        check_names("data", config.data, loader)
        if config.task == "digits":
            return data.digits(**config.data)
        splits: Splits = loader(root=root, **config.data)
        return splits

    @classmethod
    def from_config(
        cls, config: Config, data: Splits, seed: int, device: torch.device
    ) -> Classification:
        """The task of a run on images that are on the device."""
        model = SequenceClassifier(recurrent_layer(config, 1), CLASSES, config.dropout)
        task = cls(model.to(device), data, config.batch_size, seed)
        task.population_batch = config.population_batch
        return task

    @staticmethod
    def check_model(config: Config) -> nn.Module:
        """Build the recurrent layer, which rejects invalid options."""
        return check_layer(config)

    @property
    def batches_per_epoch(self) -> int:
        """Minibatches per pass over the training sequences."""
        return self.batches.batches_per_epoch

    @property
    def items_per_step(self) -> int:
        """Sequences per minibatch."""
        return self.batches.batch_size

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Inputs ``[T, B, features]`` and labels ``[B]`` of minibatch number `step`."""
        return self.batches.batch(*divmod(step, self.batches_per_epoch))

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, in nats."""
        return F.cross_entropy(self.model(inputs).float(), labels)

    def measure(self, split: str) -> Measurement:
        """The accuracy and the cross-entropy."""
        part: Split = getattr(self.splits, split)
        size = len(part)
        # Both in one tensor, for a single transfer to the host.
        sums = torch.zeros(2, dtype=torch.float64, device=part.labels.device)
        # Batches of nearly equal size: the minibatch statistics of a small last one would be noisy.
        pieces = torch.arange(size).tensor_split(math.ceil(size / self.batches.batch_size))
        ranks = Ranks.here()
        for rows in ranks.share(pieces):
            piece = slice(int(rows[0]), int(rows[-1]) + 1)
            sums += correct_and_nats(self.model(part.inputs[:, piece]), part.labels[piece])
        correct, nats = ranks.total(*sums.tolist())
        return Measurement(correct / size, nats / size)

    def population_batches(self, batch_size: int) -> Iterator[Tensor]:
        """One pass over the training inputs, for exact population statistics."""
        inputs = self.splits.train.inputs
        for start in range(0, inputs.shape[1], batch_size):
            yield inputs[:, start : start + batch_size]


class NextSymbol(BaseTask):
    """The next character of a text; the metric is bits per character.

    Args:
        model: a `rbn.models.LanguageModel`, or another model that takes symbols ``[T, B]``, states
            and ``start``, and returns logits and states. If it accepts ``targets`` and
            ``reduction``, it returns the loss instead of the logits when they are given.
        text: the data, on the model's device.
        length: characters per window.
        batch_size: windows per minibatch.
        seed: random seed of the windows and their order.
        valid_windows: evaluate only this many validation windows, the first ones; None: all.
    """

    kind = TEXT
    row_dims = (1, 1)
    estimates_with_masks = False  # like the published results of beyond/ptb and beyond/text8

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
        # Checked before training, whose wrapper accepts any argument.
        self._has_loss = "targets" in inspect.signature(model.forward).parameters
        self.batch_size = batch_size
        self.valid_windows = valid_windows
        self.batches = Windows(text.train, length, batch_size, seed=seed)

    @staticmethod
    def load_data(config: Config, root: Path | None = None) -> Text:
        """The text of a config."""
        loader: Any = getattr(data, config.task)
        check_names("data", config.data, loader)
        if config.task == "pydoc":
            return data.pydoc()
        text: Text = loader(root=root, **config.data)
        return text

    @classmethod
    def from_config(cls, config: Config, data: Text, seed: int, device: torch.device) -> NextSymbol:
        """The task of a run on a text that is on the device."""
        model = LanguageModel(recurrent_layer(config, len(data.symbols)), config.dropout)
        windows = config.length, config.batch_size, seed, config.valid_windows
        task = cls(model.to(device), data, *windows)
        task.population_batch = config.population_batch
        return task

    @staticmethod
    def check_model(config: Config) -> nn.Module:
        """Build the recurrent layer, which rejects invalid options."""
        return check_layer(config)

    @property
    def batches_per_epoch(self) -> int:
        """Minibatches per pass over the training text."""
        return self.batches.batches_per_epoch

    @property
    def items_per_step(self) -> int:
        """Characters to predict per minibatch."""
        return self.batches.batch_size * (self.length - 1)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Input and target symbols of minibatch number `step`, ``[T, B]`` each."""
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

    def measure(self, split: str, length: int | None = None) -> Measurement:
        """Bits per character on windows, of the training length by default."""
        stream: Tensor = getattr(self.text, split)
        length = self.length if length is None else length
        if split == "valid" and self.valid_windows is not None:
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
    def measure_whole(self, split: str, piece: int = 10_000) -> float:
        """Bits per character of a split as one sequence, with population statistics.

        Reads the text in pieces and passes the states on, so memory does not grow with its length.
        """
        stream: Tensor = getattr(self.text, split)
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

    def default_length(self, split: str, statistics: str) -> str | None:
        """The length that ``rbn train`` reports: the full text if the statistics allow it."""
        return "full" if (split, statistics) == ("test", "population") else str(self.length)

    def check_length(self, length: str, statistics: str) -> None:
        """Reject ``full`` with minibatch statistics: the batch is a single sequence."""
        if length == "full" and statistics == "batch":
            raise ValueError("length full is a batch of one sequence: it needs stats population")

    def measure_at_length(self, split: str, statistics: str, length: str) -> float:
        """Bits per character on windows of a length, or on the text as one sequence (``full``)."""
        if length == "full":
            return self.measure_whole(split)
        before, self.length = self.length, int(length)
        try:
            return self.measure_with(split, statistics)
        finally:
            self.length = before

    def final_metrics(self) -> dict[str, float]:
        """``test`` is measured on the test text as one sequence, ``test_windows`` on windows."""
        metrics = super().final_metrics()
        metrics["test_windows"] = metrics.pop("test")
        return metrics | {"test": self.measure_whole("test")}

    def model_metadata(self) -> dict[str, Any]:
        """The alphabet, so that the model can generate text without the data."""
        return {"symbols": self.text.symbols}

    def population_batches(self, batch_size: int) -> Iterator[Tensor]:
        """One pass over the training windows, for exact population statistics."""
        windows = Windows(self.text.train, self.length, batch_size, shuffle=False)
        for k in range(windows.batches_per_epoch):
            yield windows.batch(0, k)[0]
