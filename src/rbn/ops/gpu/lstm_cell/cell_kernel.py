"""One step of the LSTM behind its two matrix products, with given statistics or none."""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import sigmoid, tanh


@triton.jit
def lstm_cell_step(
    wx,  # [B, 4H]
    wh,  # [B, 4H]
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
    H: tl.constexpr,
    BIAS: tl.constexpr,
    BETA: tl.constexpr,
    NORM: tl.constexpr,
    JOINT: tl.constexpr,
    CELL: tl.constexpr,  # whether the cell is normalized
    PASS: tl.constexpr,  # whether the normalized cell is passed on
    ZONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The new states; programs take a row and BLOCK units of it."""
    row = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = unit < H
    # All four gates before their nonlinearities, equation 2 or 6.
    k = tl.arange(0, 4)[:, None]
    column = k * H + unit[None, :]
    inside = (unit < H)[None, :]
    x = tl.load(wx + row * 4 * H + column, mask=inside, other=0.0)
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
