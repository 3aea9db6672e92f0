"""Arguments and results of the recurrences in the form that a fused operator takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.identical_rows import steps_alike
from rbn.ops.types import Statistics


def needs_grad(weights: tuple[Tensor | None, ...]) -> bool:
    """Whether the forward pass must keep what the backward pass needs."""
    return torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in weights)


def zoneout_arguments(
    z_c: Tensor | float, z_h: Tensor | float
) -> tuple[Tensor | None, Tensor | None, float, float]:
    """The masks and the rates, as the operator takes them."""
    if isinstance(z_c, float) and isinstance(z_h, float):  # it takes longer to see no Tensor
        return None, None, z_c, z_h
    mask_c, rate_c = (z_c, 0.0) if isinstance(z_c, Tensor) else (None, z_c)
    mask_h, rate_h = (z_h, 0.0) if isinstance(z_h, Tensor) else (None, z_h)
    return mask_c, mask_h, rate_c, rate_h


def population_list(population: Statistics | None, like: Tensor) -> list[Tensor]:
    """Mean and var of x, h and c, empty tensors for absent terms; no tensor at all without any."""
    if population is None:
        return []
    return [like.new_empty(0) if p is None else p for p in population]


def statistics_from_rstd(moments: Sequence[Any], eps: float) -> Statistics:
    """Variances from the 1/sqrt(var + eps) that the operator saved; None for absent terms."""
    found: list[Tensor | None] = []
    for mean, rstd in zip(moments[0::2], moments[1::2], strict=True):
        if mean.numel() == 0:
            found += [None, None]
        else:
            found += [mean, (rstd.square().reciprocal() - eps).clamp_(min=0)]
    return Statistics(*found)


def alike_of(
    states: tuple[Tensor, ...],
    wx: Tensor,
    moments: Sequence[Tensor],
    eps: float,
    masks: Sequence[Tensor | None] = (),
    lengths: Tensor | None = None,
    include: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rbn.ops.identical_rows.steps_alike` from the mean and rstd of the terms x, h and c.

    masks: of zoneout. lengths, include: of padding.
    """
    masked = any(mask is not None for mask in masks)
    found = statistics_from_rstd(moments, eps)
    assert found.var_h is not None
    variances = found.var_x, found.var_h, found.var_c
    return steps_alike(states, wx, *variances, eps, masked, lengths, include)
