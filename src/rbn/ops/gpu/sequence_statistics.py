"""Sequencewise statistics: mean and variance of the input term over all unpadded positions."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rbn.ops.gpu.lstm.prepare import write_input_moments
from rbn.ops.gpu.runtime.device import power_of_two
from rbn.ops.gpu.runtime.launch_cache import launch_by_key
from rbn.ops.gpu.runtime.triton_functions import load, unpadded

_COLUMNS = 128  # per program


def sequence_moments(wx: Tensor, lengths: Tensor | None, mean: Tensor, var: Tensor) -> None:
    """Write the statistics of wx ``[..., T, B, F]``, F of each recurrence, to mean and var.

    They are those of all steps, merged.

    lengths: int32 ``[B]``.
    """
    *lead, T, _, F = wx.shape
    means, variances = torch.empty((2, *lead, T, F), dtype=torch.float32, device=wx.device)
    write_input_moments(wx.contiguous(), lengths, means, variances)
    if lengths is None:
        new_mean = means.mean(-2, keepdim=True)
        new_var = (variances + (means - new_mean).square()).mean(-2)
    else:
        n = (torch.arange(T, device=wx.device)[:, None] < lengths).sum(1)[:, None]
        part = n / n.sum()
        new_mean = (means * part).sum(-2, keepdim=True)
        new_var = ((variances + (means - new_mean).square()) * part).sum(-2)
    mean.copy_(new_mean.view_as(mean))
    var.copy_(new_var.view_as(var))


@triton.jit
def subtract_spread(
    wx,  # [R, T, B, F]
    dwx,  # the same, changed in place
    mean,  # [R, F] float32, like the next four
    var,
    gamma,
    dbias,
    dgamma,
    lengths,  # [B] int32
    eps,
    T,
    B,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Subtract what reaches wx through its statistics: one program per step and columns."""
    step, columns = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS),
    )
    t, inside = step % T, columns < F
    at = step // T * F + columns
    rstd = 1.0 / tl.sqrt(tl.load(var + at, mask=inside, other=1.0) + eps)
    n = tl.zeros((), tl.float32) + T * B
    if LENGTHS:
        n = tl.zeros((), tl.float32)
        for first in range(0, B, ROWS):
            rows = first + tl.arange(0, ROWS)
            n += tl.sum(tl.load(lengths + rows, mask=rows < B, other=0).to(tl.float32), 0)
    factor = rstd * tl.load(gamma + at, mask=inside, other=0.0) / tl.maximum(n, 1.0)
    constant = tl.load(dbias + at, mask=inside, other=0.0) * factor
    slope = tl.load(dgamma + at, mask=inside, other=0.0) * rstd * factor
    m = tl.load(mean + at, mask=inside, other=0.0)
    for first in range(0, B, ROWS):
        rows = tl.arange(0, ROWS)
        counts = unpadded(lengths, first + rows, t, B, LENGTHS) & inside[None, :]
        places = (step * B + first) * F + rows[:, None] * F + columns[None, :]
        x = load(wx, places, counts)
        d = load(dwx, places, counts) - (constant[None, :] + (x - m[None, :]) * slope[None, :])
        tl.store(dwx + places, d.to(dwx.dtype.element_ty), mask=counts)


def sequence_backward(
    wx: Tensor,
    lengths: Tensor | None,
    moments: tuple[Tensor, Tensor],
    gamma_x: Tensor,
    eps: float,
    dwx: Tensor,
    dbias: Tensor,
    dgamma_x: Tensor,
) -> None:
    """Add the gradient through the statistics `moments` to that of wx ``[..., T, B, F]``, dwx.

    lengths: int32 ``[B]``. dwx is contiguous.
    """
    *_, T, B, F = wx.shape
    wx = wx.contiguous()
    tensors = wx, dwx, *moments, gamma_x, dbias, dgamma_x, wx if lengths is None else lengths

    def arguments() -> Any:
        return (
            (wx.numel() // (B * F), -(-F // _COLUMNS)),
            tensors,
            (eps, T, B),
            {
                "F": F,
                "ROWS": min(64, power_of_two(B)),
                "COLUMNS": _COLUMNS,
                "LENGTHS": lengths is not None,
            },
        )

    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    key = (wx.shape, wx.dtype, eps, lengths is None)
    launch_by_key(subtract_spread, key, addresses, arguments, wx)
