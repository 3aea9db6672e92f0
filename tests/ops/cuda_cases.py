"""Comparisons of real launches that the tests of the kernels in CUDA C++ have in common."""

import pytest
import torch
from recurrence_cases import (
    assert_same,
    calm,
    differentiate,
    fresh_seed,
    make_case,
    poisoned_memory,
    scale_of,
)

# A product of n terms rounded to a unit u is off by about u * sqrt(n) of a term, that is by u of
# the sum here, where weights have the size n ** -0.5; a step adds a few such errors, a gradient one
# for each step it passes. tf32 has the 10 bits of float16.
UNITS = {torch.float32: 2**-11, torch.float16: 2**-11, torch.bfloat16: 2**-8}
HALVES = (torch.float16, torch.bfloat16)
OPTIONS = {
    "plain": {},
    "lengths": {"lengths": "random"},
    "sequencewise": {"input_stats": "sequence", "lengths": "random"},
    "population": {"population": 2},
    "raw output": {"absent": ("gamma_c", "bias")},
}

on_a_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the grid kernels have instructions of Hopper only",
)
needs_clusters = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="there are clusters of blocks from Hopper on",
)


def at_least_1(gradients):
    """What a gradient's error is relative to: its norm, unless that is small."""
    return {key: max(1, value.norm()) for key, value in gradients.items()}


def at_least_a_hundredth(gradients):
    """The same for gradients of any size: of one row, or of a constant state, they cancel."""
    largest = max(value.norm() for value in gradients.values())
    return {key: max(value.norm(), 0.01 * largest) for key, value in gradients.items()}


def moved_by_rounding(case, unit, scales):
    """By how many units float64's results and gradients move with weights and first states.

    Each of those one unit larger or smaller, at random, four times: the largest. It stands for the
    roundings of a step's product.
    """
    g = torch.Generator().manual_seed(0)

    def moved(value):
        return value * (1 + unit * (2 * torch.randint(2, value.shape, generator=g) - 1))

    case = case.to(torch.float64)
    results, gradients = differentiate(case, "reference")
    scale, most = scales(gradients), 0.0
    for _ in range(4):
        others = {name: moved(case.tensors[name]) for name in ("weight_hh", "h0")}
        found = differentiate(case.with_tensors(**others), "reference")
        for key, want in results.items():
            if want is not None and want.numel():
                error = (found[0][key] - want).abs().max() / scale_of(want)
                most = max(most, error.item() / unit / 2)  # twice as much is allowed
        for key, want in gradients.items():
            most = max(most, ((found[1][key] - want).norm() / scale[key]).item() / unit)
    return most


def random_case(op, shape, dtype, change=lambda case: case, scales=at_least_1, **options):
    """Random arguments; those of a few rows are drawn again while they are ill-conditioned.

    Two rows whose products nearly agree are divided by nearly nothing, and any rounding is
    enlarged: beyond what is allowed in a fifth of all draws where a first state is 100 times as
    large. Of 900 cases drawn like this, rounding the operands moved none by more than 2.7 units.
    """
    while True:
        case = change(make_case(op, *shape, fresh_seed(), dtype=dtype, **calm(op), **options))
        if shape[1] > 16 or moved_by_rounding(case, UNITS[dtype], scales) <= 3:
            return case


def compare(op, shape, dtype, options, change=lambda case: case, scales=at_least_1):
    """Outputs and all gradients of random arguments with float64's."""
    case = random_case(op, shape, dtype, change, scales, **options)
    with poisoned_memory():
        found = differentiate(case.on("cuda"), "gpu")
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[dtype])
    scale = scales(expected[1])
    for key, want in expected[1].items():
        error = (found[1][key].double().cpu() - want).norm() / scale[key]
        assert error <= 8 * UNITS[dtype], f"gradient of {key}: {error:.2g}"


def same_bits(case, times):
    """The same results and gradients, called again and again."""
    first = differentiate(case, "gpu")
    for _ in range(times):
        again = differentiate(case, "gpu")
        for one, other in zip(first, again, strict=True):
            for name, value in one.items():
                assert value is other[name] is None or torch.equal(value, other[name]), name
