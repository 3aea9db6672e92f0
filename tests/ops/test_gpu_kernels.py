"""The GPU's kernels against the reference: on a GPU, or on the CPU by Triton's interpreter.

The interpreter runs the programs of a launch one after another, so the host launches each step by
itself; all but the barrier between the steps is the code that runs on the card.
"""

import copy
import importlib

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
    constant_beginning,
    differentiate,
    make_case,
    shared,
)

import rbn

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


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in rows that fill a tile
@pytest.mark.parametrize("constant", [1, 4])
def test_rounding_is_not_enlarged_by_constant_steps(constant):
    case = constant_beginning("bn_lstm", constant, 8, 12, 5).to(torch.float32)
    _, found = differentiate(case.on(DEVICE), "gpu")
    _, expected = differentiate(case.to(torch.float64), "reference")
    assert_same(shared(found), shared(expected), 2e-3)  # as on the CPU
    assert found["h0"].abs().max() == 0


@pytest.mark.parametrize("options", [{}, {"input_stats": "sequence"}, {"absent": ("gamma_c",)}])
def test_small_recurrent_weights_have_their_gradient(options):
    case = make_case("bn_lstm", 4, 5, 3, **options)
    weight = case.tensors["weight_hh"] * 1e-6
    case = case.with_tensors(weight_hh=weight).to(torch.float32)
    _, found = differentiate(case.on(DEVICE), "gpu")
    _, expected = differentiate(case.to(torch.float64), "reference")
    assert expected["weight_hh"].abs().max() > 1
    assert_same(found, expected, 2e-4)  # as on the CPU


@pytest.mark.parametrize("op", OPS)
def test_nothing_is_kept_without_a_gradient(op):
    case = make_case(op, 4, 3, 5, dtype=torch.float32, **calm(op))
    with torch.no_grad():
        found = call(case.on(DEVICE), "gpu")
    assert_same(found, call(case.to(torch.float64), "reference"), TOLERANCES[torch.float32][0])


@pytest.mark.parametrize("options", [{}, {"lengths": [4, 1, 2], "padding": "include"}])
def test_the_operator(options, monkeypatch):
    """Its schema, its fake implementation and its autograd formula, as PyTorch checks them."""
    # With 8 units the saved buffers have no unwritten room, which would differ from call to call.
    case = make_case("bn_lstm", 4, 3, 8, dtype=torch.float32, **calm("bn_lstm"), **options)
    leaves = {name: v.requires_grad_() for name, v in case.on(DEVICE).present().items()}
    gpu, found = importlib.import_module("rbn.ops.gpu"), []
    run = gpu.lstm_op
    monkeypatch.setattr(gpu, "lstm_op", lambda *args: found.append(args) or run(*args))
    call(case.on(DEVICE).with_tensors(**leaves), "gpu")
    (args,) = found
    # A compiled call may differ from this one in the last bits.
    torch.library.opcheck(torch.ops.rbn.gpu_lstm.default, args, rtol=1e-4, atol=1e-5)


def test_compiled_as_one_graph():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 6, max_length=4).to(DEVICE)
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 5, 3, device=DEVICE)

    def loss(module, x):
        with rbn.backend("gpu"):
            return module(x)[0].square().mean()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(layer, x).backward()
    loss(twin, x).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad)


def test_several_recurrences_at_once():
    """Two directions, or models, in one launch give the numbers of each alone."""
    cases_ = [
        make_case("bn_lstm", 4, 5, 6, seed, dtype=torch.float32, **calm("bn_lstm")).on(DEVICE)
        for seed in (0, 1)
    ]
    alone = [differentiate(case, "gpu") for case in cases_]
    leaves = [
        torch.stack([case.tensors[name] for case in cases_]).requires_grad_()
        for name in cases_[0].tensors
    ]
    options = ([], None, None, 0.0, 0.0, "batch", CALM, "step", "exclude", False, True)
    results = importlib.import_module("rbn.ops.gpu").lstm_op(*leaves, None, *options)
    for r, (found, _) in enumerate(alone):
        for name, value in zip(("output", "h_n", "c_n"), results, strict=False):
            torch.testing.assert_close(value[r], found[name])
    cotangents = [
        torch.stack([case.cotangents[n] for case in cases_]) for n in ("output", "h_n", "c_n")
    ]
    grads = torch.autograd.grad(results[:3], leaves, cotangents)
    for r, (_, found) in enumerate(alone):
        for name, grad in zip(found, grads, strict=True):
            torch.testing.assert_close(grad[r], found[name], rtol=1e-4, atol=1e-4)
