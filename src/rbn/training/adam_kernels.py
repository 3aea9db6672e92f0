"""Kernels over a list of tensors. Each program processes a part of one tensor."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _of_program(values, FIRST: tl.constexpr, program):
    """The entry of `values` for the tensor that this program works on."""
    value = values[0]
    for k in tl.static_range(1, len(FIRST)):
        value = tl.where(program >= FIRST[k], values[k], value)
    return value


@triton.jit
def norms(
    tensors,  # float32, contiguous
    result,  # one for each program
    FIRST: tl.constexpr,  # each tensor's first program
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Each program computes the norm of ROUNDS * BLOCK numbers."""
    program = tl.program_id(0)
    tensor = _of_program(tensors, FIRST, program)
    size = _of_program(SIZES, FIRST, program)
    start = (program - _of_program(FIRST, FIRST, program)).to(tl.int64) * ROUNDS * BLOCK
    squares = tl.zeros([BLOCK], tl.float32)
    if start + ROUNDS * BLOCK <= size:  # unmasked loads are wider
        for k in tl.static_range(ROUNDS):
            x = tl.load(tensor + start + k * BLOCK + tl.arange(0, BLOCK))
            squares += x * x
    else:
        for k in tl.static_range(ROUNDS):
            at = start + k * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(tensor + at, mask=at < size, other=0.0)
            squares += x * x
    tl.store(result + program, tl.sqrt(tl.sum(squares)))


@triton.jit
def _one_less_power(step, LOG: tl.constexpr):
    """1 - beta ** step, with LOG = log(beta). A series keeps small results accurate."""
    x = step * LOG
    small = tl.maximum(x, -0.5)
    series = 1.0
    for k in tl.static_range(8, 1, -1):
        series = 1.0 + small / k * series
    return tl.where(x > -0.5, -small * series, 1.0 - tl.exp(x))


@triton.jit
def _adam(
    at,
    size,  # None if the entire block is inside the tensor
    parameter,
    gradient,
    mean,
    square,
    step,
    rate,
    divisor,
    skip,
    RULE: tl.constexpr,
    RATE_TENSOR: tl.constexpr,
    DIVIDES: tl.constexpr,
    SKIPS: tl.constexpr,
):
    BETA1: tl.constexpr = RULE[0]
    BETA2: tl.constexpr = RULE[1]
    mask = None if size is None else at < size
    other = None if size is None else 0.0
    # Start the slow loads first.
    g = tl.load(gradient + at, mask=mask, other=other)
    m = tl.load(mean + at, mask=mask, other=other)
    v = tl.load(square + at, mask=mask, other=other)
    p = tl.load(parameter + at, mask=mask, other=other)
    n = tl.load(step)
    lr = tl.load(rate).to(tl.float32) if RATE_TENSOR else rate
    if DIVIDES:
        g /= tl.load(divisor)
    proceed = True
    if SKIPS:
        proceed = tl.load(skip) == 0
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    root = tl.sqrt(_one_less_power(n, RULE[3]))
    if RULE[5] != 0:
        p -= lr * RULE[5] * p
    p -= lr / _one_less_power(n, RULE[2]) * m / (tl.sqrt(v) / root + RULE[4])
    if proceed:
        tl.store(mean + at, m, mask=mask)
        tl.store(square + at, v, mask=mask)
        tl.store(parameter + at, p, mask=mask)


@triton.jit
def update(
    parameters,  # float32, contiguous, like all tuples of tensors
    gradients,
    means,
    squares,
    steps,  # float32, the number of this step, from 1
    rate,  # a number or a pointer
    divisor,  # divides the gradients
    skip,  # 1: change nothing
    FIRST: tl.constexpr,
    SIZES: tl.constexpr,
    RULE: tl.constexpr,  # both betas, their logarithms, epsilon, decay
    RATE_TENSOR: tl.constexpr,
    DIVIDES: tl.constexpr,
    SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """An Adam step; each program updates BLOCK numbers."""
    program = tl.program_id(0)
    size = _of_program(SIZES, FIRST, program)
    start = (program - _of_program(FIRST, FIRST, program)).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    p, g = _of_program(parameters, FIRST, program), _of_program(gradients, FIRST, program)
    m, v = _of_program(means, FIRST, program), _of_program(squares, FIRST, program)
    step = _of_program(steps, FIRST, program)
    if start + BLOCK <= size:  # unmasked loads are wider
        _adam(
            at,
            None,
            p,
            g,
            m,
            v,
            step,
            rate,
            divisor,
            skip,
            RULE,
            RATE_TENSOR,
            DIVIDES,
            SKIPS,
        )
    else:
        _adam(
            at,
            size,
            p,
            g,
            m,
            v,
            step,
            rate,
            divisor,
            skip,
            RULE,
            RATE_TENSOR,
            DIVIDES,
            SKIPS,
        )
