"""`rbn.ops.identical_rows` as a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _identical_rows(state, size, H, BLOCK: tl.constexpr):
    """1 where all rows of a state ``[B, H]`` are identical, else 0."""
    same = 1
    start = 0
    while (start < size) & (same == 1):
        at = start + tl.arange(0, BLOCK)
        mine = tl.load(state + at, mask=at < size, other=0.0)
        first = tl.load(state + at % H, mask=at < size, other=0.0)
        same = tl.min(((mine == first) | (at >= size)).to(tl.int32), axis=0)
        start += BLOCK
    return same


@triton.jit
def _small(var, size, limit, BLOCK: tl.constexpr):
    """1 where all variances of a step are at most `limit`, else 0."""
    small = 1
    start = 0
    while (start < size) & (small == 1):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(var + at, mask=at < size, other=0.0)
        small = tl.min((v <= limit).to(tl.int32), axis=0)
        start += BLOCK
    return small


@triton.jit
def _raise(var, out, size, F, identical, floor, BLOCK: tl.constexpr):
    """Raise variances ``[T, F]`` to `floor`, except in the first `identical` steps."""
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(var + at, mask=at < size, other=0.0)
        low = (at // F >= identical) & (v < floor)  # NaN stays
        tl.store(out + at, tl.where(low, floor, v), mask=at < size)


@triton.jit
def raise_both(
    h0,
    c0,
    var_x,
    var_h,
    var_c,
    new_h,
    new_c,
    T,
    B,
    H,
    limit,
    floor,
    LOOK_H: tl.constexpr,
    LOOK_C: tl.constexpr,
    CELL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The body of `raise_variances`."""
    r = tl.program_id(1).to(tl.int64)
    identical = 1
    if LOOK_H:
        identical = _identical_rows(h0 + r * B * H, B * H, H, BLOCK)
    if LOOK_C:
        identical *= _identical_rows(c0 + r * B * H, B * H, H, BLOCK)
    before = identical  # number of steps before which the rows are identical
    after = 0  # number of steps after which they are
    t = 0
    while (t < T) & (identical == 1):
        if CELL:
            identical = _small(var_c + (r * T + t) * H, H, limit, BLOCK)
        else:
            identical = _small(var_h + (r * T + t) * 4 * H, 4 * H, limit, BLOCK)
        if identical == 1:
            identical = _small(var_x + (r * T + t) * 4 * H, 4 * H, limit, BLOCK)
        after += identical
        if MASKED:
            identical *= 0
        before += identical
        t += 1
    _raise(var_h + r * T * 4 * H, new_h + r * T * 4 * H, T * 4 * H, 4 * H, before, floor, BLOCK)
    if CELL:
        _raise(var_c + r * T * H, new_c + r * T * H, T * H, H, after, floor, BLOCK)


@triton.jit
def raise_variances(
    h0,  # [R, B, H]
    c0,
    var_x,  # [R, T, 4H] float32
    var_h,
    var_c,  # [R, T, H] float32
    new_h,  # as var_h
    new_c,
    T,
    B,
    H,
    limit,
    floor,
    LOOK_H: tl.constexpr,
    LOOK_C: tl.constexpr,
    CELL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise both variances, see `identical_steps`. LOOK_H, LOOK_C: whether a state's rows differ.

    A state whose rows are the same memory need not be read.
    """
    raise_both(
        h0,
        c0,
        var_x,
        var_h,
        var_c,
        new_h,
        new_c,
        T,
        B,
        H,
        limit,
        floor,
        LOOK_H,
        LOOK_C,
        CELL,
        MASKED,
        BLOCK,
    )
