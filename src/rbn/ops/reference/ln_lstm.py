"""The layer-normalized LSTM of Ba, Kiros and Hinton (2016), the alternative the paper names."""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.definition import LSTMArguments
from rbn.ops.reference.normalization import carry, in_type, stack_steps, without_padding, zoneout
from rbn.ops.types import compute_dtype, valid_steps


def ln(h: Tensor, gamma: Tensor, beta: Tensor | float, eps: float) -> Tensor:
    """Like equation 5 with the moments taken over the features of each row of h ``[B, F]``."""
    mean = h.mean(1, keepdim=True)
    var = (h - mean).square().mean(1, keepdim=True)
    return beta + gamma * (h - mean) / torch.sqrt(var + eps)


def ln_lstm(a: LSTMArguments) -> tuple[Tensor, Tensor, Tensor]:
    """The output, h_n and c_n; the input is the input term. See `rbn.ops.ln_lstm`."""
    dtype, eps = a.input.dtype, a.eps
    wx, W_h, h, c = in_type(compute_dtype(dtype), a.input, a.weight_hh, a.h0, a.c0)
    bias, gamma_x, gamma_h, gamma_c, beta_c = in_type(
        compute_dtype(dtype), a.bias, a.gamma_x, a.gamma_h, a.gamma_c, a.beta_c
    )
    b = 0.0 if bias is None else bias
    valid = valid_steps(a.lengths, len(wx))  # [T, B]
    wx = without_padding(wx, valid)

    output = []
    for t in range(len(wx)):
        gates = ln(h @ W_h.T, gamma_h, 0.0, eps) + ln(wx[t], gamma_x, 0.0, eps) + b
        i, f, g, o = gates.chunk(4, dim=1)
        c_t = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h_t = torch.sigmoid(o) * torch.tanh(ln(c_t, gamma_c, beta_c, eps))

        c_t = zoneout(a.mask_c, a.rate_c, t, c, c_t)
        h_t = zoneout(a.mask_h, a.rate_h, t, h, h_t)
        h, c = carry(valid, t, h_t, h), carry(valid, t, c_t, c)
        output.append(h)
    return stack_steps(output, valid).to(dtype), h.to(dtype), c.to(dtype)
