"""The batch-normalized LSTM, equations 6 to 8 of the paper."""

from __future__ import annotations

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
from rbn.ops.types import InputStats, Padding, Statistics, compute_dtype, valid_steps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    min_rows: int = 1,
    zoneout_c: Tensor | float = 0.0,
    zoneout_h: Tensor | float = 0.0,
    pass_normalized_cell: bool = False,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor, Statistics]:
    """See `rbn.ops.bn_lstm` for the arguments."""
    dtype = wx.dtype
    wx, W_h, h, c, bias, gamma_x, gamma_h, gamma_c, beta_c = in_type(
        compute_dtype(dtype), wx, weight_hh, h0, c0, bias, gamma_x, gamma_h, gamma_c, beta_c
    )
    b = 0.0 if bias is None else bias
    beta = 0.0 if beta_c is None else beta_c

    if population is not None:
        group = None  # no minibatch statistics are needed
    pop = population or Statistics()
    valid = valid_steps(lengths, len(wx))  # [T, B]
    wx = without_padding(wx, valid if padding == "exclude" or population else None)
    counted = valid if padding == "exclude" else None
    of_x, of_h, of_c = constants_of(wx, counted, min_rows, eps, group, 3)
    population_x = pair(pop.mean_x, pop.var_x)
    x_term = InputTerm(wx, valid, counted, input_stats, population_x, group, of_x)
    h_term = Term(pair(pop.mean_h, pop.var_h), group, of_h)
    c_term = Term(pair(pop.mean_c, pop.var_c), group, of_c)

    identical = first_identical(h, c, group=group)
    output = []
    for t in range(len(wx)):
        rows = None if counted is None else counted[t]
        W_x_x, W_h_h = wx[t], h @ W_h.T  # [B, 4H]

        # Equation 6. The gates lie in torch's order i, f, g, o (the paper prints f, i, o, g).
        if gamma_x is None:  # ablation: one normalization of the sum
            summed = W_h_h + W_x_x
            gates = h_term.bn(t, summed, gamma_h, b, rows, eps, identical)
        else:
            gates = (
                h_term.bn(t, W_h_h, gamma_h, 0.0, rows, eps, identical)
                + x_term.bn(t, W_x_x, gamma_x, 0.0, rows, eps)
                + b
            )
        identical = identical & (h_term if gamma_x is None else x_term).constant(t, eps)
        i, f, g, o = gates.chunk(4, dim=1)

        # Equation 7: the cell update itself is not normalized.
        c_t = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)

        # Equation 8.
        c_hat = (
            c_term.bn(t, c_t, gamma_c, beta, rows, eps, identical)
            if gamma_c is not None
            else c_t + beta  # ablation: the output uses the cell like the plain LSTM
        )
        h_t = torch.sigmoid(o) * torch.tanh(c_hat)

        if pass_normalized_cell:  # ablation: the next step continues from BN(c_t)
            c_t = c_hat
        c_t = zoneout(zoneout_c, t, c, c_t)
        h_t = zoneout(zoneout_h, t, h, h_t)

        h, c = carry(valid, t, h_t, h), carry(valid, t, c_t, c)
        identical = still_identical(identical, (h, c), rows, eps, group)
        output.append(h)

    statistics = Statistics(*x_term.stacked(), *h_term.stacked(), *c_term.stacked())
    return stack_steps(output, valid).to(dtype), h.to(dtype), c.to(dtype), statistics
