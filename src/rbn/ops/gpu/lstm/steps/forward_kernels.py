"""The LSTM's step after the product W_h h. A program owns all gates of UNITS units, for all rows.

So it computes means and variances over the batch by itself. It reads the batch in tiles of ROWS
rows, in several passes, because each normalization must reduce over all rows before it can
normalize any of them. If one tile holds the batch (SINGLE), later passes reuse its registers. The
four gates are four tiles ``[ROWS, UNITS]``. Names are those of `rbn.ops.reference.bn_lstm`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import (
    BATCH,
    NONE,
    centered_moments,
    constants,
    load,
    load_gates,
    merged,
    plus,
    rows_counted,
    sigmoid,
    store_gates,
    sum_four,
    tanh,
    times,
    unpadded,
    variance,
    zoned,
)


@triton.jit
def _recurrent(
    wh, wx, at, ok, read, H: tl.constexpr, JOINT: tl.constexpr
):  # fmt: skip
    """W_h h, or its sum with the input term if the sum is normalized (JOINT)."""
    i, f, g, o = load_gates(wh, at, ok, H)
    if JOINT:
        x_i, x_f, x_g, x_o = load_gates(wx, at, read, H)
        i, f, g, o = plus(i, f, g, o, x_i, x_f, x_g, x_o)
    return i, f, g, o


@triton.jit
def _scales(gamma, units, inside, v_i, v_f, v_g, v_o, eps, H: tl.constexpr):
    """``gamma / sqrt(var + eps)`` of the four gates."""
    i, f, g, o = load_gates(gamma, units, inside, H)
    i *= tl.rsqrt(v_i + eps)
    f *= tl.rsqrt(v_f + eps)
    g *= tl.rsqrt(v_g + eps)
    o *= tl.rsqrt(v_o + eps)
    return i, f, g, o


@triton.jit
def _gate(a, x, m_h, s_h, m_x, s_x, b, NORM: tl.constexpr, JOINT: tl.constexpr):
    """Equation 6 of one gate: the recurrent term to save, and the pre-activation."""
    if NORM == NONE:
        pre = a + x + b[None, :]
        kept = pre
    else:
        kept = a - m_h[None, :]  # saved centered, which loses less precision to rounding
        pre = kept * s_h[None, :] + b[None, :]
        if not JOINT:
            pre += (x - m_x[None, :]) * s_x[None, :]
    return kept, pre


@triton.jit(do_not_specialize=["t", "B", "row_x", "row_h", "row_c", "cs_step"])
def lstm_step(
    wh,  # [B, 4H] float32: W_h h
    wx,  # [T, B, 4H]
    bias,  # [4H]
    gamma_x,  # [4H]
    gamma_h,  # [4H]
    gamma_c,  # [H]
    beta_c,  # [H]
    mean_x,  # [rows, 4H]
    var_x,
    mean_h,  # [rows, 4H], read if given, else written
    var_h,
    mean_c,  # [rows, H]
    var_c,
    hs,  # [T + 1, B, HS]
    cs,  # [T + 1, B, H] float32 or, with cs_step 0, [1, B, H]
    kept,  # [T, B, 4H]: W_h h minus its mean, or the pre-activations; written if SAVE
    h_n,  # [B, H] float32, written if LENGTHS
    lengths,  # [B] int32
    inv_n,  # [T] float32, see `row_counts`; read if FEW
    mask_c,  # [T, B, H] bool
    mask_h,
    scratch,  # [2, B, H] float32, used unless SINGLE: the cell and the output gate
    t,
    B,
    row_x,
    row_h,
    row_c,
    cs_step,
    rate_c,
    rate_h,
    eps,
    H: tl.constexpr,
    HS: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    SINGLE: tl.constexpr,
    NORM: tl.constexpr,
    CELL: tl.constexpr,
    JOINT: tl.constexpr,
    PASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BETA: tl.constexpr,
    LENGTHS: tl.constexpr,
    INCLUDE: tl.constexpr,
    ZONE_C: tl.constexpr,
    ZONE_H: tl.constexpr,
    SAVE: tl.constexpr,
    FUSED: tl.constexpr,
    FEW: tl.constexpr,
):
    """Step t after the product W_h h."""
    GATES: tl.constexpr = 4 * H
    EXCLUDE: tl.constexpr = LENGTHS and not INCLUDE
    SPLIT: tl.constexpr = NORM != NONE and not JOINT
    units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    inside = units < H
    local = tl.arange(0, ROWS)
    at = local[:, None] * H + units[None, :]
    at_gates = local[:, None] * GATES + units[None, :]
    step = tl.cast(t, tl.int64) * B  # rows of all steps before this one
    end = B
    if SINGLE:
        end = ROWS

    none = tl.zeros((UNITS,), tl.float32)
    zero = tl.zeros((ROWS, UNITS), tl.float32)
    a_i, a_f, a_g, a_o = zero, zero, zero, zero
    m_i, m_f, m_g, m_o = none, none, none, none
    v_i, v_f, v_g, v_o = none, none, none, none
    of_h = tl.cast(row_h, tl.int64) * GATES + units
    if NORM == BATCH:
        n = tl.zeros((), tl.float32)
        for first in range(0, end, ROWS):
            rows = first + local
            ok = (rows < B)[:, None] & inside[None, :]
            counts = unpadded(lengths, rows, t, B, EXCLUDE)
            before = tl.cast(first, tl.int64) * GATES
            a_i, a_f, a_g, a_o = _recurrent(
                wh + before, wx + step * GATES + before, at_gates, ok, counts & ok, H, JOINT
            )
            tile_n = rows_counted(first, B, counts, ROWS, EXCLUDE)
            each = 1.0 / tl.maximum(tile_n, 1.0)
            d_i, d_f, d_g, d_o = sum_four(
                tl.where(counts, a_i, 0.0),
                tl.where(counts, a_f, 0.0),
                tl.where(counts, a_g, 0.0),
                tl.where(counts, a_o, 0.0),
                FUSED,
            )
            d_i, d_f, d_g, d_o = times(d_i, d_f, d_g, d_o, each)
            e_i = tl.where(counts, a_i - d_i[None, :], 0.0)
            e_f = tl.where(counts, a_f - d_f[None, :], 0.0)
            e_g = tl.where(counts, a_g - d_g[None, :], 0.0)
            e_o = tl.where(counts, a_o - d_o[None, :], 0.0)
            q_i, q_f, q_g, q_o = sum_four(e_i * e_i, e_f * e_f, e_g * e_g, e_o * e_o, FUSED)
            m_i, v_i = merged(m_i, v_i, n, d_i, q_i, tile_n)
            m_f, v_f = merged(m_f, v_f, n, d_f, q_f, tile_n)
            m_g, v_g = merged(m_g, v_g, n, d_g, q_g, tile_n)
            m_o, v_o = merged(m_o, v_o, n, d_o, q_o, tile_n)
            n += tile_n
        v_i = variance(v_i, n, m_i)
        v_f = variance(v_f, n, m_f)
        v_g = variance(v_g, n, m_g)
        v_o = variance(v_o, n, m_o)
        if FEW:  # noqa: SIM102 - known when compiled
            if tl.load(inv_n + t) == 0.0:  # too few rows
                m_i, v_i = constants(mean_h, var_h, units, inside, GATES, inv_n, t, eps)
                m_f, v_f = constants(mean_h, var_h, H + units, inside, GATES, inv_n, t, eps)
                m_g, v_g = constants(mean_h, var_h, 2 * H + units, inside, GATES, inv_n, t, eps)
                m_o, v_o = constants(mean_h, var_h, 3 * H + units, inside, GATES, inv_n, t, eps)
        store_gates(mean_h, m_i, m_f, m_g, m_o, of_h, inside, H)
        store_gates(var_h, v_i, v_f, v_g, v_o, of_h, inside, H)
    elif NORM != NONE:
        m_i, m_f, m_g, m_o = load_gates(mean_h, of_h, inside, H)
        v_i, v_f, v_g, v_o = load_gates(var_h, of_h, inside, H)

    s_i, s_f, s_g, s_o = none, none, none, none
    if NORM != NONE:
        s_i, s_f, s_g, s_o = _scales(gamma_h, units, inside, v_i, v_f, v_g, v_o, eps, H)
    mx_i, mx_f, mx_g, mx_o = none, none, none, none
    sx_i, sx_f, sx_g, sx_o = none, none, none, none
    if SPLIT:
        of_x = tl.cast(row_x, tl.int64) * GATES + units
        mx_i, mx_f, mx_g, mx_o = load_gates(mean_x, of_x, inside, H)
        v_i, v_f, v_g, v_o = load_gates(var_x, of_x, inside, H)
        sx_i, sx_f, sx_g, sx_o = _scales(gamma_x, units, inside, v_i, v_f, v_g, v_o, eps, H)
    b_i, b_f, b_g, b_o = none, none, none, none
    if HAS_BIAS:
        b_i, b_f, b_g, b_o = load_gates(bias, units, inside, H)

    # Equations 6 and 7
    cs += tl.cast(t, tl.int64) * cs_step
    c, cand, out = zero, zero, zero
    m_c, v_c = none, none
    n = tl.zeros((), tl.float32)
    for first in range(0, end, ROWS):
        rows = first + local
        ok = (rows < B)[:, None] & inside[None, :]
        counts = unpadded(lengths, rows, t, B, EXCLUDE)
        before = tl.cast(first, tl.int64)
        x_at = wx + (step + before) * GATES
        # Rows that do not count are loaded as zeros, because a NaN would spread.
        read = counts & ok
        if NORM != BATCH or not SINGLE:
            a_i, a_f, a_g, a_o = _recurrent(wh + before * GATES, x_at, at_gates, ok, read, H, JOINT)
        x_i, x_f, x_g, x_o = zero, zero, zero, zero
        if not JOINT:
            x_i, x_f, x_g, x_o = load_gates(x_at, at_gates, read, H)
        k_i, p_i = _gate(a_i, x_i, m_i, s_i, mx_i, sx_i, b_i, NORM, JOINT)
        k_f, p_f = _gate(a_f, x_f, m_f, s_f, mx_f, sx_f, b_f, NORM, JOINT)
        k_g, p_g = _gate(a_g, x_g, m_g, s_g, mx_g, sx_g, b_g, NORM, JOINT)
        k_o, p_o = _gate(a_o, x_o, m_o, s_o, mx_o, sx_o, b_o, NORM, JOINT)
        if SAVE:
            at_kept = kept + (step + before) * GATES
            store_gates(at_kept, k_i, k_f, k_g, k_o, at_gates, ok, H)
        c = load(cs + before * H, at, ok)
        cand = sigmoid(p_f) * c + sigmoid(p_i) * tanh(p_g)
        out = sigmoid(p_o)
        if CELL == BATCH:
            tile_n = rows_counted(first, B, counts, ROWS, EXCLUDE)
            tile_m, q = centered_moments(cand, counts, 1.0 / tl.maximum(tile_n, 1.0))
            m_c, v_c = merged(m_c, v_c, n, tile_m, q * tile_n, tile_n)
            n += tile_n
        if not SINGLE:
            tl.store(scratch + before * H + at, cand, mask=ok)
            tl.store(scratch + (before + B) * H + at, out, mask=ok)

    of_c = tl.cast(row_c, tl.int64) * H + units
    if CELL == BATCH:
        v_c = variance(v_c, n, m_c)
        if FEW:  # noqa: SIM102 - known when compiled
            if tl.load(inv_n + t) == 0.0:
                m_c, v_c = constants(mean_c, var_c, units, inside, H, inv_n, t, eps)
        tl.store(mean_c + of_c, m_c, mask=inside)
        tl.store(var_c + of_c, v_c, mask=inside)
    elif CELL != NONE:
        m_c = load(mean_c, of_c, inside)
        v_c = load(var_c, of_c, inside)
    s_c, beta = none, none
    if CELL != NONE:
        s_c = tl.rsqrt(v_c + eps) * load(gamma_c, units, inside)
    if HAS_BETA:
        beta = load(beta_c, units, inside)

    # Equation 8
    tl.debug_barrier()  # the scratch must be written before other threads read it
    for first in range(0, end, ROWS):
        rows = first + local
        ok = (rows < B)[:, None] & inside[None, :]
        valid = unpadded(lengths, rows, t, B, LENGTHS) & inside[None, :]
        before = tl.cast(first, tl.int64)
        at_step = (step + before) * H + at
        if not SINGLE:
            cand = load(scratch + before * H, at, ok)
            out = load(scratch + (before + B) * H, at, ok)
            if LENGTHS or ZONE_C != NONE:
                c = load(cs + before * H, at, ok)
        c_hat = cand
        if CELL != NONE:
            c_hat = (cand - m_c[None, :]) * s_c[None, :]
        c_hat += beta[None, :]
        h_t = out * tanh(c_hat)
        c_t = cand
        if PASS:
            c_t = c_hat
        c_t = zoned(c_t, c, mask_c, at_step, ok, rate_c, ZONE_C)
        at_h = (step + before) * HS + local[:, None] * HS + units[None, :]
        if ZONE_H != NONE or INCLUDE:
            h = load(hs, at_h, ok)
            h_t = zoned(h_t, h, mask_h, at_step, ok, rate_h, ZONE_H)
            if INCLUDE:
                h_t = tl.where(valid, h_t, h)
        if LENGTHS:
            c_t = tl.where(valid, c_t, c)
            tl.store(h_n + before * H + at, h_t, mask=valid)
        if EXCLUDE:
            h_t = tl.where(valid, h_t, 0.0)
        tl.store(hs + tl.cast(B, tl.int64) * HS + at_h, h_t.to(hs.dtype.element_ty), mask=ok)
        if not SINGLE:
            tl.debug_barrier()  # every thread must have read this tile of c
        tl.store(cs + cs_step + before * H + at, c_t, mask=ok)
