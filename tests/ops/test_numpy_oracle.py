"""Both backends against the NumPy transcription of the paper, over all options."""

import numpy as np
import numpy_oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recurrence_cases import (
    BACKENDS,
    GRADIENT_TOLERANCE,
    NORMALIZED_BY_BATCH,
    OPS,
    RESULT_TOLERANCE,
    Case,
    assert_same,
    call,
    cases,
    differentiate,
    make_case,
)

# A complex step takes no difference, so it can be arbitrarily small.
STEP = 1e-100


def oracle(case: Case, direction: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """The oracle's results, or with a direction their derivatives along it."""
    arguments = {name: None if v is None else v.numpy() for name, v in case.tensors.items()}
    options = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in case.options.items()}
    if options.get("population") is not None:
        given = {
            k: None if v is None else v.numpy() for k, v in options["population"]._asdict().items()
        }
        options["population"] = {
            term: (given[f"mean_{term}"], given[f"var_{term}"])
            for term in "xhc"
            if given[f"mean_{term}"] is not None
        }
    if direction is not None:
        for name, d in direction.items():
            arguments[name] = arguments[name] + 1j * STEP * d
    results = getattr(numpy_oracle, case.op)(*arguments.values(), **options)
    if direction is not None:
        results = {k: None if v is None else np.imag(v) / STEP for k, v in results.items()}
    return results


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
@given(data=st.data())
def test_results_and_statistics(op, backend, data):
    case = data.draw(cases(op))
    expected = {k: None if v is None else torch.as_tensor(v) for k, v in oracle(case).items()}
    actual = {k: v for k, v in call(case, backend).items() if k in expected}
    assert_same(actual, expected, RESULT_TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
@given(data=st.data())
def test_derivative_along_a_random_direction(op, backend, data):
    case = data.draw(cases(op))
    rng = np.random.default_rng(0)
    direction = {name: rng.standard_normal(v.shape) for name, v in case.present().items()}
    moved = oracle(case, direction)
    expected = sum((c.numpy() * moved[name]).sum() for name, c in case.cotangents.items())

    _, gradients = differentiate(case, backend)
    terms = [gradients[name].numpy() * d for name, d in direction.items()]
    actual = sum(term.sum() for term in terms)
    # The sum has the rounding errors of its terms.
    size = 1 + sum(np.abs(term).sum() for term in terms)
    assert abs(actual - expected) <= GRADIENT_TOLERANCE * size


def test_the_oracle_depends_on_every_argument():
    """Guards the comparison itself: a derivative that is always zero would agree with anything."""
    case = make_case("bn_lstm", 3, 4, 2, lengths=[3, 1, 2, 3])
    for name, value in case.present().items():
        moved = oracle(
            case,
            {name: np.ones(value.shape) * np.arange(1, value.numel() + 1).reshape(value.shape)},
        )
        assert np.abs(moved["output"]).max() > 1e-3, name


@pytest.mark.parametrize("options", [{}, {"input_stats": "sequence"}, {"absent": ("gamma_c",)}])
@pytest.mark.parametrize("scale", [0.0, 1e-6])
@pytest.mark.parametrize("identical", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_small_recurrent_weights_have_their_gradient(op, backend, identical, scale, options):
    """Their term is nearly constant, but not because rows are identical: they can be learned."""
    if op != "bn_lstm" and "absent" in options:
        pytest.skip("only an LSTM has a cell")
    case = make_case(op, 4, 5, 3, **options)
    tensors = case.present()
    changed = {"weight_hh": tensors["weight_hh"] * scale}
    if identical:
        changed |= {k: tensors[k][:1].expand(5, 3).clone() for k in ("h0", "c0") if k in tensors}
    case = case.with_tensors(**changed)
    rng = np.random.default_rng(0)
    direction = {"weight_hh": rng.standard_normal(tensors["weight_hh"].shape)}
    moved = oracle(case, direction)
    expected = sum((c.numpy() * moved[name]).sum() for name, c in case.cotangents.items())
    found = differentiate(case, backend)[1]["weight_hh"].numpy()
    assert np.abs(found).max() > 1  # 316 times a gate's gradient
    size = 1 + np.abs(found * direction["weight_hh"]).sum()
    assert abs((found * direction["weight_hh"]).sum() - expected) <= GRADIENT_TOLERANCE * size
