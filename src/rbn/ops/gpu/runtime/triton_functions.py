"""Device functions shared by the Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops import few_rows, types

# How a term is normalized.
NONE = tl.constexpr(0)
BATCH = tl.constexpr(1)
GIVEN = tl.constexpr(2)

# In products, write these constants after a tensor: with a constant first, the interpreter of
# Triton 3.7 treats the product as a constexpr.

# Variances below this fraction of the squared mean are rounding errors: the mean that was
# subtracted is exact only to a few roundings.
LAST_BITS = tl.constexpr(2e-13)
CONSTANT = tl.constexpr(types.CONSTANT)
NO_SCALE = tl.constexpr(few_rows.NO_SCALE)

# How zoneout is given.
MASK = tl.constexpr(1)
RATE = tl.constexpr(2)


@triton.jit
def sigmoid(x):
    """The logistic function, exact at both limits."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Hyperbolic tangent with a relative error of 1e-6, and of 2e-7 for small x.

    Batch normalization magnifies small states, so their last bits matter. Below 0.4 an odd
    polynomial replaces the quotient, which bounds only the absolute error.
    """
    small = tl.abs(x) < 0.4
    v = tl.where(small, x, 0.0)  # so that no power of a large x overflows
    s = v * v
    near = v + v * s * (-0.33331883 + s * (0.13277629 + s * -0.04779422))
    return tl.where(small, near, 2.0 * sigmoid(2.0 * x) - 1.0)


@triton.jit
def load(base, at, ok):
    """Load values as float32, zero where the mask `ok` is false."""
    return tl.load(base + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def load_gates(base, at, ok, H: tl.constexpr):
    """Load the four gates of rows ``[4H]`` as float32."""
    i = load(base, at, ok)
    f = load(base + H, at, ok)
    g = load(base + 2 * H, at, ok)
    o = load(base + 3 * H, at, ok)
    return i, f, g, o


@triton.jit
def store_gates(base, i, f, g, o, at, ok, H: tl.constexpr):
    """Write the four gates of rows ``[4H]``."""
    tl.store(base + at, i.to(base.dtype.element_ty), mask=ok)
    tl.store(base + H + at, f.to(base.dtype.element_ty), mask=ok)
    tl.store(base + 2 * H + at, g.to(base.dtype.element_ty), mask=ok)
    tl.store(base + 3 * H + at, o.to(base.dtype.element_ty), mask=ok)


@triton.jit
def times(i, f, g, o, factor):
    """The four gates times one factor."""
    return i * factor, f * factor, g * factor, o * factor


@triton.jit
def plus(i, f, g, o, more_i, more_f, more_g, more_o):
    """The sums of four gates and four others."""
    return i + more_i, f + more_f, g + more_g, o + more_o


@triton.jit
def unpadded(lengths, rows, t, B, LENGTHS: tl.constexpr):
    """Which of these rows of the batch are not padding at step t, ``[ROWS, 1]``."""
    ok = rows < B
    if LENGTHS:
        ok = ok & (t < tl.load(lengths + rows, mask=ok, other=0))
    return ok[:, None]


@triton.jit
def zoned(new, old, mask, at, ok, rate, ZONE: tl.constexpr):
    """A state after zoneout, from the step's new value and the old one."""
    if ZONE == MASK:
        new = tl.where(tl.load(mask + at, mask=ok, other=0) != 0, old, new)
    if ZONE == RATE:
        new = rate * old + (1.0 - rate) * new
    return new


@triton.jit
def by_zoneout(d, mask, at, ok, rate, ZONE: tl.constexpr):
    """Split a state's gradient into the part that bypasses the step and the part that enters it."""
    past = tl.zeros_like(d)
    new = d
    if ZONE == MASK:
        stays = tl.load(mask + at, mask=ok, other=0) != 0
        past = tl.where(stays, d, 0.0)
        new = tl.where(stays, 0.0, d)
    if ZONE == RATE:
        past = rate * d
        new = (1.0 - rate) * d
    return past, new


