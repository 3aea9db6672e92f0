"""The gradient of a symbol look-up: sums of the rows with the same symbol."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc, WIDEN: tl.constexpr):
    """``acc + a b``, in float32 if the device has no product in the dtype of a and b (WIDEN)."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def symbol_sums(
    symbols,  # [N] int64
    grad,  # [N, G]
    sums,  # [shares, V, G] float32
    N,
    V,
    tiles,  # tiles of ROWS rows per share
    G: tl.constexpr,
    SYMBOLS: tl.constexpr,  # at least V
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The one-hot matrix of a share of the rows, times a block of columns of `grad`.

    The one-hot matrix is built in registers. Products with 1 are exact, and so is the split of a
    float32 number into three bfloat16 numbers.
    """
    share = tl.program_id(1)
    numbers = tl.arange(0, SYMBOLS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < G
    rows = tl.arange(0, ROWS)
    begin = share * tiles * ROWS
    end = tl.minimum(begin + tiles * ROWS, N)
    source = grad + begin.to(tl.int64) * G + rows[:, None] * G + columns[None, :]
    acc = tl.zeros((SYMBOLS, COLUMNS), tl.float32)
    for first in range(begin, end, ROWS):
        counts = first + rows < end
        symbol = tl.load(symbols + first + rows, mask=counts, other=0).to(tl.int32)
        d = tl.load(source, mask=counts[:, None] & inside[None, :], other=0.0)
        source += ROWS * G
        hot = tl.where(numbers[:, None] == symbol[None, :], 1.0, 0.0)
        if d.dtype == tl.float32:
            one = hot.to(tl.bfloat16)
            high = d.to(tl.bfloat16)
            rest = d - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc = product(one, low, acc, WIDEN)
            acc = product(one, middle, acc, WIDEN)
            acc = product(one, high, acc, WIDEN)
        else:
            acc = product(hot.to(d.dtype), d, acc, WIDEN)
    out = sums + (share * V + numbers).to(tl.int64)[:, None] * G + columns[None, :]
    tl.store(out, acc, mask=(numbers < V)[:, None] & inside[None, :])


@triton.jit
def add_shares(
    sums,  # [shares, V, G] float32
    out,  # [G, V]
    shares,
    V,
    G: tl.constexpr,
    SYMBOLS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Add the sums of all shares in order, and transpose. One program per block of columns."""
    numbers = tl.arange(0, SYMBOLS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ok = (numbers < V)[:, None] & (columns < G)[None, :]
    acc = tl.zeros((SYMBOLS, COLUMNS), tl.float32)
    for first in range(0, shares, AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            at = (first + k) * V + numbers
            there = ok & (at < shares * V)[:, None]
            source = sums + at.to(tl.int64)[:, None] * G + columns[None, :]
            acc += tl.load(source, mask=there, other=0.0)
    tl.store(out + columns[None, :] * V + numbers[:, None], acc.to(out.dtype.element_ty), mask=ok)
