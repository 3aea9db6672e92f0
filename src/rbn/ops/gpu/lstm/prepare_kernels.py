"""Work before and after a recurrence, fused into one launch each."""

from __future__ import annotations

import triton
import triton.language as tl

from rbn.ops.gpu.lstm.constant_terms_kernel import raise_variances
from rbn.ops.gpu.lstm.input_moments import step_moments


@triton.jit(do_not_specialize=["N", "M"])
def pad_rows(
    a,  # [N, COLUMNS]
    b,  # [M, COLUMNS]
    padded,  # [N + M, WIDTH]
    N,
    M,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a and b, padded with zeros to WIDTH columns; BLOCK >= WIDTH."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    given = columns < COLUMNS
    first = rows < N
    x = tl.load(a + rows * COLUMNS + columns, mask=first & given, other=0.0)
    second = (rows >= N) & (rows < N + M)
    y = tl.load(b + (rows - N) * COLUMNS + columns, mask=second & given, other=0.0)
    tl.store(
        padded + rows * WIDTH + columns,
        tl.where(first, x, y),
        mask=(rows < N + M) & (columns < WIDTH),
    )


@triton.jit
def _widen(vector, joined, at, SIZE: tl.constexpr):
    """Copy a vector in float32; returns the place of the next one."""
    tl.store(joined + at, tl.load(vector + at, mask=at < SIZE).to(tl.float32), mask=at < SIZE)
    return joined + (SIZE + 3) // 4 * 4


@triton.jit(do_not_specialize=["steps", "T", "B"])
def begin(
    h0,  # [R, B, H] with strides h_r, h_b, 1
    c0,  # [R, B, H] with strides c_r, c_b, 1
    bias,  # [R, 4H]
    gamma_x,
    gamma_h,
    gamma_c,  # [R, H]
    beta_c,
    hs,  # [R, T + 1, B, STRIDE]
    c_n,  # [R, B, H] float32
    joined,  # float32: the vectors that exist, each at a multiple of 16 bytes
    clear,  # int32, `zeros` elements
    wx,  # these four as in `input_moments`
    mean,
    var,
    lengths,
    states,  # R * B * STRIDE
    of_one,  # B * STRIDE
    of_all,  # (T + 1) * B * STRIDE
    h_r,
    h_b,
    c_r,
    c_b,
    zeros,
    steps,  # of all recurrences
    T,
    B,
    H: tl.constexpr,
    STRIDE: tl.constexpr,
    UNITS: tl.constexpr,  # R * H
    BIAS: tl.constexpr,
    GAMMA_X: tl.constexpr,
    GAMMA_H: tl.constexpr,
    GAMMA_C: tl.constexpr,
    BETA_C: tl.constexpr,
    BLOCK: tl.constexpr,
    MOMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Copy the initial states to their buffers, join the vectors in float32, and zero `clear`.

    Only the programs of the grid's first row do that. If MOMENTS, the others compute each step's
    statistics of the input term.
    """
    step, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if block == 0:
        at = step * BLOCK + tl.arange(0, BLOCK)
        inside = at < states
        r, row, column = at // of_one, at % of_one // STRIDE, at % STRIDE
        real = inside & (column < H)
        h = tl.load(h0 + r * h_r + row * h_b + column, mask=real, other=0.0)
        tl.store(hs + r * of_all + at % of_one, h.to(hs.dtype.element_ty), mask=inside)
        c = tl.load(c0 + r * c_r + row * c_b + column, mask=real, other=0.0)
        tl.store(c_n + at // STRIDE * H + column, c.to(tl.float32), mask=real)
        place = joined
        if BIAS:
            place = _widen(bias, place, at, 4 * UNITS)
        if GAMMA_X:
            place = _widen(gamma_x, place, at, 4 * UNITS)
        if GAMMA_H:
            place = _widen(gamma_h, place, at, 4 * UNITS)
        if GAMMA_C:
            place = _widen(gamma_c, place, at, UNITS)
        if BETA_C:
            place = _widen(beta_c, place, at, UNITS)
        tl.store(clear + at, tl.zeros((BLOCK,), tl.int32), mask=at < zeros)
    if MOMENTS:
        counts = (block > 0) & (step < steps)
        if counts:
            step_moments(
                wx, mean, var, lengths, step, block - 1, T, B, 4 * H, ROWS, COLUMNS, LENGTHS
            )


@triton.jit
def _transpose(a, out, rows, columns, TILE: tl.constexpr):
    """Write a ``[rows, columns]`` to out ``[columns, rows]``."""
    across = tl.cdiv(columns, TILE)
    for tile in range(tl.program_id(0), tl.cdiv(rows, TILE) * across, tl.num_programs(0)):
        row = tile // across * TILE + tl.arange(0, TILE)
        column = tile % across * TILE + tl.arange(0, TILE)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        x = tl.load(a + row[:, None] * columns + column[None, :], mask=inside)
        at = column[:, None] * rows + row[None, :]
        tl.store(out + at, tl.trans(x), mask=(column[:, None] < columns) & (row[None, :] < rows))


@triton.jit(do_not_specialize=["T", "B"])
def begin_backward(
    h0,  # [R, B, H]
    c0,
    var_x,  # [R, T, 4H] float32
    var_h,
    var_c,  # [R, T, H] float32
    weight,  # [R, 4H, H]
    new_h,  # like var_h
    new_c,
    transposed,  # [R, H, 4H]
    clear,  # float32, `zeros` elements
    T,
    B,
    H,
    zeros,
    limit,
    floor,
    COMPARE_H: tl.constexpr,
    COMPARE_C: tl.constexpr,
    CELL: tl.constexpr,
    MASKED: tl.constexpr,
    RAISE: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero `clear`. If RAISE, also `raise_variances`; if TRANSPOSE, also transpose W_h."""
    if RAISE:
        raise_variances(
            h0,
            c0,
            var_x,
            var_h,
            var_c,
            new_h,
            new_c,
            T,
            B,
            H,
            limit,
            floor,
            COMPARE_H,
            COMPARE_C,
            CELL,
            MASKED,
            BLOCK,
        )
    r = tl.program_id(1).to(tl.int64)
    if TRANSPOSE:
        _transpose(weight + r * 4 * H * H, transposed + r * 4 * H * H, 4 * H, H, TILE)
    if r == 0:
        for start in range(tl.program_id(0) * BLOCK, zeros, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(clear + at, tl.zeros((BLOCK,), tl.float32), mask=at < zeros)


@triton.jit
def last_states(
    h,  # rows of STRIDE elements; the last states of the first recurrence start at `begin`
    c,  # [R, B, H] float32
    h_n,  # [R, B, H]
    c_n,
    begin,
    of_all,  # from one recurrence to the next in h
    size,  # R * B * H
    of_one,  # B * H
    H: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the last states out of the recurrence's buffers, in the output's dtype."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    row = at % of_one // H
    hidden = tl.load(h + begin + at // of_one * of_all + row * STRIDE + at % H, mask=inside)
    tl.store(h_n + at, hidden.to(h_n.dtype.element_ty), mask=inside)
    tl.store(c_n + at, tl.load(c + at, mask=inside).to(c_n.dtype.element_ty), mask=inside)


@triton.jit
def _sum_rows(
    state, more, first, units, B, H, MORE: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr
):
    """Sum ``[R, B, H]`` over B, for UNITS of the R * H columns, starting at `first`."""
    unit = first + tl.arange(0, UNITS)
    result = tl.zeros((UNITS,), tl.float32)
    for begin in range(0, B, ROWS):
        row = (begin + tl.arange(0, ROWS))[:, None]
        at = unit[None, :] // H * B * H + row * H + unit[None, :] % H
        inside = (row < B) & (unit[None, :] < units)
        value = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
        if MORE:
            value += tl.load(more + at, mask=inside, other=0.0)
        result += tl.sum(value, axis=0)
    return result


@triton.jit(do_not_specialize=["B"])
def finish(
    sums,  # float32 [count]
    dh0,  # [R, B, H]
    dh,  # [R, B, H] float32, added to dh0 if MORE
    dc,
    out,  # [count], then twice [R, H]
    by_unit,  # [R, H, 4, H]
    by_gate,  # [R, 4, H, H]
    count,
    units,  # R * H
    B,
    H,
    MORE: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ORDER: tl.constexpr,
):
    """Convert gradients to the parameters' dtype, and reduce those of shared initial states.

    If ORDER, reorder the rows of the weight gradient from unit by unit to gate by gate.
    """
    program = tl.program_id(0).to(tl.int64)
    kind = out.dtype.element_ty
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(sums + at, mask=at < count).to(kind), mask=at < count)
    first = program * UNITS
    unit = first + tl.arange(0, UNITS)
    of_h = _sum_rows(dh0, dh, first, units, B, H, MORE, ROWS, UNITS)
    tl.store(out + count + unit, of_h.to(kind), mask=unit < units)
    of_c = _sum_rows(dc, dc, first, units, B, H, False, ROWS, UNITS)
    tl.store(out + count + units + unit, of_c.to(kind), mask=unit < units)
    if ORDER:
        for row in range(program, 4 * units, tl.num_programs(0)):
            r, gate, u = row // (4 * H), row % (4 * H) // H, row % H
            for begin in range(0, H, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                value = tl.load(by_unit + (r * 4 * H + 4 * u + gate) * H + column, mask=column < H)
                tl.store(
                    by_gate + row * H + column, value.to(by_gate.dtype.element_ty), mask=column < H
                )


@triton.jit
def _lerp(old, new, at, valid, seen, momentum, LARGE: tl.constexpr):
    """Like `torch.lerp`, but the first estimate replaces the old value."""
    a = tl.load(old + at, mask=valid, other=0.0)
    b = tl.load(new + at, mask=valid, other=0.0)
    result = b - (b - a) * (1.0 - momentum) if LARGE else a + momentum * (b - a)
    tl.store(old + at, tl.where(seen > 0, result, b), mask=valid)


@triton.jit
def _row(
    mean,
    var,
    new_mean,
    new_var,
    count,
    row,
    features,
    momentum,
    LARGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the averages of one row and its count of estimates."""
    seen = tl.load(count)
    tl.debug_barrier()  # all warps have read the count before one changes it
    for first in range(0, features, BLOCK):
        column = first + tl.arange(0, BLOCK)
        at = row * features + column
        _lerp(mean, new_mean, at, column < features, seen, momentum, LARGE)
        _lerp(var, new_var, at, column < features, seen, momentum, LARGE)
    tl.store(count, seen + 1)


@triton.jit(do_not_specialize=["steps_0", "steps_1", "steps_2"])
def average(
    mean_0,  # `steps_0` rows of `features_0` numbers in float32, like the next three
    var_0,
    new_mean_0,
    new_var_0,
    count_0,  # `steps_0` integers
    mean_1,
    var_1,
    new_mean_1,
    new_var_1,
    count_1,
    mean_2,
    var_2,
    new_mean_2,
    new_var_2,
    count_2,
    features_0,
    features_1,
    features_2,
    steps_0,
    steps_1,
    steps_2,
    momentum,
    LARGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Average minibatch statistics into the running averages. LARGE: momentum >= 0.5.

    A program owns a row: it reads and increments the count that all elements of the row share.
    """
    term, row = tl.program_id(1), tl.program_id(0).to(tl.int64)
    if term == 0:
        if row < steps_0:
            at = count_0 + row
            _row(mean_0, var_0, new_mean_0, new_var_0, at, row, features_0, momentum, LARGE, BLOCK)
    elif term == 1:
        if row < steps_1:
            at = count_1 + row
            _row(mean_1, var_1, new_mean_1, new_var_1, at, row, features_1, momentum, LARGE, BLOCK)
    elif row < steps_2:
        at = count_2 + row
        _row(mean_2, var_2, new_mean_2, new_var_2, at, row, features_2, momentum, LARGE, BLOCK)
