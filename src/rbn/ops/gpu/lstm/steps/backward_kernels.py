"""The LSTM's backward step down to d(W_h h), with programs and tiles as in `forward_kernels`.

It makes three passes over the batch: recompute the step and reduce for the cell's normalization;
compute the gradients of the gates and reduce them; compute the gradients of both terms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.lstm.steps.parts import add, add_gates, back, normalized, rstds, scaled
from rbn.ops.gpu.runtime.triton_functions import (
    NONE,
    by_zoneout,
    load,
    load_gates,
    plus,
    sigmoid,
    slope,
    store_gates,
    sum_four,
    sum_pair,
    tanh,
    times,
    unpadded,
)


@triton.jit(do_not_specialize=["t", "B", "row_x", "row_h", "row_c"])
def lstm_step_backward(
    wx,  # [T, B, 4H]
    bias,  # [4H]
    gamma_x,  # [4H]
    gamma_h,  # [4H]
    gamma_c,  # [H]
    beta_c,  # [H]
    mean_x,  # [rows, 4H]
    var_x,
    var_h,  # [rows, 4H]
    mean_c,  # [rows, H]
    var_c,
    cs,  # [T + 1, B, H] float32
    kept,  # [T, B, 4H]
    lengths,  # [B] int32
    inv_n,  # [T] float32: 1 / rows that count
    mask_c,  # [T, B, H] bool
    mask_h,
    doutput,  # [T, B, H]
    through,  # [B, H] float32: the gradient through the next step's product with W_h
    dh,  # [B, H] float32: dh_n at first, then the gradient that bypasses the product
    dc,  # [B, H] float32: dc_n at first, dc0 at last
    da,  # [T, B, 4H]: d(W_h h)
    dwx,  # [T, B, 4H], written if it differs from da
    dbias,  # [4H] float32, sums over the steps so far, like all below
    dgamma_x,
    dgamma_h,
    dgamma_c,  # [H]
    dbeta_c,
    scratch,  # [8, B, H] float32, used unless SINGLE: [B, 4H], then four times [B, H]
    t,
    B,
    row_x,
    row_h,
    row_c,
    rate_c,
    rate_h,
    eps,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    SINGLE: tl.constexpr,
    X: tl.constexpr,
    NORM: tl.constexpr,
    CELL: tl.constexpr,
    JOINT: tl.constexpr,
    PASS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_DOUTPUT: tl.constexpr,
    LENGTHS: tl.constexpr,
    INCLUDE: tl.constexpr,
    ZONE_C: tl.constexpr,
    ZONE_H: tl.constexpr,
    FUSED: tl.constexpr,
):
    """The backward pass of step t, up to the product with W_h, which follows."""
    GATES: tl.constexpr = 4 * H
    EXCLUDE: tl.constexpr = LENGTHS and not INCLUDE
    SPLIT: tl.constexpr = NORM != NONE and not JOINT
    OTHER_CELL: tl.constexpr = ZONE_C != NONE or INCLUDE or PASS  # cs does not hold c_t itself
    units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    inside = units < H
    local = tl.arange(0, ROWS)
    at = local[:, None] * H + units[None, :]
    at_gates = local[:, None] * GATES + units[None, :]
    step = tl.cast(t, tl.int64) * B
    plane = tl.cast(B, tl.int64) * H
    end = B
    if SINGLE:
        end = ROWS
    scale = 1.0 / B
    if EXCLUDE:
        scale = tl.load(inv_n + t)

    none = tl.zeros((UNITS,), tl.float32)
    zero = tl.zeros((ROWS, UNITS), tl.float32)
    b_i, b_f, b_g, b_o = none, none, none, none
    if HAS_BIAS:
        b_i, b_f, b_g, b_o = load_gates(bias, units, inside, H)
    g_i, g_f, g_g, g_o = none, none, none, none
    r_i, r_f, r_g, r_o = none, none, none, none
    if NORM != NONE:
        of_h = tl.cast(row_h, tl.int64) * GATES + units
        g_i, g_f, g_g, g_o = load_gates(gamma_h, units, inside, H)
        r_i, r_f, r_g, r_o = rstds(var_h, of_h, inside, eps, H)
    gx_i, gx_f, gx_g, gx_o = none, none, none, none
    mx_i, mx_f, mx_g, mx_o = none, none, none, none
    rx_i, rx_f, rx_g, rx_o = none, none, none, none
    if SPLIT:
        of_x = tl.cast(row_x, tl.int64) * GATES + units
        gx_i, gx_f, gx_g, gx_o = load_gates(gamma_x, units, inside, H)
        mx_i, mx_f, mx_g, mx_o = load_gates(mean_x, of_x, inside, H)
        rx_i, rx_f, rx_g, rx_o = rstds(var_x, of_x, inside, eps, H)
    g_c, m_c, r_c, beta = none, none, none, none
    if CELL != NONE:
        of_c = tl.cast(row_c, tl.int64) * H + units
        g_c = load(gamma_c, units, inside)
        m_c = load(mean_c, of_c, inside)
        r_c = tl.rsqrt(load(var_c, of_c, inside) + eps)
    if HAS_BETA:
        beta = load(beta_c, units, inside)

    # Recompute the forward step, then differentiate equation 8.
    a_i, a_f, a_g, a_o = zero, zero, zero, zero
    x_i, x_f, x_g, x_o = zero, zero, zero, zero
    d_i, d_f, d_g, d_o = zero, zero, zero, zero
    dcell, c_hat, dcand, forget, dc_skip = zero, zero, zero, zero, zero
    first_c, second_c = none, none
    for first in range(0, end, ROWS):
        rows = first + local
        ok = (rows < B)[:, None] & inside[None, :]
        counts = unpadded(lengths, rows, t, B, EXCLUDE) & ok
        valid = unpadded(lengths, rows, t, B, LENGTHS) & ok
        before = tl.cast(first, tl.int64)
        tile = step + before
        if NORM == NONE:
            p_i, p_f, p_g, p_o = load_gates(kept + tile * GATES, at_gates, ok, H)
        else:
            a_i, a_f, a_g, a_o = scaled(
                kept + tile * GATES, at_gates, ok, r_i, r_f, r_g, r_o, H
            )  # fmt: skip
            p_i = a_i * g_i[None, :] + b_i[None, :]
            p_f = a_f * g_f[None, :] + b_f[None, :]
            p_g = a_g * g_g[None, :] + b_g[None, :]
            p_o = a_o * g_o[None, :] + b_o[None, :]
        if SPLIT:
            x_i, x_f, x_g, x_o = normalized(
                wx + tile * GATES, at_gates, ok, counts,
                mx_i, mx_f, mx_g, mx_o, rx_i, rx_f, rx_g, rx_o, H,
            )  # fmt: skip
            p_i += x_i * gx_i[None, :]
            p_f += x_f * gx_f[None, :]
            p_g += x_g * gx_g[None, :]
            p_o += x_o * gx_o[None, :]
        i = sigmoid(p_i)
        forget = sigmoid(p_f)
        g = tanh(p_g)
        o = sigmoid(p_o)
        c = load(cs + tile * H, at, ok)
        c_hat = forget * c + i * g
        if not OTHER_CELL:
            c_hat = load(
                cs + (tile + B) * H, at, ok
            )  # as saved: recomputing would add rounding errors
        tanh_c = c_hat
        if CELL != NONE:
            c_hat = tl.where(ok, c_hat - m_c[None, :], 0.0) * r_c[None, :]
            tanh_c = c_hat * g_c[None, :]
        tanh_c = tanh(tanh_c + beta[None, :])

        # Zoneout and padding: the gradient that bypasses the step, and the one that enters it.
        dh_t = load(dh + before * H, at, ok) + load(through + before * H, at, ok)
        dc_t = load(dc + before * H, at, ok)
        if HAS_DOUTPUT:
            dh_t += load(doutput + tile * H, at, valid)
        dh_skip, dh_new = by_zoneout(dh_t, mask_h + tile * H, at, ok, rate_h, ZONE_H)
        dc_skip, dcand = by_zoneout(dc_t, mask_c + tile * H, at, ok, rate_c, ZONE_C)
        if LENGTHS:
            dh_skip = tl.where(valid, dh_skip, dh_t)
            dc_skip = tl.where(valid, dc_skip, dc_t)
            dh_new = tl.where(valid, dh_new, 0.0)
            dcand = tl.where(valid, dcand, 0.0)

        d_o = dh_new * tanh_c * o * (1.0 - o)
        dcell = dh_new * o * (1.0 - tanh_c * tanh_c)
        if PASS:
            dcell += dcand
            dcand = zero
        dcell = tl.where(counts, dcell, 0.0)
        tile_first, tile_second = sum_pair(dcell, dcell * c_hat, FUSED)
        first_c += tile_first
        second_c += tile_second
        # Factors that turn the gradient of c_t into those of the gates.
        d_i = g * i * (1.0 - i)
        d_f = c * forget * (1.0 - forget)
        d_g = i * (1.0 - g * g)
        tl.debug_barrier()  # every thread must have read this tile of dh and dc
        tl.store(dh + before * H + at, dh_skip, mask=ok)
        if not SINGLE:
            tl.store(dc + before * H + at, dc_skip, mask=ok)
            store_gates(scratch + before * GATES, d_i, d_f, d_g, d_o, at_gates, ok, H)
            more = scratch + (4 * plane + before * H) + at
            tl.store(more, dcell, mask=ok)
            tl.store(more + plane, c_hat, mask=ok)
            tl.store(more + 2 * plane, dcand, mask=ok)
            tl.store(more + 3 * plane, forget, mask=ok)
    add(dbeta_c, units, inside, first_c)
    if CELL != NONE:
        add(dgamma_c, units, inside, second_c)

    # Equation 7
    slope_c = slope(r_c, g_c, eps, CELL)
    first_c *= scale
    second_c *= scale
    first_i, first_f, first_g, first_o = none, none, none, none
    of_i, of_f, of_g, of_o = none, none, none, none
    by_i, by_f, by_g, by_o = none, none, none, none
    tl.debug_barrier()  # the scratch must be written before other threads read it
    for first in range(0, end, ROWS):
        rows = first + local
        ok = (rows < B)[:, None] & inside[None, :]
        counts = unpadded(lengths, rows, t, B, EXCLUDE) & ok
        before = tl.cast(first, tl.int64)
        tile = step + before
        if not SINGLE:
            more = scratch + (4 * plane + before * H)
            dcell = load(more, at, ok)
            c_hat = load(more + plane, at, ok)
            dcand = load(more + 2 * plane, at, ok)
            forget = load(more + 3 * plane, at, ok)
            dc_skip = load(dc + before * H, at, ok)
            d_i, d_f, d_g, d_o = load_gates(scratch + before * GATES, at_gates, ok, H)
        if CELL == NONE:
            dcand += dcell
        else:
            dcand += back(dcell, c_hat, first_c, second_c, slope_c, counts, CELL)
        d_i = tl.where(counts, d_i * dcand, 0.0)
        d_f = tl.where(counts, d_f * dcand, 0.0)
        d_g = tl.where(counts, d_g * dcand, 0.0)
        d_o = tl.where(counts, d_o, 0.0)
        s_i, s_f, s_g, s_o = sum_four(d_i, d_f, d_g, d_o, FUSED)
        first_i, first_f, first_g, first_o = plus(
            first_i, first_f, first_g, first_o, s_i, s_f, s_g, s_o
        )
        if NORM != NONE:
            if not SINGLE:
                a_i, a_f, a_g, a_o = scaled(
                    kept + tile * GATES, at_gates, ok, r_i, r_f, r_g, r_o, H
                )  # fmt: skip
            s_i, s_f, s_g, s_o = sum_four(d_i * a_i, d_f * a_f, d_g * a_g, d_o * a_o, FUSED)
            of_i, of_f, of_g, of_o = plus(of_i, of_f, of_g, of_o, s_i, s_f, s_g, s_o)
        if SPLIT:
            if not SINGLE:
                x_i, x_f, x_g, x_o = normalized(
                    wx + tile * GATES, at_gates, ok, counts,
                    mx_i, mx_f, mx_g, mx_o, rx_i, rx_f, rx_g, rx_o, H,
                )  # fmt: skip
            s_i, s_f, s_g, s_o = sum_four(d_i * x_i, d_f * x_f, d_g * x_g, d_o * x_o, FUSED)
            by_i, by_f, by_g, by_o = plus(by_i, by_f, by_g, by_o, s_i, s_f, s_g, s_o)
        tl.debug_barrier()  # every thread must have read this tile before it is overwritten
        tl.store(dc + before * H + at, dcand * forget + dc_skip, mask=ok)
        if not SINGLE:
            store_gates(scratch + before * GATES, d_i, d_f, d_g, d_o, at_gates, ok, H)
    add_gates(dbias, first_i, first_f, first_g, first_o, units, inside, H)
    if NORM != NONE:
        add_gates(dgamma_h, of_i, of_f, of_g, of_o, units, inside, H)
    if SPLIT:
        add_gates(dgamma_x, by_i, by_f, by_g, by_o, units, inside, H)

    # Equation 6
    first_i, first_f, first_g, first_o = times(first_i, first_f, first_g, first_o, scale)
    of_i, of_f, of_g, of_o = times(of_i, of_f, of_g, of_o, scale)
    by_i, by_f, by_g, by_o = times(by_i, by_f, by_g, by_o, scale)
    tl.debug_barrier()  # the scratch must be written before other threads read it
    for first in range(0, end, ROWS):
        rows = first + local
        ok = (rows < B)[:, None] & inside[None, :]
        counts = unpadded(lengths, rows, t, B, EXCLUDE) & ok
        before = tl.cast(first, tl.int64)
        tile = step + before
        if not SINGLE:
            d_i, d_f, d_g, d_o = load_gates(scratch + before * GATES, at_gates, ok, H)
        e_i, e_f, e_g, e_o = d_i, d_f, d_g, d_o
        if NORM != NONE:
            if not SINGLE:
                a_i, a_f, a_g, a_o = scaled(
                    kept + tile * GATES, at_gates, ok, r_i, r_f, r_g, r_o, H
                )  # fmt: skip
            e_i = back(d_i, a_i, first_i, of_i, slope(r_i, g_i, eps, NORM), counts, NORM)
            e_f = back(d_f, a_f, first_f, of_f, slope(r_f, g_f, eps, NORM), counts, NORM)
            e_g = back(d_g, a_g, first_g, of_g, slope(r_g, g_g, eps, NORM), counts, NORM)
            e_o = back(d_o, a_o, first_o, of_o, slope(r_o, g_o, eps, NORM), counts, NORM)
        store_gates(da + tile * GATES, e_i, e_f, e_g, e_o, at_gates, ok, H)
        if SPLIT:
            if not SINGLE:
                x_i, x_f, x_g, x_o = normalized(
                    wx + tile * GATES, at_gates, ok, counts,
                    mx_i, mx_f, mx_g, mx_o, rx_i, rx_f, rx_g, rx_o, H,
                )  # fmt: skip
            e_i = back(d_i, x_i, first_i, by_i, rx_i * gx_i, counts, X)
            e_f = back(d_f, x_f, first_f, by_f, rx_f * gx_f, counts, X)
            e_g = back(d_g, x_g, first_g, by_g, rx_g * gx_g, counts, X)
            e_o = back(d_o, x_o, first_o, by_o, rx_o * gx_o, counts, X)
            store_gates(dwx + tile * GATES, e_i, e_f, e_g, e_o, at_gates, ok, H)
