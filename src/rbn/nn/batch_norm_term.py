"""Batch normalization of one term outside of a recurrence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rbn.nn import checks
from rbn.nn.statistics import PopulationStatistics
from rbn.ops.reference.global_moments import global_moments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class BatchNormTerm(nn.Module):
    r"""$\mathrm{BN}(x; \gamma, 0)$ over the unpadded positions of a minibatch.

    Computes one mean and one variance for each feature, over all other dimensions. Uses the same
    population statistics as the recurrent layers, with a single row, and so works in `eval()`, in
    `rbn.batch_statistics` and with `rbn.update_population_stats`.

    Args:
        features: size of the last dimension.
        gamma: initial value of the scale.
        eps: added to the variance.
        momentum: weight of a new minibatch in the running average; None weights all equally.
        sync_stats: compute minibatch statistics over all processes that train together, as in
            `rbn.BatchNormLSTM`.
    """

    def __init__(
        self,
        features: int,
        *,
        gamma: float = 0.1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        sync_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features = checks.positive_integer("features", features)
        start = checks.not_negative("gamma", gamma)
        self.eps = checks.not_negative("eps", eps)
        momentum = None if momentum is None else checks.probability("momentum", momentum)
        self.gamma = nn.Parameter(torch.full((features,), start, device=device, dtype=dtype))
        self.sync_stats = checks.boolean("sync_stats", sync_stats)
        self.stats = PopulationStatistics(
            features, 1, momentum, sync=sync_stats, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalize a term.

        Args:
            x: ``[..., features]``, with at least one dimension before the last.
            valid: bool ``[...]``, the positions to compute statistics over; all by default. The
                output at other positions is unspecified, but finite if x is.

        Returns:
            A tensor with the shape and dtype of x.
        """
        if x.dim() < 2 or x.shape[-1] != self.features:
            raise ValueError(
                f"x must have at least 2 dimensions, the last of size {self.features}, "
                f"got shape {tuple(x.shape)}"
            )
        if x.numel() == self.features and self.stats.trains and self.stats.group is None:
            checks.refuse_one(type(self).__name__, "position")
        wide = x.to(self.stats.mean.dtype)
        if self.stats.uses_batch or self._is_untrained(x):
            mean, var = _moments(wide, valid, self.stats.group)
            if self.stats.records:
                self._record(mean.detach()[None], var.detach()[None], x, valid)
        else:
            mean, var = self.stats.mean[0], self.stats.var[0]
        return ((wide - mean) * (self.gamma * torch.rsqrt(var + self.eps))).to(x.dtype)

    def _is_untrained(self, x: Tensor) -> bool:
        """Whether there are no population statistics, so that x is normalized with its own."""
        if self.stats.find_estimates():
            return False
        checks.no_statistics(self, x.numel() // self.features)
        return True

    def _record(self, mean: Tensor, var: Tensor, x: Tensor, valid: Tensor | None) -> None:
        """Update the running averages, unless a minibatch has fewer than two positions."""
        if self.stats.group is not None:  # the positions of all processes
            self.stats.update(mean, var)
        elif x.numel() > self.features:
            several = None if valid is None else (valid.sum() > 1)[None]
            self.stats.update(mean, var, reached=several)

    def extra_repr(self) -> str:
        """The options, for ``print(module)``."""
        return f"{self.features}, eps={self.eps}"


def _moments(x: Tensor, valid: Tensor | None, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the valid positions, ``[features]`` each."""
    if group is not None:
        flat = None if valid is None else valid.flatten()
        return global_moments(x.flatten(0, -2), flat, group)
    if x.numel() == 0:
        return x.new_zeros(x.shape[-1]), x.new_zeros(x.shape[-1])
    rows = tuple(range(x.dim() - 1))
    if valid is None:
        return x.mean(rows), x.var(rows, correction=0)
    keep = valid[..., None]
    count = valid.sum().clamp(min=1)
    mean = torch.where(keep, x, 0).sum(rows) / count
    return mean, torch.where(keep, x - mean, 0).square().sum(rows) / count
