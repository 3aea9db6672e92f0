"""The GPU's kernels against the reference: on a GPU, or on the CPU by Triton's interpreter.

The interpreter runs the programs of a launch one after another, so the host launches each step by
itself; all but the barrier between the steps is the code that runs on the card.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_cases import (
    CALM,
    TOLERANCES,
    assert_same,
    call,
    calm,
    cases,
    differentiate,
    make_case,
)

pytest.importorskip("triton", reason="the GPU's kernels need triton")

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

OPS = ("bn_lstm", "lstm")
OPTIONS = {
    "plain": {},
    "lengths": {"lengths": [5, 1, 3]},
    "padding counted": {"lengths": [2, 5, 1], "padding": "include"},
    "sequencewise": {"input_stats": "sequence", "lengths": [5, 4, 1]},
    "sequencewise, padding counted": {
        "input_stats": "sequence",
        "lengths": [5, 4, 1],
        "padding": "include",
    },
    "population": {"population": (2, 7, 5)},
    "zoneout masks": {"zoneout": ("mask", "mask")},
    "zoneout rates": {"zoneout": (0.2, 0.3)},
    "zoneout and lengths": {"zoneout": ("mask", 0.3), "lengths": [2, 5, 3]},
    "joint": {"absent": ("gamma_x", "bias")},
    "raw output": {"absent": ("gamma_c", "beta_c")},
    "passed on": {"pass_normalized_cell": True},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = ("plain", "lengths", "zoneout masks", "zoneout rates", "zoneout and lengths")


@pytest.fixture(autouse=True, scope="module")
def _exact_products():
    """Products in float32 as it is, not in tf32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def compare(case):
    """Results and gradients in float32 beside those of the reference in float64."""
    found = differentiate(case.to(torch.float32).on(DEVICE), "gpu")
    expected = differentiate(case.to(torch.float32).to(torch.float64), "reference")
    results, gradients = TOLERANCES[torch.float32]
    assert_same(found[0], expected[0], results)
    assert_same(found[1], expected[1], gradients)


@pytest.mark.parametrize(
    ("op", "name"),
    [("bn_lstm", name) for name in OPTIONS] + [("lstm", name) for name in PLAIN],
)
def test_every_option(op, name):
    compare(make_case(op, 5, 3, 6, **calm(op), **OPTIONS[name]))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 3), (3, 17, 5), (4, 5, 33), (2, 3, 70)])
@pytest.mark.parametrize("op", OPS)
def test_shapes(op, shape):
    compare(make_case(op, *shape, **calm(op)))


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=25)
@given(data=st.data())
def test_random_calls(op, data):
    compare(data.draw(cases(op, eps=(CALM,))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_half_precision(op, dtype):
    """Products of rounded values; states and statistics in float32."""
    case = make_case(op, 6, 9, 7, dtype=dtype, **calm(op))
    found = differentiate(case.on(DEVICE), "gpu")
    expected = differentiate(case.to(torch.float64), "reference")
    unit = torch.finfo(dtype).eps
    assert_same(found[0], expected[0], 4 * unit)
    assert_same(found[1], expected[1], 16 * unit)


@pytest.mark.parametrize("op", OPS)
def test_nothing_is_kept_without_a_gradient(op):
    case = make_case(op, 4, 3, 5, dtype=torch.float32, **calm(op))
    with torch.no_grad():
        found = call(case.on(DEVICE), "gpu")
    assert_same(found, call(case.to(torch.float64), "reference"), TOLERANCES[torch.float32][0])
