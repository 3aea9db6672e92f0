"""The fused operator against the plain equations: results, statistics and every gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recurrence_cases import (
    BACKENDS,
    EPS64,
    GRADIENT_TOLERANCE,
    NORMALIZED_BY_BATCH,
    OPS,
    RESULT_TOLERANCE,
    RESULTS,
    assert_same,
    call,
    cases,
    differentiate,
    make_case,
)

from rbn.ops.cpu import derivatives


def assert_matches_reference(case, results=RESULT_TOLERANCE, gradients=GRADIENT_TOLERANCE):
    actual, actual_gradients = differentiate(case, "cpu")
    expected, expected_gradients = differentiate(case, "reference")
    assert_same(actual, expected, results)
    assert_same(actual_gradients, expected_gradients, gradients)


@pytest.mark.no_cover
@pytest.mark.parametrize("op", OPS)
@given(data=st.data())
def test_any_shape_and_options(op, data):
    case = data.draw(cases(op))
    if op == "lstm":  # without division, only the rounding of sums of a few dozen terms remains
        assert_matches_reference(case, 64 * EPS64, 64 * EPS64)
    else:
        assert_matches_reference(case)


ABSENT = ((), ("gamma_x",), ("gamma_c",), ("gamma_x", "gamma_c"))
OF_ONE_OP = {
    "bn_lstm": [
        {"absent": absent, "pass_normalized_cell": passed}
        for absent in ABSENT
        for passed in (False, True)
    ],
    "bn_rnn": [{"nonlinearity": "tanh"}, {"nonlinearity": "relu"}],
    "bn_gru": [{"absent": absent} for absent in ((), ("bias",), ("beta_n",), ("bias", "beta_n"))],
}


@pytest.mark.parametrize("population", [None, 2], ids=["batch", "population"])
@pytest.mark.parametrize("input_stats", ["step", "sequence"])
@pytest.mark.parametrize("padding", ["none", "exclude", "include"])
@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_every_combination_of_options(op, padding, input_stats, population):
    options = {"input_stats": input_stats, "population": population}
    if padding != "none":
        options |= {"padding": padding, "lengths": [2, 4, 1, 4, 3]}
    for zoneout in ((0.0, 0.0), ("mask", "mask"), (0.2, 0.3)):
        for more in OF_ONE_OP[op]:
            assert_matches_reference(make_case(op, 5, 5, 2, zoneout=zoneout, **options, **more))


@pytest.mark.parametrize(("op", "used"), [(op, used) for op in OPS for used in RESULTS[op]])
def test_one_result_alone_in_the_loss(op, used):
    for lengths in (None, [2, 5, 1]):
        assert_matches_reference(make_case(op, 5, 3, 3, lengths=lengths, used=(used,)))


@pytest.mark.parametrize("op", OPS)
def test_each_argument_may_be_the_only_one_that_needs_a_gradient(op):
    case = make_case(op, 4, 3, 2, lengths=[4, 2, 3])
    _, everything = differentiate(case, "cpu")
    for name, expected in everything.items():
        _, alone = differentiate(case, "cpu", wanted=(name,))
        assert list(alone) == [name]
        assert torch.equal(alone[name], expected), name
        assert expected.abs().max() > 0, name


@pytest.mark.parametrize("padding", ["exclude", "include"])
@pytest.mark.parametrize("op", OPS)
def test_large_batch_of_uneven_lengths(op, padding):
    options = {"padding": padding} if op in NORMALIZED_BY_BATCH else {}
    case = make_case(op, 33, 65, 7, lengths="random", zoneout=("mask", "mask"), **options)
    assert case.options["lengths"].unique().numel() > 20
    # Gradients are sums over up to 33 * 65 positions, and go through 33 steps instead of 7.
    assert_matches_reference(case, 4 * RESULT_TOLERANCE, 8 * GRADIENT_TOLERANCE)


@pytest.mark.parametrize("lengths", [None, [6, 6, 2, 4], [5, 5, 5, 5], [1, 1, 1, 6]])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_gate_derivatives_in_blocks_of_any_size(monkeypatch, steps, lengths):
    B, H = 4, 3
    monkeypatch.setattr(derivatives, "_BLOCK", steps * B * 4 * H)
    for op in ("bn_lstm", "lstm", "ln_lstm"):
        assert_matches_reference(make_case(op, 6, B, H, lengths=lengths))


@pytest.mark.parametrize("op", OPS)
@given(data=st.data())
def test_the_order_of_the_rows_does_not_matter(op, data):
    """Rows are sorted by length internally, which users must not notice."""
    B = data.draw(st.integers(2, 6))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=B, max_size=B))
    order = torch.tensor(data.draw(st.permutations(range(B))))
    case = make_case(op, 4, B, 2, lengths=lengths)
    shuffled = case.with_tensors(
        **{
            name: value.index_select(value.dim() - 2, order)
            for name, value in case.present().items()
            if name in ("wx", "h0", "c0")
        }
    ).with_options(lengths=torch.tensor(lengths)[order])
    results, moved = call(case, "cpu"), call(shuffled, "cpu")
    expected = {k: results[k].index_select(results[k].dim() - 2, order) for k in RESULTS[op]}
    assert_same({k: moved[k] for k in RESULTS[op]}, expected, RESULT_TOLERANCE)


@pytest.mark.parametrize("lengths", [None, [2, 4, 1]])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_initial_states_for_all_rows(op, backend, lengths):
    case = make_case(op, 4, 3, 2, lengths=lengths)
    states = [name for name in ("h0", "c0") if name in case.tensors]
    one = case.with_tensors(**{name: case.tensors[name][0] for name in states})
    rows = case.with_tensors(**{name: case.tensors[name][:1].expand(3, 2) for name in states})
    (found, gradients), (expected, of_rows) = (differentiate(c, backend) for c in (one, rows))
    assert_same(found, expected, 0.0)
    assert_same(gradients, of_rows | {n: of_rows[n].sum(0) for n in states}, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_lengths_of_any_integer_type(dtype):
    case = make_case("bn_lstm", 4, 3, 2, lengths=[2, 4, 1])
    expected = differentiate(case, "cpu")
    narrow = case.with_options(lengths=case.options["lengths"].to(dtype))
    for actual, want in zip(differentiate(narrow, "cpu"), expected, strict=True):
        assert_same(actual, want, 0.0)


@pytest.mark.parametrize("lengths", [[0, 4, 1], [2, 5, 1], [2, 4, -1]])
@pytest.mark.parametrize("op", OPS)
def test_lengths_outside_the_sequence_are_refused(op, lengths):
    case = make_case(op, 4, 3, 2, lengths=lengths)
    wrong = next(n for n in lengths if not 1 <= n <= 4)
    with pytest.raises(ValueError, match=rf"lengths .* steps 4, got {wrong} at position"):
        call(case, "cpu")
