"""The gradient of the input term through sequencewise statistics."""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import load, unpadded


@triton.jit(do_not_specialize=["T", "B"])
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
    """Subtract the gradient that flows through the statistics of wx from dwx.

    One program per step and block of columns.
    """
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
