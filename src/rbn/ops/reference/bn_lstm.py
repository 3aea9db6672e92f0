"""The batch-normalized LSTM, equations 6 to 8 of the paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.reference.normalization import (
    carry,
    first_identical,
    in_type,
    prepared,
    stack_steps,
    still_identical,
    zoneout,
)
from rbn.ops.types import Statistics, compute_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def bn_lstm(
    a: LSTMArguments, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor, Tensor, Statistics]:
    """The output, h_n, c_n and statistics; the input is the input term. See `rbn.ops.bn_lstm`."""
    dtype, eps = a.input.dtype, a.eps
    wx, W_h, h, c = in_type(compute_dtype(dtype), a.input, a.weight_hh, a.h0, a.c0)
    bias, gamma_x, gamma_h, gamma_c, beta_c = in_type(
        compute_dtype(dtype), a.bias, a.gamma_x, a.gamma_h, a.gamma_c, a.beta_c
    )
    b = 0.0 if bias is None else bias
    beta = 0.0 if beta_c is None else beta_c

    if a.population:
        group = None  # no minibatch statistics are needed
    wx, valid, counted, (x_term, h_term, c_term) = prepared(a, wx, LSTM, group)

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

        if a.pass_normalized_cell:  # ablation: the next step continues from BN(c_t)
            c_t = c_hat
        c_t = zoneout(a.mask_c, a.rate_c, t, c, c_t)
        h_t = zoneout(a.mask_h, a.rate_h, t, h, h_t)

        h, c = carry(valid, t, h_t, h), carry(valid, t, c_t, c)
        identical = still_identical(identical, (h, c), rows, eps, group)
        output.append(h)

    statistics = Statistics(*x_term.stacked(), *h_term.stacked(), *c_term.stacked())
    return stack_steps(output, valid).to(dtype), h.to(dtype), c.to(dtype), statistics
