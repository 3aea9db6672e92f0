"""Statistics of the input term, which are known for all steps before the recurrence starts."""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import (
    centered_moments,
    constants,
    load,
    merged,
    rows_counted,
    unpadded,
)


@triton.jit(do_not_specialize=["T", "B"])
def input_moments(
    wx,  # [R, T, B, F]
    mean,  # [R, T, F] float32
    var,
    lengths,  # [B] int32
    T,
    B,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Mean and biased variance over the batch: one program per step and block of columns."""
    step = tl.program_id(0).to(tl.int64)  # of all recurrences
    step_moments(wx, mean, var, lengths, step, tl.program_id(1), T, B, F, ROWS, COLUMNS, LENGTHS)


@triton.jit
def step_moments(
    wx,
    mean,
    var,
    lengths,
    step,
    block,
    T,
    B,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Mean and biased variance of one step and block of columns, see `input_moments`."""
    t = step % T
    rows = tl.arange(0, ROWS)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < F
    at = rows[:, None] * F + columns[None, :]
    m = tl.zeros((COLUMNS,), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    n = tl.zeros((), tl.float32)
    for first in range(0, B, ROWS):
        counts = unpadded(lengths, first + rows, t, B, LENGTHS)
        tile_n = rows_counted(first, B, counts, ROWS, LENGTHS)
        x = load(wx + (step * B + first) * F, at, counts & inside[None, :])
        tile_m, tile_squares = centered_moments(x, counts, 1.0 / tl.maximum(tile_n, 1.0))
        m, squares = merged(m, squares, n, tile_m, tile_squares * tile_n, tile_n)
        n += tile_n
    tl.store(mean + step * F + columns, m, mask=inside)
    tl.store(var + step * F + columns, squares / tl.maximum(n, 1.0), mask=inside)


@triton.jit(do_not_specialize=["T", "B", "stride_r", "stride_t", "behind"])
def feature_moments(
    x,  # [R, T, B], with any strides
    w,  # [R, F] float32
    memory,  # float32 [R, T, S]; [R, T] from element `behind` on
    mean,  # [R, T, F] float32
    var,
    lengths,  # [B] int32
    T,
    B,
    stride_r,
    stride_t,
    stride_b,
    behind,
    F: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BATCH: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Write inputs of one feature in the LSTM kernels' layout. One program per step.

    `memory` gets x, with zeros in padded positions and in the rows from B to S. If BATCH (only
    without LENGTHS), x is centered, its variance is stored from `behind` on, and the statistics of
    the input term x w are derived from its mean and variance.
    """
    step = tl.program_id(0).to(tl.int64)  # of all recurrences
    t = step % T
    rows = tl.arange(0, ROWS)
    counts = rows < B
    if LENGTHS:
        counts = counts & (t < tl.load(lengths + rows, mask=counts, other=0))
    at = step // T * stride_r + t * stride_t + rows.to(tl.int64) * stride_b
    value = tl.load(x + at, mask=counts, other=0.0).to(tl.float32)
    if BATCH:
        tl.static_assert(not LENGTHS)
        m = tl.sum(value, 0) / B
        value = tl.where(counts, value - m, 0.0)
        v = tl.sum(value * value, 0) / B
        tl.store(memory + behind + step, v)
        columns = tl.arange(0, COLUMNS)
        inside = columns < F
        of_column = tl.load(w + step // T * F + columns, mask=inside, other=0.0)
        tl.store(mean + step * F + columns, of_column * m, mask=inside)
        tl.store(var + step * F + columns, of_column * of_column * v, mask=inside)
    tl.store(memory + step * S + rows, value, mask=rows < S)


@triton.jit(do_not_specialize=["T"])
def write_constants(
    mean,  # [R, T, F] float32
    var,
    inv_n,  # [T] float32
    eps,
    T,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Overwrite the statistics of steps with too few rows by constants, see `rbn.ops.few_rows`.

    One program per recurrence and block of columns.
    """
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < F
    mean += tl.program_id(0).to(tl.int64) * T * F
    var += tl.program_id(0).to(tl.int64) * T * F
    m, v = constants(mean, var, columns, inside, F, inv_n, T, eps)
    for t in range(0, T):
        if tl.load(inv_n + t) == 0.0:
            row = tl.cast(t, tl.int64) * F + columns
            tl.store(mean + row, m, mask=inside)
            tl.store(var + row, v, mask=inside)
