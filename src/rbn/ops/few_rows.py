"""Training steps that few sequences of a minibatch reach.

A single row has no minibatch statistics, and those of two or three rows make gradients explode
(benchmarks/few_sequences.py). Once most sequences have ended, steps are therefore normalized with
constants: mean and variance of each feature over all rows of the earlier steps. The operators'
option ``min_rows`` says how many rows a step needs for its own statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.types import CONSTANT

# The variance used for features that never varied: they are normalized to 0.
NO_SCALE = 1e30
ENOUGH_ROWS = 4


def enough_rows(batch: int) -> int:
    """How many sequences of a minibatch must reach a step for it to use its own statistics.

    A quarter of the minibatch, but at least 2 and at most 4.
    """
    return max(2, min(ENOUGH_ROWS, -(-batch // 4)))


def pooled(mean: Tensor, var: Tensor, rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and variance ``[..., 1, F]`` over all rows of all steps.

    Args:
        mean: of each step, ``[..., T, F]``.
        var: ``[..., T, F]``, biased.
        rows: how many rows each step has, ``[T]``; 0 leaves a step out.
        eps: added to every variance.
    """
    weights = (rows.to(mean.dtype) / rows.sum().clamp(min=1))[:, None]
    average = (weights * mean).sum(-2, keepdim=True)
    spread = var + (mean - average).square()
    return average, with_scale((weights * spread).sum(-2, keepdim=True), eps)


def with_scale(var: Tensor, eps: float) -> Tensor:
    """Replace the variances of features that never varied by `NO_SCALE`."""
    return torch.where(var > CONSTANT * eps, var, NO_SCALE)


class Constants:
    """Mean and variance of one term over the steps so far, for steps with too few rows."""

    def __init__(self, rows: Tensor, min_rows: int, eps: float) -> None:
        """rows: how many rows each step has, ``[T]``."""
        self.rows, self.enough, self.eps = rows, rows >= rows[:1].clamp(max=min_rows), eps
        self.count = self.mean = self.var = torch.zeros((), device=rows.device)

    def replace(self, t: int, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the statistics to use in step t, given the step's own mean and var ``[F]``."""
        enough, rows = self.enough[t], self.rows[t].to(mean.dtype)
        constant = with_scale(self.var.to(var.dtype), self.eps)
        results = torch.where(enough, mean, self.mean), torch.where(enough, var, constant)
        self.count = self.count + torch.where(enough, rows, 0)
        share = rows / self.count.clamp(min=1)
        step = mean.detach() - self.mean
        spread = var.detach() - self.var + (1 - share) * step.square()
        self.mean = torch.where(enough, self.mean + share * step, self.mean)
        self.var = torch.where(enough, self.var + share * spread, self.var)
        return results
