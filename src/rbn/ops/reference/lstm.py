"""The plain LSTM, equations 2 to 4: the paper's baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.reference.normalization import carry, in_type, stack_steps, without_padding, zoneout
from rbn.ops.types import compute_dtype, valid_steps


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
    """See `rbn.ops.lstm` for the arguments."""
    dtype = wx.dtype
    wx, W_h, h, c, bias, beta_c = in_type(compute_dtype(dtype), wx, weight_hh, h0, c0, bias, beta_c)
    b = 0.0 if bias is None else bias
    beta = 0.0 if beta_c is None else beta_c
    valid = valid_steps(lengths, len(wx))  # [T, B]
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

        c_t = zoneout(zoneout_c, t, c, c_t)
        h_t = zoneout(zoneout_h, t, h, h_t)
        h, c = carry(valid, t, h_t, h), carry(valid, t, c_t, c)
        output.append(h)
    return stack_steps(output, valid).to(dtype), h.to(dtype), c.to(dtype)
