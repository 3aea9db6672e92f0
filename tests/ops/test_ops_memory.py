"""Memory use of the fused operator: strides, uninitialised memory, unchanged inputs."""

from dataclasses import replace

import pytest
import torch
from recurrence_cases import (
    NORMALIZED_BY_BATCH,
    OPS,
    RESULT_TOLERANCE,
    TOLERANCES,
    assert_same,
    call,
    calm,
    differentiate,
    make_case,
    poisoned_memory,
)

LENGTHS = [4, 2, 1, 4, 3]
SETS = {
    "batch": {},
    "lengths": {"lengths": LENGTHS, "zoneout": ("mask", 0.3)},
    "population": {"population": 2},
    "padding counts": {"lengths": LENGTHS, "padding": "include", "zoneout": (0.3, "mask")},
    "sequence": {"input_stats": "sequence"},
    "sequence, padding counts": {
        "lengths": LENGTHS,
        "padding": "include",
        "input_stats": "sequence",
    },
}
CALLS = [
    pytest.param(op, options | calm(op) | {"dtype": dtype}, id=f"{op}: {name}, {dtype}")
    for op in OPS
    for name, options in SETS.items()
    if op in NORMALIZED_BY_BATCH or name in ("batch", "lengths")
    for dtype in (torch.float32, torch.float64)
]
every_call = pytest.mark.parametrize(("op", "options"), CALLS)


def case_of(op, options):
    return make_case(op, 4, 5, 3, **options)


def truth(case):
    """Results and gradients of a call in float64."""
    return differentiate(case.to(torch.float64), "reference")


def assert_correct(case, expected):
    results, gradients = TOLERANCES[case.tensors["wx"].dtype]
    found = differentiate(case, "cpu")
    assert_same(found[0], expected[0], results)
    assert_same(found[1], expected[1], gradients)


def assert_equal(actual, expected):
    assert_same(actual, expected, 0.0)


# Strides ---------------------------------------------------------------------------------------


def apart(value):
    """The same values with other (NaN) elements between them in memory."""
    twice = torch.full((*value.shape, 2), float("nan"), dtype=value.dtype)
    twice[..., 0] = value
    return twice[..., 0]


def transposed(value):
    """The same values with the first two dimensions swapped in memory."""
    return value if value.dim() < 2 else value.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("restride", [apart, transposed])
@every_call
def test_strides_of_every_argument(op, options, restride):
    case = case_of(op, options)
    strided = {name: restride(value) for name, value in case.present().items()}
    assert not strided["wx"].is_contiguous()
    expected = truth(case)
    assert_correct(case.with_tensors(**strided), expected)
    for name, value in strided.items():  # one at a time, in case they compensate each other
        assert_correct(case.with_tensors(**{name: value}), expected)


@every_call
def test_expanded_arguments(op, options):
    """Stride 0: one state for all rows, one scale for all features."""
    case = case_of(op, options)
    expanded = {}
    for name, value in case.present().items():
        if name not in ("wx", "weight_hh", "h0"):  # h0 identical in all rows is a separate case
            expanded[name] = value[:1].expand_as(value)
            assert 0 in expanded[name].stride()
    plain = case.with_tensors(**{name: value.clone() for name, value in expanded.items()})
    assert_correct(case.with_tensors(**expanded), truth(plain))


@every_call
def test_expanded_h0(op, options):
    case = case_of(op, options)
    h0 = case.tensors["h0"][:1]
    repeated = case.with_tensors(h0=h0.repeat(5, 1))
    for found, expected in zip(
        differentiate(case.with_tensors(h0=h0.expand(5, -1)), "cpu"),
        differentiate(repeated, "cpu"),
        strict=True,
    ):
        assert_equal(found, expected)


@every_call
def test_expanded_and_strided_cotangents(op, options):
    """`output.sum()` passes back a gradient with stride 0."""
    case = case_of(op, options)
    for restride in (lambda v: v.new_tensor(0.7).expand_as(v), apart, transposed):
        strided = {name: restride(value) for name, value in case.cotangents.items()}
        plain = {name: value.contiguous() for name, value in strided.items()}
        assert_correct(replace(case, cotangents=strided), truth(replace(case, cotangents=plain)))


@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_strides_of_the_options(op):
    case = case_of(op, {"population": 3, "lengths": LENGTHS, "zoneout": ("mask", "mask")})
    options = {}
    for name, value in case.options.items():
        if name == "population":
            options[name] = type(value)(*(None if p is None else apart(p) for p in value))
        elif isinstance(value, torch.Tensor):
            options[name] = torch.stack([value, value], -1)[..., 0]
            assert not options[name].is_contiguous()
    for found, expected in zip(
        differentiate(case.with_options(**options), "cpu"),
        differentiate(case, "cpu"),
        strict=True,
    ):
        assert_same(found, expected, RESULT_TOLERANCE)


# Memory ----------------------------------------------------------------------------------------


@every_call
def test_uninitialised_memory_is_never_read(op, options):
    case = case_of(op, options)
    expected, expected_gradients = differentiate(case, "cpu")
    with poisoned_memory():
        results, gradients = differentiate(case, "cpu")
        with torch.no_grad():
            inference = call(case, "cpu")
    assert_equal(results, expected)
    assert_equal(gradients, expected_gradients)
    assert_equal(inference, expected)
    for value in (*results.values(), *gradients.values(), *inference.values()):
        assert value is None or value.isfinite().all()


@every_call
def test_arguments_are_left_alone(op, options):
    case = case_of(op, options)

    def tensors():
        population = case.options.get("population") or ()
        given = [*case.present().values(), *case.cotangents.values(), *population]
        given += [v for v in case.options.values() if isinstance(v, torch.Tensor)]
        return [v for v in given if v is not None]

    before = [v.clone() for v in tensors()]
    differentiate(case, "cpu")
    with torch.no_grad():
        call(case, "cpu")
    assert all(map(torch.equal, tensors(), before))


@every_call
def test_backward_twice(op, options):
    """The backward pass does not change saved tensors."""
    case = case_of(op, options)
    leaves = {name: v.clone().requires_grad_() for name, v in case.present().items()}
    results = call(case.with_tensors(**leaves), "cpu")
    used, cotangents = zip(*((results[k], v) for k, v in case.cotangents.items()), strict=True)
    kept = [value.clone() for value in used]

    def gradients(retain):
        return torch.autograd.grad(used, list(leaves.values()), cotangents, retain_graph=retain)

    first, second = gradients(True), gradients(False)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, used, kept))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(False)


@every_call
def test_repetitions_are_bit_identical(op, options):
    case = case_of(op, options)
    expected, expected_gradients = differentiate(case, "cpu")
    for _ in range(3):
        results, gradients = differentiate(case, "cpu")
        assert_equal(results, expected)
        assert_equal(gradients, expected_gradients)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_call
def test_results_do_not_depend_on_whether_a_gradient_is_wanted(op, options, mode):
    """Without gradients, the next step reuses a step's buffers."""
    case = case_of(op, options)
    expected, _ = differentiate(case, "cpu")
    with mode():
        assert_equal(call(case, "cpu"), expected)
    assert_equal(call(case, "cpu"), expected)  # nothing requires a gradient


@pytest.mark.parametrize("op", OPS)
def test_a_changed_output_is_noticed(op):
    """The backward pass uses the output, so changing it in place must raise an error."""
    case = case_of(op, {})
    wx = case.tensors["wx"].clone().requires_grad_()
    output = call(case.with_tensors(wx=wx), "cpu")["output"]
    with pytest.raises(RuntimeError, match=r"in-?place"):
        output.mul_(2).sum().backward()
