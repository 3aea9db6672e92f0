"""Kernels of the layer-normalized LSTM. A program owns all features of one or a few rows.

So it computes means and variances over the features by itself. The four gates of its rows are four
tiles ``[ROWS, UNITS]``; columns beyond H are zero. Values per row are ``[ROWS, 1]``. Names are
those of `rbn.ops.reference.ln_lstm`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import (
    NONE,
    by_zoneout,
    load,
    load_gates,
    sigmoid,
    store_gates,
    tanh,
    zoned,
)

# The statistics of a row that are saved.
MEAN_X = tl.constexpr(0)
RSTD_X = tl.constexpr(1)
RSTD_H = tl.constexpr(2)
MEAN_C = tl.constexpr(3)
RSTD_C = tl.constexpr(4)
KEPT = tl.constexpr(5)


@triton.jit
def _mean(total, F: tl.constexpr):
    """The mean of F columns, ``[ROWS, 1]``."""
    return tl.sum(total, 1)[:, None] / F


@triton.jit
def _less(i, f, g, o, mean, ok):
    """The four gates minus their mean; zero outside `ok`."""
    i = tl.where(ok, i - mean, 0.0)
    f = tl.where(ok, f - mean, 0.0)
    g = tl.where(ok, g - mean, 0.0)
    o = tl.where(ok, o - mean, 0.0)
    return i, f, g, o


@triton.jit
def _rstd(squares, eps, F: tl.constexpr):
    """``1 / sqrt(var + eps)`` from the squares of centered values."""
    return tl.rsqrt(_mean(squares, F) + eps)


@triton.jit
def _gates(
    a_i,
    a_f,
    a_g,
    a_o,
    rstd_h,
    gamma_h,
    x_i,
    x_f,
    x_g,
    x_o,
    rstd_x,
    gamma_x,
    bias,
    units,
    inside,
    H: tl.constexpr,
):
    """The gates after their nonlinearities, from both centered terms."""
    i, f, g, o = load_gates(bias, units, inside, H)
    h_i, h_f, h_g, h_o = load_gates(gamma_h, units, inside, H)
    i += a_i * rstd_h * h_i
    f += a_f * rstd_h * h_f
    g += a_g * rstd_h * h_g
    o += a_o * rstd_h * h_o
    h_i, h_f, h_g, h_o = load_gates(gamma_x, units, inside, H)
    i += x_i * rstd_x * h_i
    f += x_f * rstd_x * h_f
    g += x_g * rstd_x * h_g
    o += x_o * rstd_x * h_o
    return sigmoid(i), sigmoid(f), tanh(g), sigmoid(o)


@triton.jit
def _through_norm(di, df, dg, do, i, f, g, o, rstd, gamma, units, inside, H: tl.constexpr):
    """The gradient of a term from that of its normalized and scaled values.

    i, f, g, o: the centered term.
    """
    s_i, s_f, s_g, s_o = load_gates(gamma, units, inside, H)
    di *= s_i
    df *= s_f
    dg *= s_g
    do *= s_o
    first = _mean(di + df + dg + do, 4 * H)
    # One rstd for i, f, g and o, which are not normalized yet, and one for the gradient.
    second = _mean(di * i + df * f + dg * g + do * o, 4 * H) * (rstd * rstd)
    di = rstd * (di - first - i * second)
    df = rstd * (df - first - f * second)
    dg = rstd * (dg - first - g * second)
    do = rstd * (do - first - o * second)
    return di, df, dg, do


@triton.jit(do_not_specialize=["t", "B"])
def ln_lstm_step(
    wh,  # [B, 4H] float32: W_h h
    wx,  # [T, B, 4H]
    bias,  # [4H]
    gamma_x,  # [4H]
    gamma_h,  # [4H]
    gamma_c,  # [H]
    beta_c,  # [H]
    hs,  # [T + 1, B, H]; the output is all but the first
    cs,  # [T + 1, B, H] float32, or [B, H] if nothing is saved
    centered,  # [T, B, 4H]: W_h h minus its mean, for the backward pass
    moments,  # [T, B, KEPT] float32; those of x are given
    h_n,  # [B, H] float32, written if there are lengths
    lengths,  # [B] int32
    mask_c,  # [T, B, H] bool
    mask_h,
    t,
    B,
    rate_c,
    rate_h,
    eps,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    LENGTHS: tl.constexpr,
    ZONE_C: tl.constexpr,
    ZONE_H: tl.constexpr,
    SAVE: tl.constexpr,
):
    """Step t after the product W_h h."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    units = tl.arange(0, UNITS)[None, :]
    before = tl.cast(t, tl.int64) * B  # rows of all steps before this one
    in_batch = row < B
    inside = units < H
    ok = in_batch & inside
    valid = ok
    if LENGTHS:
        valid = ok & (t < tl.load(lengths + row, mask=in_batch, other=0))
    at_row = row * H + units
    at_step = before * H + at_row
    at_gates = (before + row) * 4 * H + units

    # Loads that do not depend on the product come first. Padding is read as zeros: it may contain
    # NaN, which would spread.
    x_i, x_f, x_g, x_o = load_gates(wx, at_gates, valid, H)
    kept = moments + (before + row) * KEPT
    mean_x = tl.load(kept + MEAN_X, mask=in_batch, other=0.0)
    rstd_x = tl.load(kept + RSTD_X, mask=in_batch, other=0.0)
    if SAVE:
        cs += before * H
    c = load(cs, at_row, ok)
    scale_c = load(gamma_c, units, inside)
    shift_c = load(beta_c, units, inside)
    a_i, a_f, a_g, a_o = load_gates(wh, row * 4 * H + units, ok, H)
    a_i, a_f, a_g, a_o = _less(a_i, a_f, a_g, a_o, _mean(a_i + a_f + a_g + a_o, 4 * H), ok)
    rstd_h = _rstd(a_i * a_i + a_f * a_f + a_g * a_g + a_o * a_o, eps, 4 * H)
    x_i, x_f, x_g, x_o = _less(x_i, x_f, x_g, x_o, mean_x, ok)
    i, f, g, o = _gates(
        a_i, a_f, a_g, a_o, rstd_h, gamma_h,
        x_i, x_f, x_g, x_o, rstd_x, gamma_x,
        bias, units, inside, H,
    )  # fmt: skip

    c_t = f * c + i * g
    mean_c = _mean(tl.where(ok, c_t, 0.0), H)
    c_hat = tl.where(ok, c_t - mean_c, 0.0)
    rstd_c = _rstd(c_hat * c_hat, eps, H)
    c_hat = c_hat * rstd_c * scale_c + shift_c
    h_t = o * tanh(c_hat)

    c_t = zoned(c_t, c, mask_c, at_step, ok, rate_c, ZONE_C)
    if ZONE_H != NONE:
        h_t = zoned(h_t, load(hs, at_step, ok), mask_h, at_step, ok, rate_h, ZONE_H)
    if LENGTHS:
        c_t = tl.where(valid, c_t, c)
        h_t = tl.where(valid, h_t, 0.0)

    tl.debug_barrier()  # every thread must have read c before it may be overwritten
    if SAVE:
        cs += tl.cast(B, tl.int64) * H
    tl.store(cs + at_row, c_t, mask=ok)
    tl.store(hs + tl.cast(B, tl.int64) * H + at_step, h_t.to(hs.dtype.element_ty), mask=ok)
    if LENGTHS:
        tl.store(h_n + at_row, h_t, mask=valid)
    if SAVE:
        store_gates(centered, a_i, a_f, a_g, a_o, at_gates, ok, H)
        tl.store(kept + RSTD_H, rstd_h, mask=in_batch)
        tl.store(kept + MEAN_C, mean_c, mask=in_batch)
        tl.store(kept + RSTD_C, rstd_c, mask=in_batch)


