"""A running average of a model's parameters, which is often better than any of their values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rbn.training.checkpoint import CheckpointError


class AveragedParameters:
    """The exponential moving average of a model's parameters.

    Step n, from 0, counts as ``max(1 - decay, 1 / (n + 1))``, so that early on it is the mean of
    all steps so far and does not remember the model's beginning.

    Args:
        model: whose parameters are averaged; they stay where they are.
        decay: what remains of the average with every step, at least 0 and below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}")
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.average = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: Tensor) -> None:
        """Take in the present parameters. step: of this update, a scalar on their device."""
        weight = (1 / (step + 1)).clamp(min=1 - self.decay)
        for name, parameter in self._parameters.items():
            self.average[name].lerp_(parameter, weight.to(parameter))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the average for its parameters."""
        present = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._put(self.average)
            yield
        finally:
            self._put(present)

    def state(self) -> dict[str, Tensor]:
        """The averages by name, for a checkpoint."""
        return {f"average.{name}": value for name, value in self.average.items()}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave, out of a checkpoint's tensors."""
        for name, value in self.average.items():
            found = tensors.get(f"average.{name}")
            if found is None:
                raise CheckpointError(
                    "the checkpoint does not fit the run's settings, which may have been changed: "
                    f"it has no average of {name}"
                )
            value.copy_(found)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])
