"""Statistics of the input term, whose values are known for all steps before the first begins."""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.device import centered_moments, load, merged, rows_counted, unpadded


@triton.jit
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
    """Mean and biased variance over the batch: a program for each step and block of columns."""
    step = tl.program_id(0).to(tl.int64)  # of all recurrences
    t = step % T
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
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
