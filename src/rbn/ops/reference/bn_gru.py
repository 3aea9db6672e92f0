"""The batch-normalized GRU: `torch.nn.GRU` with both terms normalized as in equation 6.

    (r~_t, z~_t, u_t) = BN(W_h h_{t-1}; gamma_h, beta_h)    beta_h = (0, 0, beta_n)
    (r^_t, z^_t, v_t) = BN(W_x x_t; gamma_x, 0) + b
    r_t = sigma(r~_t + r^_t)
    z_t = sigma(z~_t + z^_t)
    n_t = tanh(v_t + r_t * u_t)
    h_t = (1 - z_t) * n_t + z_t * h_{t-1}

As in the paper, shifts that b makes redundant are zero. beta_n is not: the reset gate multiplies
it. It is the bias b_hn of `torch.nn.GRU`. There is no cell to normalize.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rbn.ops.definition import RNNArguments
from rbn.ops.reference.bn_rnn import bn_rnn
from rbn.ops.reference.normalization import in_type
from rbn.ops.types import Statistics, compute_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def bn_gru(a: RNNArguments, group: ProcessGroup | None = None) -> tuple[Tensor, Tensor, Statistics]:
    """The output, h_n and statistics; the input is the input term. See `rbn.ops.bn_gru`."""
    shifts = in_type(compute_dtype(a.input.dtype), a.bias, a.beta_n)
    b, beta = (0.0 if v is None else v for v in shifts)

    def gates(W_h_h: Tensor, W_x_x: Tensor, h: Tensor) -> Tensor:
        of_h, of_x = W_h_h.chunk(3, dim=1), (W_x_x + b).chunk(3, dim=1)  # torch's order r, z, n
        r, z = torch.sigmoid(of_h[0] + of_x[0]), torch.sigmoid(of_h[1] + of_x[1])
        n = torch.tanh(of_x[2] + r * (of_h[2] + beta))
        return (1 - z) * n + z * h

    return bn_rnn(a, group, gates)
