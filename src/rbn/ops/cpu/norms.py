"""The normalizations that the fused recurrences are built from, forward and backward.

Each works on one time step at a time, in the layout of `Packing`, with PyTorch's own fused kernels.
All share one interface, `Norm`. The backward pass needs the mean and rstd = 1 / sqrt(var + eps):
``moments`` returns them after the forward pass, ``restore`` sets them before the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rbn.ops.few_rows import pooled
from rbn.ops.identical_rows import variance
from rbn.ops.types import CONSTANT

_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


class Norm(Protocol):
    """The interface of a normalization."""

    dgamma: Tensor | None
    dbeta: Tensor | None

    def forward(self, t: int, x: Tensor) -> Tensor:
        """Normalize x ``[n, F]`` of step t. Steps come in order."""

    def moments(self, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """Mean and rstd of the steps so far, padded to `rows` rows; None if none are kept."""

    def restore(self, mean: Tensor, rstd: Tensor) -> None:
        """Restore what `moments` returned."""

    def backward(self, t: int, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of x of step t. Accumulates dgamma and dbeta."""


class _MomentsOfSteps:
    """Keeps mean and rstd of every step."""

    def __init__(self, gamma: Tensor, beta: Tensor | None, eps: float) -> None:
        self.gamma, self.beta, self.eps = gamma, beta, eps
        self.dgamma: Tensor | None = torch.zeros_like(gamma)
        self.dbeta: Tensor | None = None if beta is None else torch.zeros_like(beta)
        self._means: list[Tensor] = []
        self._rstds: list[Tensor] = []
        self._mask = [True, True, beta is not None]

    def _add(self, dgamma: Tensor, dbeta: Tensor) -> None:
        assert self.dgamma is not None
        self.dgamma += dgamma
        if self.dbeta is not None:
            self.dbeta += dbeta


class BatchNorm(_MomentsOfSteps):
    """Statistics of the minibatch, separate for each step (the paper's training mode).

    Steps with too few rows use constants, see `rbn.ops.few_rows`.

    identical: the steps in which a constant term passes no gradient (`rbn.ops.identical_rows`).
    """

    identical: Sequence[bool] = ()

    def __init__(
        self, gamma: Tensor, beta: Tensor | None, eps: float, sizes: list[int], fewest: int
    ) -> None:
        """sizes: rows of each step, never growing. fewest: rows that statistics need."""
        super().__init__(gamma, beta, eps)
        self._sizes, self._fewest = sizes, fewest

    def forward(self, t: int, x: Tensor) -> Tensor:
        if self._sizes[t] < self._fewest:
            return self._with_constants(t, x)
        out, mean, rstd = torch.native_batch_norm(
            x, self.gamma, self.beta, None, None, True, 0.0, self.eps
        )
        self._means.append(mean)
        self._rstds.append(rstd)
        return out

    def _with_constants(self, t: int, x: Tensor) -> Tensor:
        if self._sizes[t - 1] >= self._fewest:  # the first of these steps
            self._constants = self._pooled()
        mean, rstd = self._constants
        self._means.append(mean)
        self._rstds.append(rstd)
        out = (x - mean) * (rstd * self.gamma)
        return out if self.beta is None else out + self.beta

    def _pooled(self) -> tuple[Tensor, Tensor]:
        """Mean and rstd ``[F]`` over all rows of the steps so far."""
        moments = torch.stack(self._means), torch.stack(self._rstds)
        return pooled_rstd(*moments, self._sizes[: len(self._means)], self.eps)

    def moments(self, rows: int) -> tuple[Tensor, Tensor]:
        """``[T, F]`` each, with constants for steps that no row reaches."""
        missing = rows - len(self._means)
        if missing:
            few = self._sizes[-1] < self._fewest
            mean, rstd = self._constants if few else self._pooled()
            self._means += [mean] * missing
            self._rstds += [rstd] * missing
        return torch.stack(self._means), torch.stack(self._rstds)

    def restore(self, mean: Tensor, rstd: Tensor) -> None:
        self._means, self._rstds = list(mean.unbind(0)), list(rstd.unbind(0))

    def backward(self, t: int, dy: Tensor, x: Tensor) -> Tensor:
        mean, rstd = self._means[t], self._rstds[t]
        gamma = self.gamma
        if self._sizes[t] < self._fewest:
            self._add((dy * (x - mean)).sum(0) * rstd, dy.sum(0))
            return dy * (rstd * gamma)
        if self.identical and self.identical[t]:
            gamma = gamma * (rstd * rstd * self.eps <= 1 - CONSTANT)
        dx, dgamma, dbeta = _batch_norm_backward(
            dy, x, gamma, None, None, mean, rstd, True, self.eps, self._mask
        )
        self._add(dgamma, dbeta)
        return dx  # type: ignore[no-any-return]


