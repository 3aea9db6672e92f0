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
def _raise(var, out, size, floor, BLOCK: tl.constexpr):
    """Raise variances to `floor`. NaN stays."""
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(var + at, mask=at < size, other=0.0)
        tl.store(out + at, tl.where(v < floor, floor, v), mask=at < size)


@triton.jit(do_not_specialize=["T", "B"])
def raise_variances(
    h0,  # [R, B, H]
    c0,
    var_x,  # [R, T, 4H] float32
    var_h,
    var_c,  # [R, T, H] float32
    new_h,  # like var_h
    new_c,
    T,
    B,
    H,
    limit,
    floor,
    COMPARE_H: tl.constexpr,
    COMPARE_C: tl.constexpr,
    CELL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise both variances outside of the steps that `identical_steps` finds.

    COMPARE_H, COMPARE_C: whether to compare a state's rows; not needed if they share memory.
    """
    r = tl.program_id(1).to(tl.int64)
    identical = 1
    if COMPARE_H:
        identical = _identical_rows(h0 + r * B * H, B * H, H, BLOCK)
    if COMPARE_C:
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
    before = tl.minimum(before, T)
    for k in range(before):  # constant in all units or in none
        at = (r * T + k) * 4 * H
        small = _small(var_h + at, 4 * H, limit, BLOCK)
        _raise(var_h + at, new_h + at, 4 * H, tl.where(small == 1, 0.0, floor), BLOCK)
    at = (r * T + before) * 4 * H
    _raise(var_h + at, new_h + at, (T - before) * 4 * H, floor, BLOCK)
    if CELL:
        at = r * T * H
        _raise(var_c + at, new_c + at, after * H, 0.0, BLOCK)
        at += after * H
        _raise(var_c + at, new_c + at, (T - after) * H, floor, BLOCK)
