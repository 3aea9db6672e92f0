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
    reason="the kernels for wide layers have instructions of Hopper only",
)
needs_clusters = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="there are clusters of blocks from Hopper on",
)


def compare(op, shape, dtype, options):
    """Outputs and all gradients of random arguments with float64's."""
    case = make_case(op, *shape, fresh_seed(), dtype=dtype, **calm(op), **options)
    with poisoned_memory():
        found = differentiate(case.on("cuda"), "gpu")
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[dtype])
    for key, want in expected[1].items():
        error = (found[1][key].double().cpu() - want).norm() / want.norm().clamp(min=1)
        assert error <= 8 * UNITS[dtype], f"gradient of {key}: {error:.2g}"


def same_bits(case, times):
    """The same results and gradients, called again and again."""
    first = differentiate(case, "gpu")
    for _ in range(times):
        again = differentiate(case, "gpu")
        for one, other in zip(first, again, strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]), name
