"""The recurrences on the GPU. Same signatures as `rbn.ops.reference`.

The batch-normalized and the plain LSTM are persistent kernels or, where those have no room for the
batch or the layer, a matrix product and a kernel for each step. The layer-normalized LSTM and the
batch-normalized RNN always are the latter. What the kernels do not cover (float64, layer-normalized
rows that are too long) runs the reference.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from rbn.ops import reference
from rbn.ops.arguments import needs_grad, population_list, zoneout_arguments
from rbn.ops.gpu.cross_entropy.loss import linear_cross_entropy
from rbn.ops.gpu.ln_lstm.ln_steps import LARGEST
from rbn.ops.gpu.lstm.layer import from_inputs
from rbn.ops.gpu.lstm.library import lstm_op
from rbn.ops.gpu.lstm.one_feature import from_one_feature, may_take
from rbn.ops.gpu.lstm.persistent.tiles import tf32_allowed
from rbn.ops.gpu.lstm.together import together
from rbn.ops.gpu.running_average import average_in
from rbn.ops.gpu.steps_library import bn_rnn_op, ln_lstm_op
from rbn.ops.gpu.symbols.look_up import symbol_rows
from rbn.ops.types import InputStats, Nonlinearity, Padding, Statistics

__all__ = [
    "average_in",
    "bn_lstm",
    "bn_rnn",
    "from_inputs",
    "from_one_feature",
    "linear_cross_entropy",
    "ln_lstm",
    "lstm",
    "may_take",
    "symbol_rows",
    "together",
]

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
    if wx.dtype == torch.float64:
        _log_reference(wx)
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
    if wx.dtype == torch.float64:
        _log_reference(wx)
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
    tensors = (wx, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta_c, h0, c0)
    if wx.dtype == torch.float64 or h0.shape[1] > LARGEST:
        _log_reference(wx)
        return reference.ln_lstm(
            *tensors, lengths=lengths, eps=eps, zoneout_c=zoneout_c, zoneout_h=zoneout_h
        )
    zoneout = zoneout_arguments(zoneout_c, zoneout_h)
    output, h_n, c_n, *_ = ln_lstm_op(*tensors, lengths, [], *zoneout, eps, needs_grad(tensors))
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
    tensors = (wx, weight_hh, bias, gamma_x, gamma_h, h0)
    if wx.dtype == torch.float64:
        _log_reference(wx)
        return reference.bn_rnn(
            *tensors,
            nonlinearity=nonlinearity,
            lengths=lengths,
            population=population,
            eps=eps,
            input_stats=input_stats,
            padding=padding,
            zoneout_h=zoneout_h,
        )
    given = population_list(population, wx)[:4]
    _, mask_h, _, rate_h = zoneout_arguments(0.0, zoneout_h)
    options = (eps, input_stats, padding, nonlinearity)
    output, h_n, *rest = bn_rnn_op(
        *tensors, lengths, given, mask_h, rate_h, *options, needs_grad(tensors)
    )
    return output, h_n, Statistics(*(v if v.numel() else None for v in rest[:4]))


def _log_reference(wx: Tensor) -> None:
    if not torch.compiler.is_compiling():
        log.debug("the reference runs for %s %s", tuple(wx.shape), wx.dtype)


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
        *tensors, lengths, population, *zoneout, *options, needs_grad(tensors), tf32_allowed()
    )
    return found
