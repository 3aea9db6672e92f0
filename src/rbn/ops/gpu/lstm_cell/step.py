"""One step of the plain or the batch-normalized LSTM on the GPU.

Small batches take one launch, which also multiplies by the weights. Larger ones take two cuBLAS
products and one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.cpu.inference import Row, Weights
from rbn.ops.gpu.lstm_cell.cell_kernel import lstm_cell_step
from rbn.ops.gpu.runtime.launch_cache import launch_by_key

_BLOCK = 128  # units per program
_BLOCK_MULTIPLY = 4  # units per program if the kernel multiplies by the weights
_BLOCK_K = 256  # columns of a weight matrix that a program multiplies at a time
# The most multiplications in one launch with several rows: each row reads all weights again.
_MULTIPLIES = 1 << 22


def step(
    x: Tensor,
    weights: Weights,
    states: tuple[Tensor, ...],
    rows: Sequence[Row | None],
    eps: float,
    zoneout: tuple[float, ...],
    pass_normalized_cell: bool,
) -> tuple[Tensor, Tensor]:
    """The new h and c, ``[B, H]`` each; see `rbn.ops.steps.lstm`. All tensors are float32."""
    weight_ih, weight_hh, *vectors = weights
    h, c = states
    (B, H), inputs = c.shape, x.shape[1]
    multiply = B == 1 or B * 4 * H * (inputs + H) <= _MULTIPLIES
    if multiply:
        terms = [x.contiguous(), x, weight_ih.contiguous(), weight_hh.contiguous()]
    else:
        wx, wh = F.linear(x, weight_ih), F.linear(h, weight_hh)
        terms = [wx, wh, wx, wx]
    nothing = terms[0]  # a placeholder for tensors that the kernel does not read
    given = [nothing if v is None else v.contiguous() for v in vectors]
    h, c = h.contiguous(), c.contiguous()
    new_h, new_c = torch.empty_like(c), torch.empty_like(c)
    tensors = [*terms, h, c, *given]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for row in rows:
        if row is None:
            addresses += (addresses[0], addresses[0])
        else:
            mean, var, at = row
            skip = at * mean.shape[1] * 4
            addresses += (mean.data_ptr() + skip, var.data_ptr() + skip)
    addresses += (new_h.data_ptr(), new_c.data_ptr())
    bias, gamma_x, gamma_h, gamma_c, beta_c = [v is not None for v in vectors]

    def arguments() -> Any:
        statistics: list[Tensor] = []
        for row in rows:
            statistics += [nothing] * 2 if row is None else [row.mean[row.row], row.var[row.row]]
        block = _BLOCK_MULTIPLY if multiply else _BLOCK
        flags = {
            "INPUTS": inputs,
            "H": H,
            "MULTIPLY": multiply,
            "BIAS": bias,
            "BETA": beta_c,
            "NORM": gamma_h,
            "JOINT": gamma_h and not gamma_x,
            "CELL": gamma_c,
            "PASS": pass_normalized_cell,
            "ZONE": any(zoneout),
            "BLOCK": block,
            "BLOCK_K": _BLOCK_K,
        }
        numbers = (B, float(eps), float(zoneout[0]), float(zoneout[1]))
        return (-(-H // block), B), [*tensors, *statistics, new_h, new_c], numbers, flags

    present = (bias, gamma_x, gamma_h, gamma_c, beta_c)
    known = (B, inputs, H, multiply, present, eps, zoneout, pass_normalized_cell)
    launch_by_key(lstm_cell_step, known, tuple(addresses), arguments, x)
    return new_h, new_c
