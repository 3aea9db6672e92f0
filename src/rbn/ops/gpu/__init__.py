"""The recurrences as persistent GPU kernels. Same signatures as `rbn.ops.reference`.

What the kernels do not cover (float64, batches too large for a tile) runs the reference.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from rbn.ops import reference
from rbn.ops.arguments import needs_grad, population_list, zoneout_arguments
from rbn.ops.gpu.launch import plan_for
from rbn.ops.gpu.library import lstm_op
from rbn.ops.gpu.together import together
from rbn.ops.reference import bn_rnn, ln_lstm
from rbn.ops.types import InputStats, Padding, Statistics

__all__ = ["bn_lstm", "bn_rnn", "ln_lstm", "lstm", "together"]

log = logging.getLogger("rbn.ops.gpu")


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
    tensors = (wx, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta_c, h0, c0)
    if not _covered(wx):
        return reference.bn_lstm(
            *tensors,
            lengths=lengths,
            population=population,
            eps=eps,
            input_stats=input_stats,
            padding=padding,
            zoneout_c=zoneout_c,
            zoneout_h=zoneout_h,
            pass_normalized_cell=pass_normalized_cell,
        )
    given = population_list(population, wx)
    options = ("batch", eps, input_stats, padding, pass_normalized_cell)
    output, h_n, c_n, *rest = _run(tensors, lengths, given, zoneout_c, zoneout_h, options)
    return output, h_n, c_n, Statistics(*(v if v.numel() else None for v in rest[:6]))


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
    if not _covered(wx):
        return reference.lstm(
            wx,
            weight_hh,
            bias,
            beta_c,
            h0,
            c0,
            lengths=lengths,
            zoneout_c=zoneout_c,
            zoneout_h=zoneout_h,
        )
    tensors = (wx, weight_hh, bias, None, None, None, beta_c, h0, c0)
    options = ("none", 0.0, "step", "exclude", False)
    output, h_n, c_n, *_ = _run(tensors, lengths, [], zoneout_c, zoneout_h, options)
    return output, h_n, c_n


def _covered(wx: Tensor) -> bool:
    """Whether the kernels take a call with this input term ``[T, B, 4H]``."""
    if wx.dtype == torch.float64 or plan_for(wx) is None:
        if not torch.compiler.is_compiling():
            log.debug("the reference runs for %s %s", tuple(wx.shape), wx.dtype)
        return False
    return True


def _run(
    tensors: tuple[Tensor | None, ...],
    lengths: Tensor | None,
    population: list[Tensor],
    zoneout_c: Tensor | float,
    zoneout_h: Tensor | float,
    options: tuple[Any, ...],
) -> list[Any]:
    """The operator, which also takes several recurrences at once."""
    zoneout = zoneout_arguments(zoneout_c, zoneout_h)
    found: list[Any] = lstm_op(
        *tensors, lengths, population, *zoneout, *options, needs_grad(tensors)
    )
    return found
