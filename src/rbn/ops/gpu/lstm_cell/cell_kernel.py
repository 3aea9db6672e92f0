"""One step of the LSTM with given statistics or none, with or without its two matrix products."""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import sigmoid, tanh


@triton.jit
def _product(x, weight, column, inside, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """X ``[K]`` times some rows of a weight matrix ``[4H, K]``, in float32."""
    total = tl.zeros([column.shape[0], BLOCK_K], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        at = column[:, None].to(tl.int64) * K + k[None, :]
        w = tl.load(weight + at, mask=inside[:, None] & (k < K)[None, :], other=0.0)
        total += w * tl.load(x + k, mask=k < K, other=0.0)[None, :]
    return tl.sum(total, 1)


@triton.jit
def lstm_cell_step(
    x_or_wx,  # [B, I] if MULTIPLY, else [B, 4H]
    wh,  # [B, 4H]; not read if MULTIPLY
    weight_ih,  # [4H, I]; read only if MULTIPLY, as is weight_hh
    weight_hh,  # [4H, H]
    h,  # [B, H]
    c,  # [B, H]
    bias,  # [4H]
    gamma_x,  # [4H]
    gamma_h,
    gamma_c,  # [H]
    beta_c,
    mean_x,  # [4H], of this step
    var_x,
    mean_h,
    var_h,
    mean_c,  # [H]
    var_c,
    new_h,  # [B, H]
    new_c,
    B,
    eps,
    rate_c,
    rate_h,
    INPUTS: tl.constexpr,
    H: tl.constexpr,
    MULTIPLY: tl.constexpr,  # whether the kernel multiplies by the weights
    BIAS: tl.constexpr,
    BETA: tl.constexpr,
    NORM: tl.constexpr,
    JOINT: tl.constexpr,
    CELL: tl.constexpr,  # whether the cell is normalized
    PASS: tl.constexpr,  # whether the normalized cell is passed on
    ZONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The new states. One program per row and block of BLOCK units."""
    row = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = unit < H
    # All four gates before their nonlinearities, equation 2 or 6.
    k = tl.arange(0, 4)[:, None]
    column = k * H + unit[None, :]
    inside = (unit < H)[None, :]
    if MULTIPLY:
        r = tl.arange(0, 4 * BLOCK)  # the same columns, flat
        flat_unit = tl.program_id(0) * BLOCK + r % BLOCK
        flat, flat_inside = r // BLOCK * H + flat_unit, flat_unit < H
        x = _product(x_or_wx + row * INPUTS, weight_ih, flat, flat_inside, INPUTS, BLOCK_K)
        recurrent = _product(h + row * H, weight_hh, flat, flat_inside, H, BLOCK_K)
        x, recurrent = tl.reshape(x, [4, BLOCK]), tl.reshape(recurrent, [4, BLOCK])
    else:
        x = tl.load(x_or_wx + row * 4 * H + column, mask=inside, other=0.0)
        recurrent = tl.load(wh + row * 4 * H + column, mask=inside, other=0.0)
    if JOINT:
        recurrent = x + recurrent
        x = tl.zeros_like(recurrent)
    if NORM:
        m = tl.load(mean_h + column, mask=inside, other=0.0)
        v = tl.load(var_h + column, mask=inside, other=0.0)
        scale = tl.load(gamma_h + column, mask=inside, other=0.0)
        recurrent = (recurrent - m) / tl.sqrt(v + eps) * scale
        if not JOINT:
            m = tl.load(mean_x + column, mask=inside, other=0.0)
            v = tl.load(var_x + column, mask=inside, other=0.0)
            x = (x - m) / tl.sqrt(v + eps) * tl.load(gamma_x + column, mask=inside, other=0.0)
    gates = x + recurrent
    if BIAS:
        gates += tl.load(bias + column, mask=inside, other=0.0)
    i = tl.sum(tl.where(k == 0, gates, 0.0), 0)
    f = tl.sum(tl.where(k == 1, gates, 0.0), 0)
    g = tl.sum(tl.where(k == 2, gates, 0.0), 0)
    o = tl.sum(tl.where(k == 3, gates, 0.0), 0)
    at = row * H + unit
    before = tl.load(c + at, mask=ok, other=0.0)
    cell = sigmoid(f) * before + sigmoid(i) * tanh(g)
    read = cell
    if CELL:
        m = tl.load(mean_c + unit, mask=ok, other=0.0)
        v = tl.load(var_c + unit, mask=ok, other=0.0)
        read = (cell - m) / tl.sqrt(v + eps) * tl.load(gamma_c + unit, mask=ok, other=0.0)
    if BETA:
        read += tl.load(beta_c + unit, mask=ok, other=0.0)
    hidden = sigmoid(o) * tanh(read)
    if PASS:
        cell = read
    if ZONE:
        cell += rate_c * (before - cell)
        hidden += rate_h * (tl.load(h + at, mask=ok, other=0.0) - hidden)
    tl.store(new_h + at, hidden, mask=ok)
    tl.store(new_c + at, cell, mask=ok)
