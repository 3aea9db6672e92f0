"""`Ledger.enter` as one kernel instead of some fifteen, each of which a step would wait for."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def enter(
    loss,
    norm,
    total,  # float64
    counts,  # int64: bad, skipped, in a row, number
    factors,  # float32: divide by, not finite, the loss's scale
    clip,
    small,
    parts,  # of which there are norms
    CLIPPED: tl.constexpr,
    PARTS: tl.constexpr,  # no fewer, a power of 2
    LESS: tl.constexpr,
    LEAST: tl.constexpr,
    ROOM: tl.constexpr,
):
    """One program."""
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
        skip = 1 - (tl.abs(n) < float("inf")).to(tl.int64)  # also for no number
        tl.store(counts + 1, tl.load(counts + 1) + skip)
        tl.store(counts + 2, (tl.load(counts + 2) + 1) * skip)
        scale = tl.load(factors + 2)
        tl.store(factors, tl.maximum((n + small * scale) / clip, scale))
        tl.store(factors + 1, skip.to(tl.float32))
        larger = tl.minimum(tl.where(n < ROOM, scale * 2, scale), 1.0)
        tl.store(factors + 2, tl.where(skip != 0, tl.maximum(scale * LESS, LEAST), larger))
