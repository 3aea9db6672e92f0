"""The LSTM's backward pass: one kernel for all steps, from the last to the first.

Programs own units as in the forward kernel. From the others a program needs d(W_h h) of the
following step; one matrix product turns it into dh_{t} of its units. The gates are not saved but
recomputed from W_h h and W_x x, which have to be read anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import (
    BATCH,
    MASK,
    NONE,
    RATE,
    arrive,
    join_gates,
    product,
    sigmoid,
    slope,
    split_gates,
    sum_pair,
    tanh,
    wait,
)


# `do_not_specialize`: a constant 1 has no methods, and each range of steps would be a new kernel.
@triton.jit(do_not_specialize=["last", "steps"])
def lstm_backward(
    wx,  # [R, T, B, 4H]
    weight,  # [R, H, 4H], transposed, in the type of the product
    bias,  # [R, 4H]
    gamma_x,  # [R, 4H]
    gamma_h,  # [R, 4H]
    gamma_c,  # [R, H]
    beta_c,  # [R, H]
    mean_x,  # [R, rows_x, 4H]
    var_x,
    var_h,  # [R, rows_h, 4H]
    mean_c,  # [R, rows_c, H]
    var_c,
    cs,  # [R, T + 1, B, H] float32
    wh,  # [R, T, B, 4H]: W_h h less its mean, or the gates before their nonlinearities
    lengths,  # [B] int32
    inv_n,  # [T] float32
    mask_c,  # [R, T, B, H] bool
    mask_h,
    doutput,  # [R, T, B, H]
    dh,  # [R, B, H] float32: dh_n at first, then what skips the product
    dc,  # [R, B, H] float32: dc_n at first, dc0 at last
    da,  # [R, T, B, 4H], in the type of the product: d(W_h h)
    dwx,  # [R, T, B, 4H]
    dbias,  # [R, 4H] float32, zero at first, as all below
    dgamma_x,
    dgamma_h,
    dgamma_c,  # [R, H]
    dbeta_c,
    barrier,  # [R] int32, zero
    last,
    steps,
    T,
    B,
    rows_x,
    rows_h,
    rows_c,
    rate_c,
    rate_h,
    eps,
    H: tl.constexpr,
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
    HAS_DOUTPUT: tl.constexpr,
    LENGTHS: tl.constexpr,
    INCLUDE: tl.constexpr,
    ZONE_C: tl.constexpr,
    ZONE_H: tl.constexpr,
    PERSIST: tl.constexpr,
    FUSED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Run steps `last` down to `last - steps + 1`; see `rbn.ops.gpu.lstm.forward`."""
    GATES: tl.constexpr = 4 * H
    N: tl.constexpr = 4 * UNITS
    RESIDENT: tl.constexpr = K >= GATES
    SPLIT_DX: tl.constexpr = NORM != NONE and not JOINT  # dwx differs from da
    OTHER_CELL: tl.constexpr = ZONE_C != NONE or INCLUDE or PASS  # cs does not hold c_t itself
    pid = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)

    rb = tl.arange(0, ROWS)
    rn = tl.arange(0, N)
    rk = tl.arange(0, K)
    units = pid * UNITS + tl.arange(0, UNITS)
    unit_of = pid * UNITS + rn % UNITS
    columns = (rn // UNITS) * H + unit_of
    in_batch = (rb < B)[:, None]
    u_ok = units < H
    n_ok = unit_of < H
    at_units = rb[:, None] * H + units[None, :]
    at_columns = rb[:, None] * GATES + columns[None, :]
    at_da = rb[:, None] * GATES + rk[None, :]
    tile_u = in_batch & u_ok[None, :]
    tile_n = in_batch & n_ok[None, :]

    wx += r * T * B * GATES
    wh += r * T * B * GATES
    da += r * T * B * GATES
    dwx += r * T * B * GATES
    cs += r * (T + 1) * B * H
    mask_c += r * T * B * H
    mask_h += r * T * B * H
    doutput += r * T * B * H
    dh += r * B * H
    dc += r * B * H
    barrier += r
    mean_x += r * rows_x * GATES
    var_x += r * rows_x * GATES
    var_h += r * rows_h * GATES
    mean_c += r * rows_c * H
    var_c += r * rows_c * H
    of_gates = r * GATES + columns
    of_units = r * H + units

    b = tl.zeros((N,), tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + of_gates, mask=n_ok, other=0.0)
    beta = tl.zeros((UNITS,), tl.float32)
    if HAS_BETA:
        beta = tl.load(beta_c + of_units, mask=u_ok, other=0.0)
    g_x = tl.zeros((N,), tl.float32)
    if X != NONE:
        g_x = tl.load(gamma_x + of_gates, mask=n_ok, other=0.0)
    g_h = tl.zeros((N,), tl.float32)
    if NORM != NONE:
        g_h = tl.load(gamma_h + of_gates, mask=n_ok, other=0.0)
    g_c = tl.zeros((UNITS,), tl.float32)
    if CELL != NONE:
        g_c = tl.load(gamma_c + of_units, mask=u_ok, other=0.0)
    weight += r * GATES * H
    at_weight = units[None, :] * GATES + rk[:, None]
    if RESIDENT:
        w = tl.load(weight + at_weight, mask=(rk < GATES)[:, None] & u_ok[None, :], other=0.0)

    start = tl.cast(last, tl.int64)
    dh_skip = tl.load(dh + at_units, mask=tile_u, other=0.0)
    dc_t = tl.load(dc + at_units, mask=tile_u, other=0.0)
    sum_b = tl.load(dbias + of_gates, mask=n_ok, other=0.0)
    sum_x = tl.load(dgamma_x + of_gates, mask=n_ok, other=0.0)
    sum_h = tl.load(dgamma_h + of_gates, mask=n_ok, other=0.0)
    sum_c = tl.load(dgamma_c + of_units, mask=u_ok, other=0.0)
    sum_beta = tl.load(dbeta_c + of_units, mask=u_ok, other=0.0)
    scale = 1.0 / B
    counts = in_batch
    c_t = tl.load(cs + (start + 1) * B * H + at_units, mask=tile_u, other=0.0)

    for s in range(steps):
        t = start - s
        valid = in_batch
        if LENGTHS:
            valid = in_batch & (t < tl.load(lengths + rb, mask=rb < B, other=0))[:, None]
            if not INCLUDE:
                counts = valid
                scale = tl.load(inv_n + t)

        # Recompute the forward step, which needs no other program.
        at = t * B * GATES + at_columns
        a_hat = tl.load(wh + at, mask=tile_n, other=0.0).to(tl.float32)
        pre = a_hat
        if NORM != NONE:
            row = t if NORM == BATCH else tl.minimum(t, rows_h - 1)
            rh = tl.rsqrt(tl.load(var_h + row * GATES + columns, mask=n_ok, other=0.0) + eps)
            a_hat *= rh[None, :]
            pre = a_hat * g_h[None, :] + b[None, :]
        if SPLIT_DX:
            x_hat = tl.load(wx + at, mask=tile_n, other=0.0).to(tl.float32)
            if LENGTHS and not INCLUDE:
                x_hat = tl.where(valid, x_hat, 0.0)
            if X != NONE:
                row_x = t if X == BATCH else tl.minimum(t, rows_x - 1)
                mx = tl.load(mean_x + row_x * GATES + columns, mask=n_ok, other=0.0)
                rx = tl.rsqrt(tl.load(var_x + row_x * GATES + columns, mask=n_ok, other=0.0) + eps)
                x_hat = (x_hat - mx[None, :]) * rx[None, :]
                pre += x_hat * g_x[None, :]
            else:
                pre += x_hat
        i, f, g, o = split_gates(pre, ROWS, UNITS)
        i = sigmoid(i)
        f = sigmoid(f)
        g = tanh(g)
        o = sigmoid(o)
        c_before = tl.load(cs + t * B * H + at_units, mask=tile_u, other=0.0)
        c_hat = f * c_before + i * g if OTHER_CELL else c_t
        c_t = c_before
        if CELL != NONE:
            row_c = t if CELL == BATCH else tl.minimum(t, rows_c - 1)
            mc = tl.load(mean_c + row_c * H + units, mask=u_ok, other=0.0)
            rc = tl.rsqrt(tl.load(var_c + row_c * H + units, mask=u_ok, other=0.0) + eps)
            c_hat = (c_hat - mc[None, :]) * rc[None, :]
            tanh_c = tanh(c_hat * g_c[None, :] + beta[None, :])
        else:
            tanh_c = tanh(c_hat + beta[None, :])
        dh_t = dh_skip
        if HAS_DOUTPUT:
            dy = tl.load(doutput + t * B * H + at_units, mask=tile_u, other=0.0).to(tl.float32)
            dh_t += tl.where(valid, dy, 0.0)

        # dh_t through W_h
        if t < T - 1:
            if PERSIST:
                wait(barrier, PROGRAMS * s)
            da_in = da + (t + 1) * B * GATES + at_da
            if RESIDENT:
                ok = (rk < GATES)[None, :]
                d = tl.load(da_in, mask=in_batch & ok, other=0.0, cache_modifier=".cg")
                dh_t = product(d, w, dh_t, PRECISION, WIDEN)
            else:
                for k in range(0, GATES, K):
                    ok = (k + rk) < GATES
                    d = tl.load(
                        da_in + k, mask=in_batch & ok[None, :], other=0.0, cache_modifier=".cg"
                    )
                    w = tl.load(weight + at_weight + k, mask=ok[:, None] & u_ok[None, :], other=0.0)
                    dh_t = product(d, w, dh_t, PRECISION, WIDEN)

        # Zoneout and padding: the gradient that bypasses the step, and the one that enters it.
        at_mask = t * B * H + at_units
        dh_skip = tl.zeros((ROWS, UNITS), tl.float32)
        if ZONE_H == MASK:
            zone = tl.load(mask_h + at_mask, mask=tile_u, other=0) != 0
            dh_skip = tl.where(zone, dh_t, 0.0)
            dh_new = tl.where(zone, 0.0, dh_t)
        elif ZONE_H == RATE:
            dh_skip = rate_h * dh_t
            dh_new = (1.0 - rate_h) * dh_t
        else:
            dh_new = dh_t
        dc_skip = tl.zeros((ROWS, UNITS), tl.float32)
        if ZONE_C == MASK:
            zone = tl.load(mask_c + at_mask, mask=tile_u, other=0) != 0
            dc_skip = tl.where(zone, dc_t, 0.0)
            dcand = tl.where(zone, 0.0, dc_t)
        elif ZONE_C == RATE:
            dc_skip = rate_c * dc_t
            dcand = (1.0 - rate_c) * dc_t
        else:
            dcand = dc_t
        if LENGTHS:
            dh_skip = tl.where(valid, dh_skip, dh_t)
            dc_skip = tl.where(valid, dc_skip, dc_t)
            dh_new = tl.where(valid, dh_new, 0.0)
            dcand = tl.where(valid, dcand, 0.0)

        # Equation 8
        dout_gate = dh_new * tanh_c * o * (1.0 - o)
        dc_hat = dh_new * o * (1.0 - tanh_c * tanh_c)
        if PASS:
            dc_hat += dcand
            dcand = tl.zeros((ROWS, UNITS), tl.float32)
        dc_hat = tl.where(counts, dc_hat, 0.0)
        if CELL != NONE:
            first, second = sum_pair(dc_hat, dc_hat * c_hat, FUSED)
            sum_beta += first
            sum_c += second
            if CELL == BATCH:
                spread = first[None, :] * scale + c_hat * (second[None, :] * scale)
                dc_hat = tl.where(counts, dc_hat - spread, 0.0)
            dcand += dc_hat * slope(rc, g_c, eps, CELL)[None, :]
        else:
            sum_beta += tl.sum(dc_hat, 0)
            dcand += dc_hat

        # Equation 7
        di = dcand * g * i * (1.0 - i)
        df = dcand * c_before * f * (1.0 - f)
        dg = dcand * i * (1.0 - g * g)
        dc_t = dcand * f + dc_skip
        dpre = tl.where(counts & n_ok[None, :], join_gates(di, df, dg, dout_gate, ROWS, UNITS), 0.0)

        # Equation 6
        if NORM == NONE:
            dwh = dpre
        else:
            first_h, second_h = sum_pair(dpre, dpre * a_hat, FUSED)
            dwh = dpre
            if NORM == BATCH:
                spread_h = first_h[None, :] * scale + a_hat * (second_h[None, :] * scale)
                dwh = tl.where(counts, dwh - spread_h, 0.0)
            dwh *= slope(rh, g_h, eps, NORM)[None, :]
        tl.store(da + at, dwh.to(da.dtype.element_ty), mask=tile_n, cache_modifier=".cg")
        if PERSIST:
            arrive(barrier)

        # Work that no other program waits for.
        if NORM == NONE:
            sum_b += tl.sum(dpre, 0)
        else:
            sum_b += first_h
            sum_h += second_h
        if SPLIT_DX:
            dx = dpre
            if X != NONE:
                third = tl.sum(dpre * x_hat, 0)
                sum_x += third
                if X == BATCH:
                    spread_x = first_h[None, :] * scale + x_hat * (third[None, :] * scale)
                    dx = tl.where(counts, dx - spread_x, 0.0)
                dx *= (rx * g_x)[None, :]
            tl.store(dwx + at, dx.to(dwx.dtype.element_ty), mask=tile_n)

    tl.store(dh + at_units, dh_skip, mask=tile_u)
    tl.store(dc + at_units, dc_t, mask=tile_u)
    tl.store(dbias + of_gates, sum_b, mask=n_ok)
    tl.store(dgamma_x + of_gates, sum_x, mask=n_ok)
    tl.store(dgamma_h + of_gates, sum_h, mask=n_ok)
    tl.store(dgamma_c + of_units, sum_c, mask=u_ok)
    tl.store(dbeta_c + of_units, sum_beta, mask=u_ok)