@triton.jit(do_not_specialize=["B", "N"])
def ln_input_moments(
    wx,  # [T, B, 4H]
    lengths,  # [B] int32
    moments,  # [T, B, KEPT] float32
    B,
    N,  # T B
    eps,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """The statistics of the input term, for all rows of all steps at once."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    units = tl.arange(0, UNITS)[None, :]
    counts = row < N
    ok = counts & (units < H)
    valid = ok
    if LENGTHS:
        valid = ok & (row // B < tl.load(lengths + row % B, mask=counts, other=0))
    i, f, g, o = load_gates(wx, row * 4 * H + units, valid, H)
    mean = _mean(i + f + g + o, 4 * H)
    i, f, g, o = _less(i, f, g, o, mean, ok)
    tl.store(moments + row * KEPT + MEAN_X, mean, mask=counts)
    rstd = _rstd(i * i + f * f + g * g + o * o, eps, 4 * H)
    tl.store(moments + row * KEPT + RSTD_X, rstd, mask=counts)


@triton.jit(do_not_specialize=["t", "B"])
def ln_lstm_step_backward(
    wx,  # [T, B, 4H]
    bias,  # [4H]
    gamma_x,  # [4H]
    gamma_h,  # [4H]
    gamma_c,  # [H]
    beta_c,  # [H]
    cs,  # [T + 1, B, H] float32
    centered,  # [T, B, 4H]
    moments,  # [T, B, KEPT] float32
    lengths,  # [B] int32
    mask_c,  # [T, B, H] bool
    mask_h,
    doutput,  # [T, B, H]
    through,  # [B, H] float32: the gradient through the next step's product with W_h
    dh,  # [B, H] float32: dh_n at first, then the gradient that bypasses the product
    dc,  # [B, H] float32: dc_n at first, dc0 at last
    da,  # [T, B, 4H]: d(W_h h)
    dpre,  # [T, B, 4H]: the gradient of the pre-activations
    dgamma_c,  # [B, H] float32, each row's sum over the steps so far
    dbeta_c,
    t,
    B,
    rate_c,
    rate_h,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    HAS_DOUTPUT: tl.constexpr,
    LENGTHS: tl.constexpr,
    ZONE_C: tl.constexpr,
    ZONE_H: tl.constexpr,
):
    """Step t back to d(W_h h); the product with W_h follows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    units = tl.arange(0, UNITS)[None, :]
    before = tl.cast(t, tl.int64) * B
    in_batch = row < B
    inside = units < H
    ok = in_batch & inside
    valid = ok
    if LENGTHS:
        valid = ok & (t < tl.load(lengths + row, mask=in_batch, other=0))
    at_row = row * H + units
    at_step = before * H + at_row
    at_gates = (before + row) * 4 * H + units

    # All loads come first.
    dh_t = tl.load(dh + at_row, mask=ok, other=0.0) + tl.load(through + at_row, mask=ok, other=0.0)
    if HAS_DOUTPUT:
        dh_t += tl.load(doutput + at_step, mask=valid, other=0.0).to(tl.float32)
    dc_t = tl.load(dc + at_row, mask=ok, other=0.0)
    c = load(cs, at_step, ok)
    scale_c = load(gamma_c, units, inside)
    shift_c = load(beta_c, units, inside)
    sum_gamma = tl.load(dgamma_c + at_row, mask=ok, other=0.0)
    sum_beta = tl.load(dbeta_c + at_row, mask=ok, other=0.0)

    # Recompute the forward step.
    kept = moments + (before + row) * KEPT
    rstd_h = tl.load(kept + RSTD_H, mask=in_batch, other=0.0)
    rstd_x = tl.load(kept + RSTD_X, mask=in_batch, other=0.0)
    rstd_c = tl.load(kept + RSTD_C, mask=in_batch, other=0.0)
    mean_x = tl.load(kept + MEAN_X, mask=in_batch, other=0.0)
    mean_c = tl.load(kept + MEAN_C, mask=in_batch, other=0.0)
    a_i, a_f, a_g, a_o = load_gates(centered, at_gates, ok, H)
    x_i, x_f, x_g, x_o = load_gates(wx, at_gates, valid, H)
    x_i, x_f, x_g, x_o = _less(x_i, x_f, x_g, x_o, mean_x, ok)
    i, f, g, o = _gates(
        a_i, a_f, a_g, a_o, rstd_h, gamma_h,
        x_i, x_f, x_g, x_o, rstd_x, gamma_x,
        bias, units, inside, H,
    )  # fmt: skip
    c_t = f * c + i * g
    if ZONE_C == NONE:
        c_t = load(cs + tl.cast(B, tl.int64) * H, at_step, ok)  # as saved by the forward pass
    c_hat = tl.where(ok, c_t - mean_c, 0.0) * rstd_c
    tanh_c = tanh(c_hat * scale_c + shift_c)

    # Zoneout and padding: the gradient that bypasses the step, and the one that enters it.
    dh_skip, dh_new = by_zoneout(dh_t, mask_h, at_step, ok, rate_h, ZONE_H)
    dc_skip, dc_new = by_zoneout(dc_t, mask_c, at_step, ok, rate_c, ZONE_C)
    if LENGTHS:
        dh_skip = tl.where(valid, dh_skip, dh_t)
        dc_skip = tl.where(valid, dc_skip, dc_t)
        dh_new = tl.where(valid, dh_new, 0.0)
        dc_new = tl.where(valid, dc_new, 0.0)

    # The output and the normalization of the cell.
    do = dh_new * tanh_c * o * (1.0 - o)
    dcell = dh_new * o * (1.0 - tanh_c * tanh_c)
    scaled = dcell * scale_c
    first = _mean(scaled, H)
    second = _mean(scaled * c_hat, H)
    dc_new += rstd_c * tl.where(ok, scaled - first - c_hat * second, 0.0)

    # The gates and the cell's update.
    di = dc_new * g * i * (1.0 - i)
    df = dc_new * c * f * (1.0 - f)
    dg = dc_new * i * (1.0 - g * g)
    dc_t = dc_new * f + dc_skip
    sum_gamma += dcell * c_hat
    sum_beta += dcell
    tl.debug_barrier()  # every thread must have read what is overwritten next
    tl.store(dh + at_row, dh_skip, mask=ok)
    tl.store(dc + at_row, dc_t, mask=ok)
    tl.store(dgamma_c + at_row, sum_gamma, mask=ok)
    tl.store(dbeta_c + at_row, sum_beta, mask=ok)
    store_gates(dpre, di, df, dg, do, at_gates, ok, H)

    # The normalization of the recurrent term.
    di, df, dg, do = _through_norm(
        di, df, dg, do, a_i, a_f, a_g, a_o, rstd_h, gamma_h, units, inside, H
    )
    store_gates(da, di, df, dg, do, at_gates, ok, H)


@triton.jit(do_not_specialize=["B", "N"])
def ln_input_backward(
    wx,  # [T, B, 4H]
    gamma_x,  # [4H]
    moments,  # [T, B, KEPT] float32
    lengths,  # [B] int32
    dwx,  # [T, B, 4H]: read as the gradient of the pre-activations, written as that of wx
    B,
    N,  # T B
    H: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """The normalization of the input term, for all rows of all steps at once."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    units = tl.arange(0, UNITS)[None, :]
    counts = row < N
    inside = units < H
    ok = counts & inside
    valid = ok
    if LENGTHS:
        valid = ok & (row // B < tl.load(lengths + row % B, mask=counts, other=0))
    mean = tl.load(moments + row * KEPT + MEAN_X, mask=counts, other=0.0)
    rstd = tl.load(moments + row * KEPT + RSTD_X, mask=counts, other=0.0)
    at = row * 4 * H + units
    i, f, g, o = load_gates(wx, at, valid, H)
    i, f, g, o = _less(i, f, g, o, mean, ok)
    di, df, dg, do = load_gates(dwx, at, ok, H)
    di, df, dg, do = _through_norm(di, df, dg, do, i, f, g, o, rstd, gamma_x, units, inside, H)
    tl.debug_barrier()  # every thread must have read what is overwritten next
    store_gates(dwx, di, df, dg, do, at, ok, H)


@triton.jit(do_not_specialize=["B", "N", "share"])
def ln_parameter_sums(
    wx,  # [N, F] with N = T B, F = 4H
    centered,  # [N, F]
    dpre,  # [N, F]
    moments,  # [N, KEPT] float32
    lengths,  # [B] int32
    sums,  # [programs, 3, F] float32: of dpre, times normalized wx, times normalized W_h h
    B,
    N,
    share,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Sums over `share` rows for the gradients of bias, gamma_x and gamma_h."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    inside = columns < F
    end = tl.minimum((part + 1) * share, N)
    of_bias = tl.zeros((COLUMNS,), tl.float32)
    of_x = tl.zeros((COLUMNS,), tl.float32)
    of_h = tl.zeros((COLUMNS,), tl.float32)
    for start in range(part * share, end, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        counts = rows < end
        kept = moments + rows * KEPT
        mean_x = tl.load(kept + MEAN_X, mask=counts, other=0.0)
        rstd_x = tl.load(kept + RSTD_X, mask=counts, other=0.0)
        rstd_h = tl.load(kept + RSTD_H, mask=counts, other=0.0)
        at = rows[:, None] * F + columns[None, :]
        ok = counts[:, None] & inside[None, :]
        valid = ok
        if LENGTHS:
            length = tl.load(lengths + rows % B, mask=counts, other=0)
            valid = ok & (rows // B < length)[:, None]
        d = tl.load(dpre + at, mask=ok, other=0.0).to(tl.float32)
        x = tl.load(wx + at, mask=valid, other=0.0).to(tl.float32)
        a = tl.load(centered + at, mask=ok, other=0.0).to(tl.float32)
        of_bias += tl.sum(d, 0)
        of_x += tl.sum(d * (x - mean_x[:, None]) * rstd_x[:, None], 0)
        of_h += tl.sum(d * a * rstd_h[:, None], 0)
    result = sums + part * 3 * F + columns
    tl.store(result, of_bias, mask=inside)
    tl.store(result + F, of_x, mask=inside)
    tl.store(result + 2 * F, of_h, mask=inside)