@triton.jit
def split_gates(p, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """Split ``[ROWS, 4 * UNITS]``, ordered gate by gate, into i, f, g, o ``[ROWS, UNITS]``."""
    q = tl.permute(tl.reshape(p, (ROWS, 4, UNITS)), (0, 2, 1))
    even, odd = tl.split(tl.reshape(q, (ROWS, UNITS, 2, 2)))
    i, g = tl.split(even)
    f, o = tl.split(odd)
    return i, f, g, o


@triton.jit
def join_gates(i, f, g, o, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """The inverse of `split_gates`."""
    q = tl.reshape(tl.join(tl.join(i, g), tl.join(f, o)), (ROWS, UNITS, 4))
    return tl.reshape(tl.permute(q, (0, 2, 1)), (ROWS, 4 * UNITS))


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def sum_pair(a, b, FUSED: tl.constexpr):
    """Sums over the rows of two tiles, in one reduction if FUSED."""
    if FUSED:
        first, second = tl.reduce((a, b), 0, _add_pairs)
    else:
        first = tl.sum(a, 0)
        second = tl.sum(b, 0)
    return first, second


@triton.jit
def centered_moments(x, rows, inv_n):
    """Mean and biased variance over the rows that count, in two passes."""
    mean = tl.sum(tl.where(rows, x, 0.0), 0) * inv_n
    d = tl.where(rows, x - mean[None, :], 0.0)
    return mean, tl.sum(d * d, 0) * inv_n


@triton.jit
def rows_counted(first, B, counts, ROWS: tl.constexpr, SOME: tl.constexpr):
    """How many rows of the tile that starts at row `first` count: all in the batch unless SOME."""
    n = tl.minimum(B - first, ROWS).to(tl.float32)
    if SOME:
        n = tl.sum(tl.sum(counts.to(tl.float32), 1), 0)
    return n


@triton.jit
def merged(mean, squares, n, tile_mean, tile_squares, tile_n):
    """Merge the mean and squared deviations of n rows with those of another tile.

    Without cancellation, after Chan, Golub and LeVeque (1979). With n = 0 the result is exactly the
    tile's.
    """
    share = tile_n / tl.maximum(n + tile_n, 1.0)
    off = tile_mean - mean
    return mean + off * share, squares + tile_squares + off * off * (n * share)


@triton.jit
def variance(squares, n, mean):
    """The variance of n rows from their summed squared deviations; 0 if it is only rounding."""
    var = squares / tl.maximum(n, 1.0)
    return tl.where(var <= mean * LAST_BITS * mean, 0.0, var)  # but a NaN stays one


@triton.jit
def constants(mean, var, columns, inside, size, inv_n, t, eps):
    """Mean and variance over all rows of the steps before t, see `rbn.ops.few_rows`.

    mean, var: of each step, ``[T, size]``. columns: the program's columns; inside: which exist.
    """
    STEPS: tl.constexpr = 32
    m = tl.zeros_like(columns.to(tl.float32))
    squares = m
    n = tl.zeros((), tl.float32)
    for first in range(0, t, STEPS):
        steps = first + tl.arange(0, STEPS)
        scale = tl.load(inv_n + steps, mask=steps < t, other=0.0)
        rows = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), 0.0)[:, None]
        ok = (rows > 0.0) & inside[None, :]
        at = steps.to(tl.int64)[:, None] * size + columns[None, :]
        means = load(mean, at, ok)
        tile_n = tl.sum(tl.sum(rows, 1), 0)
        tile_m = tl.sum(means * rows, 0) / tl.maximum(tile_n, 1.0)
        off = tl.where(ok, means - tile_m[None, :], 0.0)
        tile_squares = tl.sum((load(var, at, ok) + off * off) * rows, 0)
        m, squares = merged(m, squares, n, tile_m, tile_squares, tile_n)
        n += tile_n
    v = squares / tl.maximum(n, 1.0)
    return m, tl.where(v > CONSTANT * eps, v, NO_SCALE)


@triton.jit
def _add_fours(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def sum_four(i, f, g, o, FUSED: tl.constexpr):
    """Sums over the rows of four tiles, in one reduction if FUSED."""
    if FUSED:
        i, f, g, o = tl.reduce((i, f, g, o), 0, _add_fours)
    else:
        i = tl.sum(i, 0)
        f = tl.sum(f, 0)
        g = tl.sum(g, 0)
        o = tl.sum(o, 0)
    return i, f, g, o


@triton.jit
def slope(rstd, gamma, eps, MODE: tl.constexpr):
    """The factor of a gradient on its way back through a term; 0 for a constant term."""
    s = rstd * gamma
    if MODE == BATCH:
        s = tl.where(rstd * rstd * eps <= 1.0 - CONSTANT, s, 0.0)
    return s
