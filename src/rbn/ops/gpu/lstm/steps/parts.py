"""Helpers of the LSTM's backward step: terms of all four gates, and sums over the steps."""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import BATCH, load_gates


@triton.jit
def rstds(var, at, inside, eps, H: tl.constexpr):
    """``1 / sqrt(var + eps)`` of the four gates."""
    i, f, g, o = load_gates(var, at, inside, H)
    return tl.rsqrt(i + eps), tl.rsqrt(f + eps), tl.rsqrt(g + eps), tl.rsqrt(o + eps)


@triton.jit
def scaled(base, at, ok, s_i, s_f, s_g, s_o, H: tl.constexpr):
    """The normalized recurrent term from its saved, centered values."""
    i, f, g, o = load_gates(base, at, ok, H)
    return i * s_i[None, :], f * s_f[None, :], g * s_g[None, :], o * s_o[None, :]


@triton.jit
def normalized(
    base, at, ok, read, m_i, m_f, m_g, m_o, s_i, s_f, s_g, s_o, H: tl.constexpr
):  # fmt: skip
    """The normalized input term. Elements outside `read` are loaded as zero."""
    i, f, g, o = load_gates(base, at, read, H)
    i = tl.where(ok, i - m_i[None, :], 0.0) * s_i[None, :]
    f = tl.where(ok, f - m_f[None, :], 0.0) * s_f[None, :]
    g = tl.where(ok, g - m_g[None, :], 0.0) * s_g[None, :]
    o = tl.where(ok, o - m_o[None, :], 0.0) * s_o[None, :]
    return i, f, g, o


@triton.jit
def back(d, hat, first, second, factor, counts, MODE: tl.constexpr):
    """The gradient of a term from the gradient d of its normalized and scaled values.

    first, second: the means of d, and of its product with the normalized values.
    """
    if MODE == BATCH:
        d = tl.where(counts, d - first[None, :] - hat * second[None, :], 0.0)
    return d * factor[None, :]


@triton.jit
def add(base, at, ok, value):
    """Add `value` in memory."""
    total = tl.load(base + at, mask=ok, other=0.0) + value
    tl.debug_barrier()  # every thread must have read it before it is overwritten
    tl.store(base + at, total, mask=ok)


@triton.jit
def add_gates(base, i, f, g, o, at, ok, H: tl.constexpr):
    """`add` for the four gates."""
    add(base, at, ok, i)
    add(base + H, at, ok, f)
    add(base + 2 * H, at, ok, g)
    add(base + 3 * H, at, ok, o)
