"""float32, bfloat16 and float16 against the plain equations in float64 on the same inputs."""

import contextlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recurrence_cases import (
    CALM,
    EPS32,
    NORMALIZED_BY_BATCH,
    OPS,
    RESULTS,
    STEPS,
    TOLERANCES,
    assert_same,
    call,
    calm,
    cases,
    cpu_step,
    differentiate,
    has_compiled_step,
    make_case,
)

LOW = [torch.bfloat16, torch.float16]
LENGTHS = [6, 3, 6, 5, 4, 6, 2, 6, 6, 5, 6, 6]
SETS = {
    "plain": {},
    "lengths": {"lengths": LENGTHS},
    "zoneout": {"lengths": LENGTHS, "zoneout": ("mask", 0.3)},
    "population": {"population": 4, "lengths": LENGTHS},
    "sequence": {"input_stats": "sequence", "lengths": LENGTHS},
    "padding counts": {
        "lengths": LENGTHS,
        "padding": "include",
        "input_stats": "sequence",
        "zoneout": (0.2, "mask"),
    },
}


def every_call(*ways):
    """All ops with their options, in each available implementation."""
    return pytest.mark.parametrize(
        ("op", "options", "how"),
        [
            pytest.param(op, SETS[name], how, id=f"{op}: {name}, {how}")
            for op in OPS
            for name in SETS
            if op in NORMALIZED_BY_BATCH or name in ("plain", "lengths", "zoneout")
            for how in ways
            if has_compiled_step(op) or how != "compiled"
        ],
    )


both_steps = pytest.mark.parametrize(
    ("op", "step"),
    [(op, step) for op in OPS for step in STEPS if has_compiled_step(op) or step == "torch"],
)


@contextlib.contextmanager
def running(how):
    """The reference, or the fused operator with one of its steps. Returns the backend's name."""
    if how == "reference":
        yield how
    else:
        with cpu_step(how):
            yield "cpu"


def case_of(op, options):
    # Twelve rows of random values: variances are of order one, so no normalization magnifies the
    # rounding by more than a few times.
    return make_case(op, 6, 12, 8, seed=2, **options)


def assert_rounded(name, actual, expected, units):
    """Compare within one rounding to the result's dtype of what float32 arithmetic gives.

    units: how many units in the last place of float32 the arithmetic may lose, relative to the
    largest element.
    """
    half = torch.finfo(actual.dtype).eps / 2 if actual.dtype != torch.float32 else 0.0
    tiny = torch.finfo(actual.dtype).smallest_normal * half  # of the numbers below the normal ones
    scale = max(1.0, expected.abs().max().item())
    error = (actual.double() - expected).abs()
    allowed = half * expected.abs() + units * EPS32 * scale + tiny
    worst = (error - allowed).max().item()
    assert worst <= 0, f"{name}: beyond the allowed error by {worst:.3g}"


# Each of some ten thousand roundings is carried through at most six steps. Their signs are random:
# the total is below 8 units for results, 32 for gradients (measured over seeds); a wrong formula is
# off by millions.
RESULT_UNITS, GRADIENT_UNITS = 32, 128


@every_call("reference", *STEPS)
def test_float32(op, options, how):
    case = case_of(op, options).to(torch.float32)
    with running(how) as backend:
        results, gradients = differentiate(case, backend)
    expected, expected_gradients = differentiate(case.to(torch.float64), "reference")
    for name, want in expected.items():
        assert (results[name] is None) == (want is None)
        if want is not None:
            assert results[name].dtype == torch.float32, name
            assert_rounded(name, results[name], want, RESULT_UNITS)
    for name, want in expected_gradients.items():
        assert gradients[name].dtype == torch.float32, name
        assert_rounded(f"gradient of {name}", gradients[name], want, GRADIENT_UNITS)


@pytest.mark.no_cover
@both_steps
@given(data=st.data())
def test_float32_of_any_shape_and_options(op, step, data):
    case = data.draw(cases(op, eps=(CALM,))).to(torch.float32)
    with cpu_step(step):
        results, gradients = differentiate(case, "cpu")
    expected, expected_gradients = differentiate(case.to(torch.float64), "reference")
    allowed, allowed_gradients = TOLERANCES[torch.float32]
    assert_same(results, expected, allowed)
    assert_same(gradients, expected_gradients, allowed_gradients)


@pytest.mark.parametrize("H", [16, 37])
@both_steps
def test_float32_of_a_size_that_several_threads_share(op, step, H):
    options = {"population": 3} if H == 16 and op in NORMALIZED_BY_BATCH else {}
    case = make_case(op, 5, 150, H, lengths="random", **options, **calm(op)).to(torch.float32)
    with cpu_step(step):
        results, gradients = differentiate(case, "cpu")
    expected, expected_gradients = differentiate(case.to(torch.float64), "reference")
    allowed, allowed_gradients = TOLERANCES[torch.float32]
    assert_same(results, expected, allowed)
    assert_same(gradients, expected_gradients, allowed_gradients)


@pytest.mark.parametrize("first", STEPS)
@pytest.mark.parametrize(
    ("op", "options"),
    [
        *(("bn_lstm", SETS[name]) for name in ("plain", "population", "sequence")),
        *(("ln_lstm", SETS[name]) for name in ("plain", "lengths")),
    ],
)
def test_the_backward_pass_of_one_step_may_follow_the_forward_pass_of_the_other(op, options, first):
    case = case_of(op, options).to(torch.float32)
    _, expected = differentiate(case, "cpu")
    leaves = {name: v.clone().requires_grad_() for name, v in case.present().items()}
    with cpu_step(first):
        results = call(case.with_tensors(**leaves), "cpu")
    with cpu_step(STEPS[1 - STEPS.index(first)]):
        torch.autograd.backward([results[k] for k in case.cotangents], [*case.cotangents.values()])
    found = {name: v.grad for name, v in leaves.items()}
    assert_same(found, expected, GRADIENT_UNITS * EPS32)


@pytest.mark.parametrize("dtype", LOW)
@every_call("reference", *STEPS)
def test_half_precision_results_are_rounded_once(op, options, dtype, how):
    """States and sums are float32: only the inputs and the results are rounded."""
    case = case_of(op, options).to(dtype)
    with torch.no_grad(), running(how) as backend:
        results = call(case, backend)
    expected = call(case.to(torch.float64), "reference")
    for name, want in expected.items():
        assert (results[name] is None) == (want is None)
        if want is not None:
            kept = dtype if name in RESULTS[op] else torch.float32
            assert results[name].dtype == kept, name
            assert_rounded(name, results[name], want, RESULT_UNITS)


@pytest.mark.parametrize("parameters", [None, torch.float32], ids=["low", "float32 parameters"])
@pytest.mark.parametrize("dtype", LOW)
@every_call(*STEPS)
def test_half_precision_gradients_are_rounded_once(op, options, dtype, parameters, how):
    case = case_of(op, options).to(dtype)
    if parameters is not None:  # as under autocast: low-precision input, the rest in float32
        wide = {k: v.to(parameters) for k, v in case.present().items() if k != "wx"}
        case = replace(case, tensors=case.tensors | wide)
    with running(how) as backend:
        results, gradients = differentiate(case, backend)
    expected, expected_gradients = differentiate(case.to(torch.float64), "reference")
    for name in case.cotangents:
        assert results[name].dtype == dtype
        assert_rounded(name, results[name], expected[name], RESULT_UNITS)
    for name, want in expected_gradients.items():
        assert gradients[name].dtype == case.tensors[name].dtype, name
        assert_rounded(f"gradient of {name}", gradients[name], want, GRADIENT_UNITS)
