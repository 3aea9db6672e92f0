"""The hand-written backward passes against finite differences."""

import pytest
import torch
from recurrence_cases import BACKENDS, OPS, RESULTS, call, make_case
from torch.autograd import gradcheck, gradgradcheck

LENGTHS = [3, 1, 3]
ALL = ("bias", "gamma_x", "gamma_c", "beta_c")

BATCH_NORMALIZED = {
    "batch": {},
    "population": {"population": 2},
    "lengths": {"lengths": LENGTHS},
    "lengths, padding counts": {"lengths": LENGTHS, "padding": "include"},
    "lengths, population": {"lengths": LENGTHS, "population": (1, 2, 3)},
    "sequence": {"input_stats": "sequence"},
    "sequence, lengths": {"input_stats": "sequence", "lengths": LENGTHS},
    "sequence, lengths, padding counts": {
        "input_stats": "sequence",
        "lengths": LENGTHS,
        "padding": "include",
    },
    "zoneout masks": {"zoneout": ("mask", "mask")},
    "zoneout rates, lengths, padding counts": {
        "zoneout": (0.2, 0.3),
        "lengths": LENGTHS,
        "padding": "include",
    },
}
UNNORMALIZED = {
    "plain": {},
    "lengths": {"lengths": LENGTHS},
    "zoneout": {"zoneout": ("mask", 0.3)},
    "no bias": {"absent": ("bias",), "lengths": [1, 3, 2]},
}
SETS = {
    "bn_lstm": BATCH_NORMALIZED
    | {
        "joint": {"absent": ("gamma_x",)},
        "joint, lengths, padding counts": {
            "absent": ("gamma_x",),
            "lengths": LENGTHS,
            "padding": "include",
        },
        "cell not normalized": {"absent": ("gamma_c",)},
        "no shifts": {"absent": ("bias", "beta_c")},
        "nothing optional": {"absent": ALL},
        "normalized cell passed on": {"pass_normalized_cell": True, "zoneout": ("mask", 0.0)},
        "shifted cell passed on": {"pass_normalized_cell": True, "absent": ("gamma_c",)},
    },
    "lstm": UNNORMALIZED | {"no cell bias": {"absent": ("beta_c",)}},
    "ln_lstm": UNNORMALIZED,
    "bn_rnn": BATCH_NORMALIZED | {"relu": {"nonlinearity": "relu"}},
    "bn_gru": BATCH_NORMALIZED | {"no shifts": {"absent": ("bias", "beta_n")}},
}


def function_of_tensors(case, backend):
    """A function of the present arguments that returns differentiable results, for gradcheck."""
    names = list(case.present())

    def function(*values):
        results = call(case.with_tensors(**dict(zip(names, values, strict=True))), backend)
        return tuple(results[name] for name in RESULTS[case.op])

    inputs = tuple(v.clone().requires_grad_() for v in case.present().values())
    return function, inputs


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("op", "options"),
    [pytest.param(op, SETS[op][name], id=f"{op}: {name}") for op in OPS for name in SETS[op]],
)
def test_gradients(op, options):
    # Differences with step 1e-6 have errors of (1e-6)^2 times third derivatives, which a large
    # eps keeps moderate, and of 1e-16 / 1e-6 from rounding. gradcheck's default tolerance of 1e-5
    # covers both.
    if op != "lstm":
        options = {"eps": 1e-2} | options
    function, inputs = function_of_tensors(make_case(op, 3, 3, 2, seed=1, **options), "cpu")
    assert gradcheck(function, inputs, eps=1e-6, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_of_the_reference(op):
    case = make_case(op, 2, 3, 1, seed=1, lengths=[2, 1, 2])
    if op != "lstm":
        case = case.with_options(eps=1e-2)  # as above
    function, inputs = function_of_tensors(case, "reference")
    assert gradgradcheck(function, inputs, atol=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_of_the_fused_operator_are_refused(op):
    function, inputs = function_of_tensors(make_case(op, 2, 3, 2), "cpu")
    (gradient,) = torch.autograd.grad(function(*inputs)[0].sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r'rbn\.backend\("reference"\)'):
        gradient.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_carry_no_gradient(backend):
    function = make_case("bn_lstm", 2, 3, 2)
    leaves = {name: v.clone().requires_grad_() for name, v in function.present().items()}
    results = call(function.with_tensors(**leaves), backend)
    for term in "xhc":
        assert not results[f"mean_{term}"].requires_grad
        assert not results[f"var_{term}"].requires_grad
    assert results["output"].requires_grad
