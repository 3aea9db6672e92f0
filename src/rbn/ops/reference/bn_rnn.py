"""The batch-normalized simple RNN: equation 1 with both terms normalized (Figure 1a)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rbn.ops.definition import RNNArguments
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

Gates = Callable[[Tensor, Tensor, Tensor], Tensor]


def bn_rnn(
    a: RNNArguments, group: ProcessGroup | None = None, gates: Gates | None = None
) -> tuple[Tensor, Tensor, Statistics]:
    """The output, h_n and statistics; the input is the input term. See `rbn.ops.bn_rnn`.

    gates: gives h_t from both normalized terms and h_{t-1}, in place of bias and nonlinearity.
    """
    dtype, eps = a.input.dtype, a.eps
    wx, W_h, h, bias, gamma_x, gamma_h = in_type(
        compute_dtype(dtype), a.input, a.weight_hh, a.h0, a.bias, a.gamma_x, a.gamma_h
    )
    b = 0.0 if bias is None else bias
    phi = torch.tanh if a.nonlinearity == "tanh" else torch.relu
    gates = gates or (lambda of_h, of_x, h: phi(of_h + of_x + b))

    if a.population:
        group = None  # no minibatch statistics are needed
    wx, valid, counted, (x_term, h_term) = prepared(a, wx, a.definition, group)

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
        h_t = zoneout(a.mask_h, a.rate_h, t, h, h_t)
        h = carry(valid, t, h_t, h)
        identical = still_identical(identical, (h,), rows, eps, group)
        output.append(h)

    statistics = Statistics(*x_term.stacked(), *h_term.stacked())
    return stack_steps(output, valid).to(dtype), h.to(dtype), statistics
