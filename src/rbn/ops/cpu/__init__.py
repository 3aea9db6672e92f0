"""The recurrences fused for the CPU. Same signatures as `rbn.ops.reference`."""

from __future__ import annotations

from torch import Tensor

from rbn.ops.arguments import needs_grad, population_list, statistics_from_rstd, zoneout_arguments
from rbn.ops.cpu.library import lstm_op, rnn_op
from rbn.ops.reference import linear_cross_entropy, symbol_rows
from rbn.ops.types import InputStats, Nonlinearity, Padding, Statistics

__all__ = ["bn_lstm", "bn_rnn", "linear_cross_entropy", "ln_lstm", "lstm", "symbol_rows"]


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
        population_list(population, wx),
        *zoneout_arguments(zoneout_c, zoneout_h),
        "batch",
        eps,
        input_stats,
        padding,
        pass_normalized_cell,
        needs_grad(weights),
    )
    return output, h_n, c_n, statistics_from_rstd(rest[:6], eps)


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
    zoneout = zoneout_arguments(zoneout_c, zoneout_h)
    options = ("none", 0.0, "step", "exclude", False, needs_grad(weights))
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
    zoneout = zoneout_arguments(zoneout_c, zoneout_h)
    options = ("layer", eps, "step", "exclude", False, needs_grad(weights))
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
    _, mask_h, _, rate_h = zoneout_arguments(0.0, zoneout_h)
    output, h_n, *rest = rnn_op(
        *weights,
        lengths,
        population_list(population, wx)[:4],
        mask_h,
        rate_h,
        eps,
        input_stats,
        padding,
        nonlinearity,
        needs_grad(weights),
    )
    return output, h_n, statistics_from_rstd(rest[:4], eps)
