"""Kernels of the batch-normalized simple RNN and GRU. A program owns UNITS units of all rows.

So it computes means and variances over the batch by itself. It reads the batch in tiles of ROWS
rows, once for each quantity that depends on all rows. Names are those of `rbn.ops.reference.bn_rnn`
and `bn_gru`. If GATED (the GRU), the terms, their parameters and statistics have G = 3H columns
instead of H, in tiles of 4 * UNITS columns, because Triton's sizes are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import (
    BATCH,
    NONE,
    by_zoneout,
    constants,
    join_gates,
    load,
    sigmoid,
    slope,
    split_gates,
    tanh,
    unpadded,
    zoned,
)


@triton.jit
def _columns(H: tl.constexpr, UNITS: tl.constexpr, GATED: tl.constexpr):
    """The columns of both terms that belong to this program's units, and which of them exist."""
    if GATED:
        column = tl.arange(0, 4 * UNITS)
        unit = tl.program_id(0) * UNITS + column % UNITS
        inside = (unit < H) & (column < 3 * UNITS)
        columns = column // UNITS * H + unit
    else:
        columns = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
        inside = columns < H
    return columns, inside


@triton.jit
def _gates(of_h, of_x, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """The GRU's r, z, n and u, the recurrent term of n, from both terms' tiles."""
    r, z, u, _ = split_gates(of_h, ROWS, UNITS)
    r_x, z_x, n_x, _ = split_gates(of_x, ROWS, UNITS)
    r = sigmoid(r + r_x)
    return r, sigmoid(z + z_x), tanh(n_x + r * u), u


@triton.jit(do_not_specialize=["t", "B", "row_x", "row_h"])
def bn_rnn_step(
    wh,  # [B, H] float32: W_h h
    wx,  # [T, B, H]
    bias,  # [H]
    gamma_x,  # [H]
    gamma_h,  # [H]
    beta,  # [H]: beta_h, read if GATED
    mean_x,  # [rows, H], read if given, else written
    var_x,
    mean_h,  # [rows, H]
    var_h,
    hs,  # [T + 1, B, H]
    centered,  # [T, B, H]: W_h h minus its mean, for the backward pass
    h_n,  # [B, H] float32, written if there are lengths
    lengths,  # [B] int32
    inv_n,  # [T] float32: 1 / unpadded rows
    mask_h,  # [T, B, H] bool
    t,
    B,
    row_x,
    row_h,
    rate_h,
    eps,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    X: tl.constexpr,
    NORM: tl.constexpr,
    RELU: tl.constexpr,
    GATED: tl.constexpr,
    LENGTHS: tl.constexpr,
    INCLUDE: tl.constexpr,
    ZONE_H: tl.constexpr,
    SAVE: tl.constexpr,
):
    """Step t after the product W_h h."""
    EXCLUDE: tl.constexpr = LENGTHS and not INCLUDE
    G: tl.constexpr = 3 * H if GATED else H
    step = tl.cast(t, tl.int64) * B
    units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    columns, inside = _columns(H, UNITS, GATED)
    of_x = tl.cast(row_x, tl.int64) * G + columns
    of_h = tl.cast(row_h, tl.int64) * G + columns

    if NORM == BATCH:
        scale = 1.0 / B
        if EXCLUDE:
            scale = tl.load(inv_n + t)
        m_h = tl.zeros_like(columns.to(tl.float32))
        m_x = m_h
        for first in range(0, B, ROWS):
            rows = first + tl.arange(0, ROWS)
            at = rows.to(tl.int64)[:, None] * G + columns[None, :]
            counts = unpadded(lengths, rows, t, B, EXCLUDE) & inside[None, :]
            m_h += tl.sum(load(wh, at, counts), 0)
            if X == BATCH:
                m_x += tl.sum(load(wx, step * G + at, counts), 0)
        m_h *= scale
        m_x *= scale
        v_h = tl.zeros_like(m_h)
        v_x = v_h
        for first in range(0, B, ROWS):
            rows = first + tl.arange(0, ROWS)
            at = rows.to(tl.int64)[:, None] * G + columns[None, :]
            counts = unpadded(lengths, rows, t, B, EXCLUDE) & inside[None, :]
            d = tl.where(counts, load(wh, at, counts) - m_h[None, :], 0.0)
            v_h += tl.sum(d * d, 0)
            if X == BATCH:
                d = tl.where(counts, load(wx, step * G + at, counts) - m_x[None, :], 0.0)
                v_x += tl.sum(d * d, 0)
        v_h *= scale
        v_x *= scale
        if EXCLUDE:  # noqa: SIM102 - known when compiled
            if scale == 0.0:  # too few rows
                m_h, v_h = constants(mean_h, var_h, columns, inside, G, inv_n, t, eps)
                if X == BATCH:
                    m_x, v_x = constants(mean_x, var_x, columns, inside, G, inv_n, t, eps)
        tl.store(mean_h + of_h, m_h, mask=inside)
        tl.store(var_h + of_h, v_h, mask=inside)
    else:
        m_h = tl.load(mean_h + of_h, mask=inside, other=0.0)
        v_h = tl.load(var_h + of_h, mask=inside, other=0.0)
    if X == BATCH:
        tl.store(mean_x + of_x, m_x, mask=inside)
        tl.store(var_x + of_x, v_x, mask=inside)
    else:
        m_x = tl.load(mean_x + of_x, mask=inside, other=0.0)
        v_x = tl.load(var_x + of_x, mask=inside, other=0.0)

    scale_h = tl.load(gamma_h + columns, mask=inside, other=0.0)
    scale_x = tl.load(gamma_x + columns, mask=inside, other=0.0)
    b = tl.load(bias + columns, mask=inside, other=0.0)
    rstd_h = tl.rsqrt(v_h + eps)
    rstd_x = tl.rsqrt(v_x + eps)
    for first in range(0, B, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * G + columns[None, :]
        own = (rows < B)[:, None] & inside[None, :]
        valid = unpadded(lengths, rows, t, B, LENGTHS)
        # Padding is read as zeros: it may contain NaN, which would spread.
        read = own & valid if EXCLUDE else own
        a = tl.where(read, load(wh, at, read) - m_h[None, :], 0.0)
        x = tl.where(read, load(wx, step * G + at, read) - m_x[None, :], 0.0)
        if SAVE:
            tl.store(centered + step * G + at, a.to(centered.dtype.element_ty), mask=own)
        a = (a * rstd_h[None, :]) * scale_h[None, :]
        x = (x * rstd_x[None, :]) * scale_x[None, :]
        at = rows.to(tl.int64)[:, None] * H + units[None, :]
        ok = (rows < B)[:, None] & (units < H)[None, :]
        valid = valid & ok
        if ZONE_H != NONE or INCLUDE or GATED:
            h = load(hs, step * H + at, ok)
        if GATED:
            shift = tl.load(beta + columns, mask=inside, other=0.0)
            _, z, n, _ = _gates(a + shift[None, :], x + b[None, :], ROWS, UNITS)
            h_t = n + z * (h - n)
        else:
            pre = a + b[None, :] + x
            h_t = tl.where(pre <= 0.0, 0.0, pre) if RELU else tanh(pre)  # keeps NaN

        if ZONE_H != NONE or INCLUDE:
            h_t = zoned(h_t, h, mask_h + step * H, at, ok, rate_h, ZONE_H)
            if INCLUDE:
                h_t = tl.where(valid, h_t, h)
        if EXCLUDE:
            h_t = tl.where(valid, h_t, 0.0)
        tl.store(hs + (step + B) * H + at, h_t.to(hs.dtype.element_ty), mask=ok)
        if LENGTHS:
            tl.store(h_n + at, h_t, mask=valid)


@triton.jit(do_not_specialize=["t", "B", "T", "row_x", "row_h"])
def bn_rnn_step_backward(
    wx,  # [T, B, H]
    bias,  # [H]
    gamma_x,  # [H]
    gamma_h,  # [H]
    beta,  # [H]
    mean_x,  # [rows, H]
    var_x,
    var_h,  # [rows, H]
    centered,  # [T, B, H]
    hs,  # [T, B, H]: the state before each step, read if GATED
    lengths,  # [B] int32
    inv_n,  # [T] float32
    mask_h,  # [T, B, H] bool
    doutput,  # [T, B, H]
    through,  # [B, H] float32: the gradient through the next step's product with W_h
    dh,  # [B, H] float32: dh_n at first, then the gradient that bypasses the product
    dpre,  # [1 or 2, B, H] float32: scratch for the gradients of both normalized terms
    da,  # [T, B, H]: d(W_h h)
    dwx,  # [T, B, H]
    sums,  # [4, T, H] float32: the step's part of the gradients of bias, both gammas and beta_h
    t,
    B,
    T,
    row_x,
    row_h,
    rate_h,
    eps,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    X: tl.constexpr,
    NORM: tl.constexpr,
    RELU: tl.constexpr,
    GATED: tl.constexpr,
    HAS_DOUTPUT: tl.constexpr,
    LENGTHS: tl.constexpr,
    INCLUDE: tl.constexpr,
    ZONE_H: tl.constexpr,
):
    """Step t back to d(W_h h); the product with W_h follows."""
    EXCLUDE: tl.constexpr = LENGTHS and not INCLUDE
    G: tl.constexpr = 3 * H if GATED else H
    step = tl.cast(t, tl.int64) * B
    units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    columns, inside = _columns(H, UNITS, GATED)
    of_x = tl.cast(row_x, tl.int64) * G + columns
    of_h = tl.cast(row_h, tl.int64) * G + columns
    scale_h = tl.load(gamma_h + columns, mask=inside, other=0.0)
    scale_x = tl.load(gamma_x + columns, mask=inside, other=0.0)
    b = tl.load(bias + columns, mask=inside, other=0.0)
    m_x = tl.load(mean_x + of_x, mask=inside, other=0.0)
    rstd_x = tl.rsqrt(tl.load(var_x + of_x, mask=inside, other=0.0) + eps)
    rstd_h = tl.rsqrt(tl.load(var_h + of_h, mask=inside, other=0.0) + eps)

    first_sum = tl.zeros_like(scale_h)  # of the input term's gradient
    second_sum = first_sum  # of the recurrent term's, if it differs (GATED)
    of_a = first_sum
    of_input = first_sum
    for first in range(0, B, ROWS):
        rows = first + tl.arange(0, ROWS)
        of_terms = rows.to(tl.int64)[:, None] * G + columns[None, :]
        own = (rows < B)[:, None] & inside[None, :]
        valid = unpadded(lengths, rows, t, B, LENGTHS)
        a_hat = load(centered, step * G + of_terms, own) * rstd_h[None, :]
        read = own & valid if EXCLUDE else own
        x = tl.where(read, load(wx, step * G + of_terms, read) - m_x[None, :], 0.0)
        x_hat = x * rstd_x[None, :]

        at = rows.to(tl.int64)[:, None] * H + units[None, :]
        ok = (rows < B)[:, None] & (units < H)[None, :]
        valid = valid & ok
        dh_t = load(dh, at, ok) + load(through, at, ok)
        if HAS_DOUTPUT:
            dh_t += load(doutput, step * H + at, valid)
        skip, d = by_zoneout(dh_t, mask_h, step * H + at, ok, rate_h, ZONE_H)
        if LENGTHS:
            skip = tl.where(valid, skip, dh_t)
            d = tl.where(valid, d, 0.0)
        if GATED:
            shift = tl.load(beta + columns, mask=inside, other=0.0)
            a = a_hat * scale_h[None, :] + shift[None, :]
            x = x_hat * scale_x[None, :] + b[None, :]
            r, z, n, u = _gates(a, x, ROWS, UNITS)
            skip += d * z
            dz = d * (load(hs, step * H + at, ok) - n) * z * (1.0 - z)
            dn = d * (1.0 - z) * (1.0 - n * n)
            dr = dn * u * r * (1.0 - r)
            d = join_gates(dr, dz, dn, dn, ROWS, UNITS)
            d_h = join_gates(dr, dz, dn * r, dn, ROWS, UNITS)
            second_sum += tl.sum(d_h, 0)
            tl.store(dpre + tl.cast(B, tl.int64) * G + of_terms, d_h, mask=own)
        else:
            pre = a_hat * scale_h[None, :] + b[None, :]
            pre += x_hat * scale_x[None, :]
            if RELU:
                d = tl.where(pre <= 0.0, 0.0, d)
            else:
                y = tanh(pre)
                d *= 1.0 - y * y
            d_h = d
        first_sum += tl.sum(d, 0)
        of_a += tl.sum(d_h * a_hat, 0)
        of_input += tl.sum(d * x_hat, 0)
        tl.store(dpre + of_terms, d, mask=own)
        tl.debug_barrier()  # every thread must have read this tile of dh
        tl.store(dh + at, skip, mask=ok)
    tl.store(sums + tl.cast(t, tl.int64) * G + columns, first_sum, mask=inside)
    tl.store(sums + (tl.cast(T, tl.int64) + t) * G + columns, of_input, mask=inside)
    tl.store(sums + (2 * tl.cast(T, tl.int64) + t) * G + columns, of_a, mask=inside)
    if GATED:
        tl.store(sums + (3 * tl.cast(T, tl.int64) + t) * G + columns, second_sum, mask=inside)
    else:
        second_sum = first_sum

    scale = 1.0 / B
    if EXCLUDE:
        scale = tl.load(inv_n + t)
    slope_h = slope(rstd_h, scale_h, eps, NORM)
    slope_x = rstd_x * scale_x
    first_sum *= scale
    second_sum *= scale
    of_a *= scale
    of_input *= scale
    tl.debug_barrier()  # dpre must be written before other threads read it
    for first in range(0, B, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None] * G + columns[None, :]
        ok = (rows < B)[:, None] & inside[None, :]
        counts = unpadded(lengths, rows, t, B, EXCLUDE) & inside[None, :]
        d = load(dpre, at, ok)
        d_h = load(dpre, tl.cast(B, tl.int64) * G + at, ok) if GATED else d
        d_x = d
        if NORM == BATCH:
            a_hat = load(centered, step * G + at, ok) * rstd_h[None, :]
            d_h = tl.where(counts, d_h - second_sum[None, :] - a_hat * of_a[None, :], 0.0)
        if X == BATCH:
            x_hat = (load(wx, step * G + at, counts) - m_x[None, :]) * rstd_x[None, :]
            d_x = tl.where(counts, d - first_sum[None, :] - x_hat * of_input[None, :], 0.0)
        d_h *= slope_h[None, :]
        d_x *= slope_x[None, :]
        tl.store(da + step * G + at, d_h.to(da.dtype.element_ty), mask=ok)
        tl.store(dwx + step * G + at, d_x.to(dwx.dtype.element_ty), mask=ok)
