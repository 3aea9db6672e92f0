"""The recurrences fused for the CPU. Same signatures as `rbn.ops.reference`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rbn.ops.cpu.library import lstm_op, rnn_op
from rbn.ops.types import InputStats, Nonlinearity, Padding, Statistics

__all__ = ["bn_lstm", "bn_rnn", "ln_lstm", "lstm"]


def bn_lstm(
    wx: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    gamma_x: Tensor | None,
    gamma_h: Tensor,
    gamma_c: Tensor | None,
    beta_c: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    *,
    lengths: Tensor | None = None,
    population: Statistics | None = None,
    eps: float = 1e-5,
    input_stats: InputStats = "step",
    padding: Padding = "exclude",
    zoneout_c: Tensor | float = 0.0,
    zoneout_h: Tensor | float = 0.0,
    pass_normalized_cell: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Statistics]:
    """See `rbn.ops.bn_lstm`."""
    weights = (wx, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta_c, h0, c0)
    output, h_n, c_n, *rest = lstm_op(
        *weights,
        lengths,
        _population(population, wx),
        *_zoneout(zoneout_c, zoneout_h),
        "batch",
        eps,
        input_stats,
        padding,
        pass_normalized_cell,
        _needs_grad(weights),
    )
    return output, h_n, c_n, _statistics(rest[:6], eps)


def lstm(
    wx: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    beta_c: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    *,
    lengths: Tensor | None = None,
    zoneout_c: Tensor | float = 0.0,
    zoneout_h: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `rbn.ops.lstm`."""
    weights = (wx, weight_hh, bias, None, None, None, beta_c, h0, c0)
    zoneout = _zoneout(zoneout_c, zoneout_h)
    options = ("none", 0.0, "step", "exclude", False, _needs_grad(weights))
    output, h_n, c_n, *_ = lstm_op(*weights, lengths, [], *zoneout, *options)
    return output, h_n, c_n


def ln_lstm(
    wx: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    gamma_x: Tensor,
    gamma_h: Tensor,
    gamma_c: Tensor,
    beta_c: Tensor,
    h0: Tensor,
    c0: Tensor,
    *,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
    zoneout_c: Tensor | float = 0.0,
    zoneout_h: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `rbn.ops.ln_lstm`."""
    weights = (wx, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta_c, h0, c0)
    zoneout = _zoneout(zoneout_c, zoneout_h)
    options = ("layer", eps, "step", "exclude", False, _needs_grad(weights))
    output, h_n, c_n, *_ = lstm_op(*weights, lengths, [], *zoneout, *options)
    return output, h_n, c_n


def bn_rnn(
    wx: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    gamma_x: Tensor,
    gamma_h: Tensor,
    h0: Tensor,
    *,
    nonlinearity: Nonlinearity = "tanh",
    lengths: Tensor | None = None,
    population: Statistics | None = None,
    eps: float = 1e-5,
    input_stats: InputStats = "step",
    padding: Padding = "exclude",
    zoneout_h: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor, Statistics]:
    """See `rbn.ops.bn_rnn`."""
    weights = (wx, weight_hh, bias, gamma_x, gamma_h, h0)
    _, mask_h, _, rate_h = _zoneout(0.0, zoneout_h)
    output, h_n, *rest = rnn_op(
        *weights,
        lengths,
        _population(population, wx)[:4],
        mask_h,
        rate_h,
        eps,
        input_stats,
        padding,
        nonlinearity,
        _needs_grad(weights),
    )
    return output, h_n, _statistics(rest[:4], eps)


def _needs_grad(weights: tuple[Tensor | None, ...]) -> bool:
    """Whether the forward pass must keep what the backward pass needs."""
    return torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in weights)


def _zoneout(
    z_c: Tensor | float, z_h: Tensor | float
) -> tuple[Tensor | None, Tensor | None, float, float]:
    """The masks and the rates, as the operator takes them."""
    masks = [z if isinstance(z, Tensor) else None for z in (z_c, z_h)]
    rates = [0.0 if isinstance(z, Tensor) else z for z in (z_c, z_h)]
    return masks[0], masks[1], rates[0], rates[1]


def _population(population: Statistics | None, like: Tensor) -> list[Tensor]:
    if population is None:
        return []
    return [like.new_empty(0) if p is None else p for p in population]


def _statistics(moments: list[Any], eps: float) -> Statistics:
    """Variances from the 1/sqrt(var + eps) that the operator saved; None for absent terms."""
    found: list[Tensor | None] = []
    for mean, rstd in zip(moments[0::2], moments[1::2], strict=True):
        if mean.numel() == 0:
            found += [None, None]
        else:
            found += [mean, (rstd.square().reciprocal() - eps).clamp_(min=0)]
    return Statistics(*found)
