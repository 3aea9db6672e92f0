"""The batch-normalized simple RNN: equation 1 with both terms normalized (Figure 1a)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rbn.ops.reference.normalization import (
    InputTerm,
    Term,
    carry,
    constants_of,
    first_identical,
    in_type,
    pair,
    stack_steps,
    still_identical,
    without_padding,
    zoneout,
)
from rbn.ops.types import (
    InputStats,
    Nonlinearity,
    Padding,
    Statistics,
    compute_dtype,
    valid_steps,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def bn_rnn(
    wx: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    gamma_x: Tensor,
    gamma_h: Tensor,
    h0: Tensor,
    *,
    nonlinearity: Nonlinearity | Callable[[Tensor, Tensor, Tensor], Tensor] = "tanh",
    lengths: Tensor | None = None,
    population: Statistics | None = None,
    eps: float = 1e-5,
    input_stats: InputStats = "step",
    padding: Padding = "exclude",
    min_rows: int = 1,
    zoneout_h: Tensor | float = 0.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Statistics]:
    """See `rbn.ops.bn_rnn` for the arguments.

    In place of a nonlinearity, a function gives h_t from both normalized terms and h_{t-1}.
    """
    dtype = wx.dtype
    wx, W_h, h, bias, gamma_x, gamma_h = in_type(
        compute_dtype(dtype), wx, weight_hh, h0, bias, gamma_x, gamma_h
    )
    b = 0.0 if bias is None else bias
    phi = torch.tanh if nonlinearity == "tanh" else torch.relu
    gates = nonlinearity if callable(nonlinearity) else lambda of_h, of_x, h: phi(of_h + of_x + b)

    if population is not None:
        group = None  # no minibatch statistics are needed
    pop = population or Statistics()
    valid = valid_steps(lengths, len(wx))  # [T, B]
    wx = without_padding(wx, valid if padding == "exclude" or population else None)
    counted = valid if padding == "exclude" else None
    of_x, of_h = constants_of(wx, counted, min_rows, eps, group, 2)
    population_x = pair(pop.mean_x, pop.var_x)
    x_term = InputTerm(wx, valid, counted, input_stats, population_x, group, of_x)
    h_term = Term(pair(pop.mean_h, pop.var_h), group, of_h)

    identical = first_identical(h, group=group)
    output = []
    for t in range(len(wx)):
        rows = None if counted is None else counted[t]
        W_x_x, W_h_h = wx[t], h @ W_h.T  # [B, H]
        h_t = gates(
            h_term.bn(t, W_h_h, gamma_h, 0.0, rows, eps, identical),
            x_term.bn(t, W_x_x, gamma_x, 0.0, rows, eps),
            h,
        )
        identical = identical & x_term.constant(t, eps)
        h_t = zoneout(zoneout_h, t, h, h_t)
        h = carry(valid, t, h_t, h)
        identical = still_identical(identical, (h,), rows, eps, group)
        output.append(h)

    statistics = Statistics(*x_term.stacked(), *h_term.stacked())
    return stack_steps(output, valid).to(dtype), h.to(dtype), statistics