class LayerNorm(_MomentsOfSteps):
    """Statistics of each row over its features (Ba et al. 2016)."""

    def __init__(self, gamma: Tensor, beta: Tensor | None, eps: float, sizes: list[int]) -> None:
        super().__init__(gamma, beta, eps)
        self._sizes, self._shape = sizes, [gamma.numel()]

    def forward(self, t: int, x: Tensor) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, self._shape, self.gamma, self.beta, self.eps)
        self._means.append(mean)
        self._rstds.append(rstd)
        return out

    def moments(self, rows: int) -> tuple[Tensor, Tensor]:
        """``[T * B, 1]`` each, packed rows."""
        return _fill(torch.cat(self._means), rows, 0.0), _fill(torch.cat(self._rstds), rows, 0.0)

    def restore(self, mean: Tensor, rstd: Tensor) -> None:
        n = sum(self._sizes)
        self._means = list(mean[:n].split(self._sizes))
        self._rstds = list(rstd[:n].split(self._sizes))

    def backward(self, t: int, dy: Tensor, x: Tensor) -> Tensor:
        mean, rstd = self._means[t], self._rstds[t]
        dx, dgamma, dbeta = _layer_norm_backward(
            dy, x, self._shape, mean, rstd, self.gamma, self.beta, self._mask
        )
        self._add(dgamma, dbeta)
        return dx  # type: ignore[no-any-return]


class _NoMoments:
    """Base of normalizations that keep nothing for the backward pass."""

    def moments(self, rows: int) -> tuple[None, None]:
        return None, None

    def restore(self, mean: Tensor, rstd: Tensor) -> None:
        pass


class PopulationNorm(_NoMoments):
    """Given statistics, one row per step; the last row serves all later steps (inference)."""

    def __init__(
        self, gamma: Tensor, beta: Tensor | None, eps: float, mean: Tensor, var: Tensor
    ) -> None:
        """mean, var: ``[S, F]``."""
        self.mean, self.rstd = mean, torch.rsqrt(var + eps)
        self._beta = torch.zeros_like(gamma) if beta is None else beta
        self._scales = (gamma * self.rstd).unbind(0)
        self._last = len(self._scales) - 1
        self.dgamma: Tensor | None = torch.zeros_like(gamma)
        self.dbeta: Tensor | None = torch.zeros_like(gamma)

    def forward(self, t: int, x: Tensor) -> Tensor:
        s = min(t, self._last)
        return torch.addcmul(self._beta, x - self.mean[s], self._scales[s])

    def backward(self, t: int, dy: Tensor, x: Tensor) -> Tensor:
        s = min(t, self._last)
        assert self.dgamma is not None
        assert self.dbeta is not None
        self.dgamma += (dy * (x - self.mean[s])).sum(0) * self.rstd[s]
        self.dbeta += dy.sum(0)
        return dy * self._scales[s]


class Shift(_NoMoments):
    """No normalization, only the additive beta: the plain LSTM's cell."""

    def __init__(self, beta: Tensor) -> None:
        self.beta = beta
        self.dgamma: Tensor | None = None
        self.dbeta: Tensor | None = torch.zeros_like(beta)

    def forward(self, t: int, x: Tensor) -> Tensor:
        return x + self.beta

    def backward(self, t: int, dy: Tensor, x: Tensor) -> Tensor:
        assert self.dbeta is not None
        self.dbeta += dy.sum(0)
        return dy


class SequenceNorm:
    """One set of minibatch statistics for the input term of all steps (section 5.4, BN-e*).

    Unlike the others it gets all rows ``[N, F]`` at once, before the recurrence runs.
    """

    def __init__(self, gamma: Tensor, eps: float, counted: Tensor | None) -> None:
        """counted: bool ``[N]``, the rows that enter the statistics; None for all."""
        self.gamma, self.eps, self.counted = gamma, eps, counted
        self.dgamma: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize all rows."""
        rows = x if self.counted is None else x[self.counted]
        out, self._mean, self._rstd = torch.native_batch_norm(
            rows, self.gamma, None, None, None, True, 0.0, self.eps
        )
        return out if self.counted is None else (x - self._mean) * (self._rstd * self.gamma)

    def moments(self, rows: int) -> tuple[Tensor, Tensor]:
        """``[1, F]`` each."""
        return self._mean[None].clone(), self._rstd[None].clone()

    def restore(self, mean: Tensor, rstd: Tensor) -> None:
        """Restore what `moments` returned."""
        self._mean, self._rstd = mean[0], rstd[0]

    def backward(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of all rows of x."""
        mean, rstd = self._mean, self._rstd
        if self.counted is None:
            dx, self.dgamma, _ = _batch_norm_backward(
                dy, x, self.gamma, None, None, mean, rstd, True, self.eps, [True, True, False]
            )
            return dx  # type: ignore[no-any-return]
        # Rows outside the statistics depend on them but do not contribute to them.
        x_hat = (x - mean) * rstd
        self.dgamma = (dy * x_hat).sum(0)
        n = self.counted.sum()
        through = (dy.sum(0) + x_hat * self.dgamma) / n
        return self.gamma * rstd * (dy - through.masked_fill_(~self.counted[:, None], 0))


def pooled_rstd(mean: Tensor, rstd: Tensor, sizes: list[int], eps: float) -> tuple[Tensor, Tensor]:
    """Constants: mean and rstd ``[F]`` over all rows, from those of the steps ``[T, F]``.

    sizes: the rows of each step.
    """
    rows = torch.tensor(sizes, dtype=mean.dtype)
    mean, var = pooled(mean, variance(rstd, eps), rows, eps)
    return mean[0], torch.rsqrt(var[0] + eps)


def _fill(kept: Tensor, rows: int, value: float) -> Tensor:
    """Pad `kept` ``[n, F]`` with constant rows to ``[rows, F]``."""
    missing = rows - len(kept)
    if missing == 0:
        return kept
    return torch.cat([kept, kept.new_full((missing, *kept.shape[1:]), value)])
