"""Statistics of the input term, whose values are known for all steps before the first begins."""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.device import centered_moments


@triton.jit
def input_moments(
    wx,  # [R, T, B, F]
    mean,  # [R, T, F] float32
    var,
    lengths,  # [B] int32
    inv_n,  # [T] float32
    T,
    B,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Mean and biased variance over the batch: a program for each step and block of columns."""
    step = tl.program_id(0).to(tl.int64)  # of all recurrences
    t = step % T
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    counts = (rows < B)[:, None]
    scale = 1.0 / B
    if LENGTHS:
        counts = counts & (t < tl.load(lengths + rows, mask=rows < B, other=0))[:, None]
        scale = tl.load(inv_n + t)
    at = step * B * F + rows[:, None] * F + columns[None, :]
    x = tl.load(wx + at, mask=counts & (columns < F)[None, :], other=0.0).to(tl.float32)
    m, v = centered_moments(x, counts, scale)
    tl.store(mean + step * F + columns, m, mask=columns < F)
    tl.store(var + step * F + columns, v, mask=columns < F)
