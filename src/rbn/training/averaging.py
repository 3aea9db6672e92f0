"""A running average of a model's parameters, which often generalizes better than the last ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rbn.training.checkpoint import CheckpointError


class AveragedParameters:
    """The exponential moving average of a model's parameters.

    Step n, from 0, has the weight ``max(1 - decay, 1 / (n + 1))``. So the first averages are the
    mean of all steps so far, and do not depend on the initial parameters.

    Args:
        model: the model to average. It is not modified.
        decay: factor of the old average in every step, at least 0 and below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}")
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.average = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: Tensor) -> None:
        """Add the current parameters. step: number of this update, a scalar on their device."""
        weight = (1 / (step + 1)).clamp(min=1 - self.decay)
        for name, parameter in self._parameters.items():
            self.average[name].lerp_(parameter, weight.to(parameter))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the ``with`` block, the model's parameters are the averages."""
        current = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._put(self.average)
            yield
        finally:
            self._put(current)

    def state(self) -> dict[str, Tensor]:
        """The averages by name, for a checkpoint."""
        return {f"average.{name}": value for name, value in self.average.items()}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load the averages that `state` returned from a checkpoint's tensors."""
        for name, value in self.average.items():
            saved = tensors.get(f"average.{name}")
            if saved is None:
                raise CheckpointError(
                    "the checkpoint does not match the run's settings, which may have changed: "
                    f"no average of {name}"
                )
            value.copy_(saved)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])
