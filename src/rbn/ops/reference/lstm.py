"""The plain LSTM, equations 2 to 4: the paper's baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.definition import LSTMArguments
from rbn.ops.reference.normalization import carry, in_type, stack_steps, without_padding, zoneout
from rbn.ops.types import compute_dtype, valid_steps


def lstm(a: LSTMArguments) -> tuple[Tensor, Tensor, Tensor]:
    """The output, h_n and c_n; the input is the input term. See `rbn.ops.lstm`."""
    dtype = a.input.dtype
    wx, W_h, h, c, bias, beta_c = in_type(
        compute_dtype(dtype), a.input, a.weight_hh, a.h0, a.c0, a.bias, a.beta_c
    )
    b = 0.0 if bias is None else bias
    beta = 0.0 if beta_c is None else beta_c
    valid = valid_steps(a.lengths, len(wx))  # [T, B]
    wx = without_padding(wx, valid)

    output = []
    for t in range(len(wx)):
        # Equation 2, gates in torch's order i, f, g, o.
        gates = h @ W_h.T + wx[t] + b
        i, f, g, o = gates.chunk(4, dim=1)
        # Equation 3.
        c_t = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        # Equation 4, with the additive cell bias of the authors' baseline.
        h_t = torch.sigmoid(o) * torch.tanh(c_t + beta)

        c_t = zoneout(a.mask_c, a.rate_c, t, c, c_t)
        h_t = zoneout(a.mask_h, a.rate_h, t, h, h_t)
        h, c = carry(valid, t, h_t, h), carry(valid, t, c_t, c)
        output.append(h)
    return stack_steps(output, valid).to(dtype), h.to(dtype), c.to(dtype)
