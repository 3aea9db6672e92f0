"""The cross-entropy of rows of scores, and its gradient.

A program keeps entire rows in registers. So the backward pass recomputes the softmax from the
scores, and the forward pass does not store it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _below_largest(
    logits, bias, rows, columns, C: tl.constexpr, P: tl.constexpr, BIAS: tl.constexpr
):
    """The scores minus their row's maximum; -inf in padded columns."""
    at = rows[:, None] * P + columns[None, :]
    x = tl.load(logits + at, mask=(columns < P)[None, :], other=0.0)
    if BIAS:
        x += tl.load(bias + columns, mask=columns < C, other=0.0).to(tl.float32)[None, :]
    x = tl.where((columns < C)[None, :], x, float("-inf"))
    return x - tl.max(x, 1)[:, None]


@triton.jit
def cross_entropy_forward(
    logits,  # [N, P] float32; the first C columns are classes
    bias,  # [C]
    targets,  # [N] integers
    losses,  # [programs] float32
    N,
    scale,
    C: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """`scale` times the sum of the cross-entropies of a program's rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = tl.minimum(rows, N - 1)  # out-of-range rows repeat the last one and do not count
    columns = tl.arange(0, COLUMNS)
    target = tl.load(targets + here).to(tl.int64)
    x = _below_largest(logits, bias, here, columns, C, P, BIAS)
    of_target = tl.sum(tl.where(columns[None, :] == target[:, None], x, 0.0), 1)
    loss = tl.log(tl.sum(tl.exp(x), 1)) - of_target
    loss = tl.where((target >= 0) & (target < C), loss, float("nan"))
    tl.store(losses + tl.program_id(0), scale * tl.sum(tl.where(rows < N, loss, 0.0), 0))


@triton.jit
def cross_entropy_backward(
    logits,  # see `cross_entropy_forward`
    bias,
    targets,
    dloss,  # float32, one number
    dlogits,  # [N, P]
    dbias,  # [P, programs] float32
    N,
    scale,
    C: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The gradient of the scores, zero in padded columns, and its sums over the rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = tl.minimum(rows, N - 1)
    columns = tl.arange(0, COLUMNS)
    target = tl.load(targets + here).to(tl.int64)
    e = tl.exp(_below_largest(logits, bias, here, columns, C, P, BIAS))
    chosen = (columns[None, :] == target[:, None]).to(tl.float32)
    d = (e / tl.sum(e, 1)[:, None] - chosen) * (scale * tl.load(dloss))
    d = tl.where(((target >= 0) & (target < C))[:, None], d, float("nan"))
    counts = (rows < N)[:, None]
    d = tl.where(counts & (columns < C)[None, :], d, 0.0)
    inside = columns < P
    at = rows[:, None] * P + columns[None, :]
    tl.store(dlogits + at, d.to(dlogits.dtype.element_ty), mask=counts & inside[None, :])
    if BIAS:
        at = columns.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(dbias + at, tl.sum(d, 0), mask=inside)
