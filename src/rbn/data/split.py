"""Labelled sequences, and the three parts of a data set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Sequences with one label each.

    Attributes:
        inputs: float ``[T, N, features]``, time first; a minibatch is ``inputs[:, rows]``.
        labels: int64 ``[N]``.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> Split:
        """The first `count` sequences, or all if there are fewer."""
        return Split(self.inputs[:, :count], self.labels[:count])

    def to(self, device: torch.device | str) -> Split:
        """Copy to another device."""
        return Split(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Splits:
    """The parts of a data set."""

    train: Split
    valid: Split
    test: Split

    def to(self, device: torch.device | str) -> Splits:
        """Copy to another device."""
        return Splits(self.train.to(device), self.valid.to(device), self.test.to(device))
