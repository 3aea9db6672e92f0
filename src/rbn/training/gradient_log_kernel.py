"""`GradientLog.record` as one kernel; PyTorch's operations would be about fifteen launches."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def record(
    loss,
    norm,
    total,  # float64
    counts,  # int64: bad, skipped, in a row, number
    factors,  # float32: divisor, overflow, loss scale
    clip,
    eps,
    parts,  # number of norms
    CLIPPED: tl.constexpr,
    PARTS: tl.constexpr,  # the next power of 2
    BACKOFF: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    GROW_BELOW: tl.constexpr,
):
    """Runs as a single program."""
    value = tl.load(loss).to(tl.float32)
    number = tl.load(counts + 3)
    bad = tl.load(counts)
    tl.store(counts, tl.where((tl.abs(value) < float("inf")) | (bad >= 0), bad, number))
    tl.store(counts + 3, number + 1)
    tl.store(total, tl.load(total) + value.to(tl.float64))
    if CLIPPED:
        if PARTS == 1:
            n = tl.load(norm).to(tl.float32)
        else:
            at = tl.arange(0, PARTS)
            each = tl.load(norm + at, mask=at < parts, other=0.0).to(tl.float32)
            n = tl.sqrt(tl.sum(each * each))
        skip = 1 - (tl.abs(n) < float("inf")).to(tl.int64)  # NaN too
        tl.store(counts + 1, tl.load(counts + 1) + skip)
        tl.store(counts + 2, (tl.load(counts + 2) + 1) * skip)
        scale = tl.load(factors + 2)
        tl.store(factors, tl.maximum((n + eps * scale) / clip, scale))
        tl.store(factors + 1, skip.to(tl.float32))
        larger = tl.minimum(tl.where(n < GROW_BELOW, scale * 2, scale), 1.0)
        tl.store(factors + 2, tl.where(skip != 0, tl.maximum(scale * BACKOFF, MIN_SCALE), larger))
