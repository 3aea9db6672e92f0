"""Comparisons with real launches, for the tests of the CUDA C++ kernels."""

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
from torch.utils._python_dispatch import TorchDispatchMode

# A product of n terms rounded to a unit u is off by about u * sqrt(n) of a term, that is by u of
# the sum here, where weights have the size n ** -0.5; a step adds a few such errors, a gradient one
# for each step it passes. tf32 has the 10 bits of float16.
UNITS = {torch.float32: 2**-11, torch.float16: 2**-11, torch.bfloat16: 2**-8}
TANH = 2**-11  # the largest error of the kernels' approximate tanh, relative to its value
HALVES = (torch.float16, torch.bfloat16)
OPTIONS = {
    "plain": {},
    "lengths": {"lengths": "random"},
    "few rows": {"lengths": "random", "min_rows": 9},
    "sequencewise": {"input_stats": "sequence", "lengths": "random"},
    "population": {"population": 2},
    "raw output": {"absent": ("gamma_c", "bias")},
}

on_a_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_card(test):
    """Marks a test that runs on a GPU."""
    for mark in on_a_card:
        test = mark(test)
    return test


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the grid kernels have instructions of Hopper only",
)
needs_clusters = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="there are clusters of blocks from Hopper on",
)


def at_least_1(gradients):
    """The reference for a gradient's relative error: its norm, unless that is small."""
    return {key: max(1, value.norm()) for key, value in gradients.items()}


def at_least_a_hundredth(gradients):
    """The same for gradients of any size: those of one row, or of a constant state, cancel."""
    largest = max(value.norm() for value in gradients.values())
    return {key: max(value.norm(), 0.01 * largest) for key, value in gradients.items()}


class InexactTanh(TorchDispatchMode):
    """Inside the ``with`` block, each tanh has an error, and each sigmoid that of its tanh."""

    def __init__(self, moved):
        super().__init__()
        self.moved = moved

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.tanh.default:
            return self.moved(torch.tanh(*args), TANH)
        if func is torch.ops.aten.sigmoid.default:
            return 0.5 + 0.5 * self.moved(torch.tanh(0.5 * args[0]), TANH)
        return func(*args, **(kwargs or {}))


def moved_by_rounding(case, unit, scales):
    """By how many units float64's results and gradients move with what the kernels round.

    That is weights and first states, by a unit, which stand for the roundings of a step's product,
    and each tanh: all larger or smaller at random, four times. Returns the largest.
    """
    g = torch.Generator().manual_seed(0)

    def moved(value, by=unit):
        return value * (1 + by * (2 * torch.randint(2, value.shape, generator=g) - 1))

    case = case.to(torch.float64)
    results, gradients = differentiate(case, "reference")
    scale, most = scales(gradients), 0.0
    for _ in range(4):
        others = {name: moved(case.tensors[name]) for name in ("weight_hh", "h0")}
        with InexactTanh(moved):
            found = differentiate(case.with_tensors(**others), "reference")
        for key, want in results.items():
            if want is not None and want.numel():
                error = (found[0][key] - want).abs().max() / scale_of(want)
                most = max(most, error.item() / unit / 2)  # twice as much is allowed
        for key, want in gradients.items():
            most = max(most, ((found[1][key] - want).norm() / scale[key]).item() / unit)
    return most


def random_case(op, shape, dtype, change=lambda case: case, scales=at_least_1, **options):
    """Random arguments, and by how many units their gradients may differ from float64's.

    Two rows whose products nearly agree are divided by nearly nothing, and any rounding is
    enlarged. So cases of few rows are drawn again while rounding moves them by more than 4 units,
    and may differ by 3 times as much as that moves them. The errors of the approximate tanh are
    alike for close arguments and may add up: with all of one sign, or as a wave of the argument,
    float64's gradients moved up to 2.1 times as far as with random signs in 77 draws of two rows,
    and those of one call on an H200 2.9 times (13 units, before this bound).
    """
    while True:
        case = change(make_case(op, *shape, fresh_seed(), dtype=dtype, **calm(op), **options))
        if shape[1] > 16:
            return case, 8
        moved = moved_by_rounding(case, UNITS[dtype], scales)
        if moved <= 4:
            return case, max(8, 3 * moved)


def compare(op, shape, dtype, options, change=lambda case: case, scales=at_least_1):
    """Outputs and all gradients of random arguments with float64's."""
    case, units = random_case(op, shape, dtype, change, scales, **options)
    with poisoned_memory():
        found = differentiate(case.on("cuda"), "gpu")
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 2 * units * UNITS[dtype])
    scale = scales(expected[1])
    for key, want in expected[1].items():
        error = (found[1][key].double().cpu() - want).norm() / scale[key]
        assert error <= units * UNITS[dtype], f"gradient of {key}: {error:.2g}"


def compare_emulated(case, dtype):
    """Results and all gradients of kernels emulated on the CPU with float64's."""
    with poisoned_memory():
        found = differentiate(case.to(dtype), "gpu")
    expected = differentiate(case.to(dtype).to(torch.float64), "reference")
    same_as_float64(found, expected, dtype)


def same_as_float64(found, expected, dtype):
    """Results and gradients of emulated kernels beside those of the reference."""
    assert_same(found[0], expected[0], 16 * UNITS[dtype])
    for key, want in expected[1].items():
        error = (found[1][key].double() - want).norm() / max(1, want.norm())
        assert error <= 8 * UNITS[dtype], f"gradient of {key}: {error:.2g}"


def same_bits(case, times):
    """The same results and gradients, called again and again."""
    first = differentiate(case, "gpu")
    for _ in range(times):
        again = differentiate(case, "gpu")
        for one, other in zip(first, again, strict=True):
            for name, value in one.items():
                assert value is other[name] is None or torch.equal(value, other[name]), name
