"""The LSTM's forward pass: one kernel for all steps.

A program owns all four gates of UNITS hidden units, for every row of the batch, so it computes
means and variances over the batch on its own. From the other programs it needs h_{t-1}: all of them
synchronize once per step. Implements equations 2 to 4 and 6 to 8, with the names of
`rbn.ops.reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import (
    BATCH,
    GIVEN,
    MASK,
    NONE,
    RATE,
    arrive,
    centered_moments,
    moments,
    product,
    sigmoid,
    split_gates,
    tanh,
    wait,
)


# `do_not_specialize`: a constant 1 has no methods, and each range of steps would be a new kernel.
@triton.jit(do_not_specialize=["first", "steps"])
def lstm_forward(
    wx,  # [R, T, B, 4H]
    weight,  # [R, 4H, H], in the type of the product
    bias,  # [R, 4H]
    gamma_x,  # [R, 4H]
    gamma_h,  # [R, 4H]
    gamma_c,  # [R, H]
    beta_c,  # [R, H]
    mean_x,  # [R, rows_x, 4H], read where given, else written
    var_x,
    mean_h,  # [R, rows_h, 4H]
    var_h,
    mean_c,  # [R, rows_c, H]
    var_c,
    hs,  # [R, T + 1, B, HS], in the type of the product; hs[:, 0] is h0
    cs,  # [R, T + 1, B, H] float32 or, with cs_step 0, [R, 1, B, H]; starts with c0
    wh,  # [R, T, B, 4H]: W_h h less its mean, for the backward pass
    h_n,  # [R, B, H] float32, written where there are lengths
    lengths,  # [B] int32
    inv_n,  # [T] float32: 1 / rows that count
    mask_c,  # [R, T, B, H] bool
    mask_h,
    barrier,  # [R] int32, zero
    first,
    steps,
    T,
    B,
    rows_x,
    rows_h,
    rows_c,
    cs_step,
    rate_c,
    rate_h,
    eps,
    H: tl.constexpr,
    HS: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    X: tl.constexpr,
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
    PERSIST: tl.constexpr,
    FUSED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Run steps `first` to `first + steps - 1`; see `rbn.ops.gpu.lstm.forward`."""
    GATES: tl.constexpr = 4 * H
    N: tl.constexpr = 4 * UNITS
    RESIDENT: tl.constexpr = K >= H
    pid = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)

    rb = tl.arange(0, ROWS)
    rn = tl.arange(0, N)
    rk = tl.arange(0, K)
    units = pid * UNITS + tl.arange(0, UNITS)
    unit_of = pid * UNITS + rn % UNITS
    columns = (rn // UNITS) * H + unit_of
    in_batch = (rb < B)[:, None]
    ok_u = (units < H)[None, :]
    ok_n = (unit_of < H)[None, :]
    at_units = rb[:, None] * H + units[None, :]
    at_columns = rb[:, None] * GATES + columns[None, :]
    at_h = rb[:, None] * HS + rk[None, :]
    tile_u = in_batch & ok_u
    tile_n = in_batch & ok_n

    wx += r * T * B * GATES
    wh += r * T * B * GATES
    hs += r * (T + 1) * B * HS
    cs += r * T * cs_step + r * B * H
    mask_c += r * T * B * H
    mask_h += r * T * B * H
    h_n += r * B * H
    barrier += r
    mean_x += r * rows_x * GATES
    var_x += r * rows_x * GATES
    mean_h += r * rows_h * GATES
    var_h += r * rows_h * GATES
    mean_c += r * rows_c * H
    var_c += r * rows_c * H

    u_ok = units < H
    n_ok = unit_of < H
    b = tl.zeros((N,), tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + r * GATES + columns, mask=n_ok, other=0.0)
    beta = tl.zeros((UNITS,), tl.float32)
    if HAS_BETA:
        beta = tl.load(beta_c + r * H + units, mask=u_ok, other=0.0)
    g_x = tl.zeros((N,), tl.float32)
    if X != NONE:
        g_x = tl.load(gamma_x + r * GATES + columns, mask=n_ok, other=0.0)
    g_h = tl.zeros((N,), tl.float32)
    if NORM != NONE:
        g_h = tl.load(gamma_h + r * GATES + columns, mask=n_ok, other=0.0)
    g_c = tl.zeros((UNITS,), tl.float32)
    if CELL != NONE:
        g_c = tl.load(gamma_c + r * H + units, mask=u_ok, other=0.0)
    weight += r * GATES * H
    at_weight = columns[None, :] * H + rk[:, None]
    if RESIDENT:
        w = tl.load(weight + at_weight, mask=(rk < H)[:, None] & ok_n, other=0.0)

    start = tl.cast(first, tl.int64)
    c = tl.load(cs + start * cs_step + at_units, mask=tile_u, other=0.0)
    shift_h = tl.zeros((N,), tl.float32)
    shift_c = tl.zeros((UNITS,), tl.float32)
    if first > 0:  # continue where the last launch stopped
        if NORM == BATCH:
            shift_h = tl.load(mean_h + (start - 1) * GATES + columns, mask=n_ok, other=0.0)
        if CELL == BATCH:
            shift_c = tl.load(mean_c + (start - 1) * H + units, mask=u_ok, other=0.0)
    scale = 1.0 / B
    counts = in_batch
    x_next = tl.load(wx + start * B * GATES + at_columns, mask=tile_n, other=0.0)

    for s in range(steps):
        t = start + s
        valid = in_batch
        if LENGTHS:
            valid = in_batch & (t < tl.load(lengths + rb, mask=rb < B, other=0))[:, None]
            if not INCLUDE:
                counts = valid
                scale = tl.load(inv_n + t)

        # The input term, which needs no other program.
        x = x_next.to(tl.float32)
        following = tl.minimum(t + 1, T - 1)
        x_next = tl.load(wx + following * B * GATES + at_columns, mask=tile_n, other=0.0)
        if LENGTHS and not INCLUDE:
            x = tl.where(valid, x, 0.0)
        if X == BATCH:
            mx, vx = centered_moments(x, counts, scale)
            tl.store(mean_x + t * GATES + columns, mx, mask=n_ok)
            tl.store(var_x + t * GATES + columns, vx, mask=n_ok)
        if X == GIVEN:
            at = tl.minimum(t, rows_x - 1) * GATES + columns
            mx = tl.load(mean_x + at, mask=n_ok, other=0.0)
            vx = tl.load(var_x + at, mask=n_ok, other=0.0)
        if X != NONE:
            x = (x - mx[None, :]) * (tl.rsqrt(vx + eps) * g_x)[None, :]
        if not JOINT:
            x += b[None, :]
        if NORM == GIVEN:
            at = tl.minimum(t, rows_h - 1) * GATES + columns
            mh = tl.load(mean_h + at, mask=n_ok, other=0.0)
            vh = tl.load(var_h + at, mask=n_ok, other=0.0)
        if CELL == GIVEN:
            at_c = tl.minimum(t, rows_c - 1) * H + units
            mc = tl.load(mean_c + at_c, mask=u_ok, other=0.0)
            vc = tl.load(var_c + at_c, mask=u_ok, other=0.0)

        # W_h h_{t-1}
        if PERSIST:
            wait(barrier, PROGRAMS * s)
        h_in = hs + t * B * HS + at_h
        a = tl.zeros((ROWS, N), tl.float32)
        if RESIDENT:
            h = tl.load(h_in, mask=in_batch & (rk < H)[None, :], other=0.0, cache_modifier=".cg")
            a = product(h, w, a, PRECISION, WIDEN)
        else:
            for k in range(0, H, K):
                ok = (k + rk) < H
                h = tl.load(h_in + k, mask=in_batch & ok[None, :], other=0.0, cache_modifier=".cg")
                w = tl.load(weight + at_weight + k, mask=ok[:, None] & ok_n, other=0.0)
                a = product(h, w, a, PRECISION, WIDEN)

        # Equation 6
        if JOINT:
            a += x
        kept = a
        if NORM == BATCH:
            mh, vh = moments(a, counts, shift_h, scale, FUSED)
            shift_h = mh
        if NORM != NONE:
            kept = a - mh[None, :]  # rounding loses less in the difference than in the sum
            a = kept * (tl.rsqrt(vh + eps) * g_h)[None, :]
        pre = a + b[None, :] if JOINT else a + x
        if NORM == NONE:
            kept = pre
        i, f, g, o = split_gates(pre, ROWS, UNITS)
        i = sigmoid(i)
        f = sigmoid(f)
        g = tanh(g)
        o = sigmoid(o)

        # Equation 7
        cand = f * c + i * g

        # Equation 8
        c_hat = cand
        if CELL == BATCH:
            mc, vc = moments(cand, counts, shift_c, scale, FUSED)
            shift_c = mc
        if CELL != NONE:
            c_hat = (cand - mc[None, :]) * (tl.rsqrt(vc + eps) * g_c)[None, :]
        c_hat += beta[None, :]
        h_new = o * tanh(c_hat)

        if PASS:
            cand = c_hat
        at_mask = t * B * H + at_units
        if ZONE_C == MASK:
            zone = tl.load(mask_c + at_mask, mask=tile_u, other=0) != 0
            cand = tl.where(zone, c, cand)
        if ZONE_C == RATE:
            cand = rate_c * c + (1.0 - rate_c) * cand
        if ZONE_H != NONE or INCLUDE:
            at_own = rb[:, None] * HS + units[None, :]
            h_old = tl.load(hs + t * B * HS + at_own, mask=tile_u, other=0.0, cache_modifier=".cg")
            h_old = h_old.to(tl.float32)
            if ZONE_H == MASK:
                zone = tl.load(mask_h + at_mask, mask=tile_u, other=0) != 0
                h_new = tl.where(zone, h_old, h_new)
            if ZONE_H == RATE:
                h_new = rate_h * h_old + (1.0 - rate_h) * h_new
            if INCLUDE:
                h_new = tl.where(valid, h_new, h_old)
        c = tl.where(valid, cand, c)
        if LENGTHS and not INCLUDE:
            h_new = tl.where(valid, h_new, 0.0)

        out = hs + (t + 1) * B * HS + rb[:, None] * HS + units[None, :]
        tl.store(out, h_new.to(hs.dtype.element_ty), mask=tile_u, cache_modifier=".cg")
        if PERSIST:
            arrive(barrier)

        # Work that no other program waits for.
        if SAVE:
            at = t * B * GATES + at_columns
            tl.store(wh + at, kept.to(wh.dtype.element_ty), mask=tile_n)
        tl.store(cs + (t + 1) * cs_step + at_units, c, mask=tile_u)
        if NORM == BATCH:
            tl.store(mean_h + t * GATES + columns, mh, mask=n_ok)
            tl.store(var_h + t * GATES + columns, vh, mask=n_ok)
        if CELL == BATCH:
            tl.store(mean_c + t * H + units, mc, mask=u_ok)
            tl.store(var_c + t * H + units, vc, mask=u_ok)
        if LENGTHS:
            tl.store(h_n + at_units, h_new, mask=valid & ok_u)
