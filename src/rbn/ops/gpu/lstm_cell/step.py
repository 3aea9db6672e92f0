"""One step of the plain or the batch-normalized LSTM on the GPU: two products and one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.cpu.inference import Row, Weights
from rbn.ops.gpu.lstm_cell.cell_kernel import lstm_cell_step
from rbn.ops.gpu.runtime.launch_cache import launch_by_key

_BLOCK = 128  # units of a program


def step(
    x: Tensor,
    weights: Weights,
    h: Tensor,
    c: Tensor,
    rows: Sequence[Row | None],
    eps: float,
    zoneout: tuple[float, ...],
    pass_normalized_cell: bool,
) -> tuple[Tensor, Tensor]:
    """The new h and c, ``[B, H]`` each; see `rbn.ops.steps.lstm`. All tensors are float32."""
    weight_ih, weight_hh, *vectors = weights
    bias, gamma_x, gamma_h, gamma_c, beta_c = vectors
    wx, wh = F.linear(x, weight_ih), F.linear(h, weight_hh)
    h, c = h.contiguous(), c.contiguous()
    out = torch.empty((2, *c.shape), dtype=c.dtype, device=c.device)
    B, H = c.shape
    given = [None if v is None else v.contiguous() for v in vectors]
    present = (bias is None, beta_c is None, gamma_h is None, gamma_x is None, gamma_c is None)
    wx_at = wx.data_ptr()  # for what the kernel does not look at
    addresses = [wx_at, wh.data_ptr(), h.data_ptr(), c.data_ptr()]
    addresses += [wx_at if v is None else v.data_ptr() for v in given]
    for row in rows:
        if row is None:
            addresses += [wx_at, wx_at]
        else:
            skip = row.row * row.mean.shape[1] * 4
            addresses += [row.mean.data_ptr() + skip, row.var.data_ptr() + skip]
    new_h, new_c = out.unbind()
    addresses += [new_h.data_ptr(), new_c.data_ptr()]

    def arguments() -> Any:
        statistics: list[Tensor] = []
        for row in rows:
            statistics += [wx, wx] if row is None else [row.mean[row.row], row.var[row.row]]
        tensors = [wx, wh, h, c, *(wx if v is None else v for v in given), *statistics]
        flags = {
            "H": H,
            "BIAS": bias is not None,
            "BETA": beta_c is not None,
            "NORM": gamma_h is not None,
            "JOINT": gamma_h is not None and gamma_x is None,
            "CELL": gamma_c is not None,
            "PASS": pass_normalized_cell,
            "ZONE": any(zoneout),
            "BLOCK": _BLOCK,
        }
        numbers = (B, float(eps), float(zoneout[0]), float(zoneout[1]))
        return (-(-H // _BLOCK), B), [*tensors, new_h, new_c], numbers, flags

    known = (B, H, present, eps, zoneout, pass_normalized_cell)
    launch_by_key(lstm_cell_step, known, tuple(addresses), arguments, x)
    return new_h, new_c
