"""Hard cases of normalization: no variance, NaN, infinity; and the effect of a shared h0."""

from dataclasses import replace

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
    STEPS,
    assert_same,
    call,
    constant_beginning,
    could_be_parted,
    cpu_step,
    differentiate,
    has_compiled_step,
    make_case,
    relative,
    shared,
)

import rbn
from rbn.ops.few_rows import pooled
from rbn.ops.identical_rows import identical_inputs

NAN, INF = float("nan"), float("inf")

# In float32 the LSTMs run through the compiled step if there is one.
both_types = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


# No variance -----------------------------------------------------------------------------------


def identical_rows(op, T, dtype=torch.float64, **options):
    """A call in which all rows of the batch are equal."""
    case = make_case(op, T, 5, 3, **options)
    same = {
        name: value[..., :1, :].expand_as(value).clone()
        for name, value in case.present().items()
        if name in ("wx", "h0", "c0")
    }
    return case.with_tensors(**same).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_rows_leave_the_biases_alone(backend, dtype):
    """With no variance BN(x) is its shift, so gates are the bias and c_hat is beta_c."""
    case = identical_rows("bn_lstm", 2, dtype)
    results = call(case, backend)
    i, f, g, o = case.tensors["bias"].double().chunk(4)
    c, h = case.tensors["c0"].double(), None
    for _ in range(2):
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * case.tensors["beta_c"].double().tanh().expand_as(c)
    # The last digit of x is magnified by 1 / sqrt(eps) in each of the two steps.
    tolerance = torch.finfo(dtype).eps / 1e-5
    assert_same({"h_n": results["h_n"], "c_n": results["c_n"]}, {"h_n": h, "c_n": c}, tolerance)
    for term in "xhc":
        # A variance is accurate to rounding, relative to itself plus eps.
        assert results[f"var_{term}"].max() <= tolerance * 1e-5
        assert results[f"var_{term}"].min() >= 0


@pytest.mark.parametrize("options", [{}, {"lengths": [2, 1, 2, 2, 1]}, {"input_stats": "sequence"}])
@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_gradients_without_variance(op, options):
    case = identical_rows(op, 2, **options)
    results, gradients = differentiate(case, "cpu")
    expected, expected_gradients = differentiate(case, "reference")
    assert_same(results, expected, EPS64 / 1e-5)  # two steps, as above
    # The input term's rows have gradients that grow by 1 / sqrt(eps), and those of the weights are
    # sums in which they cancel: all have the rounding error of the largest.
    assert_same(
        relative(gradients, expected_gradients),
        relative(expected_gradients, expected_gradients),
        RESULT_TOLERANCE,
    )


# Rows that are identical at the start -----------------------------------------------------------


@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_what_the_rows_share_has_its_true_gradient(op, monkeypatch):
    """Omitting the gradient of constant terms does not change that of any parameter."""
    case = constant_beginning(op, 2, 6, 5, 3)
    _, found = differentiate(case, "reference")
    monkeypatch.setattr("rbn.ops.reference.normalization.CONSTANT", -1.0)
    _, whole = differentiate(case, "reference")
    assert whole["h0"].abs().max() > 10 * found["h0"].abs().max()  # individual rows do differ
    # In the full gradient, two terms of two steps magnify rounding by 1 / sqrt(eps) each.
    assert_same(shared(found), shared(whole), 8 * EPS64 / 1e-5**2)


@pytest.mark.parametrize("by", ["inputs", "zoneout", "padding", "gates"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_rows_that_could_be_parted_have_their_gradient(op, backend, by, monkeypatch):
    case = could_be_parted(op)[by]
    found = shared(differentiate(case, backend)[1])
    monkeypatch.setattr("rbn.ops.reference.normalization.CONSTANT", -1.0)
    whole = shared(differentiate(case, "reference")[1])
    largest = "gamma_x" if by == "inputs" else "weight_hh"
    assert relative(whole, whole)[largest].abs().max() == 1
    # A step without variance magnifies gradients, and their rounding, by 1 / sqrt(eps) twice.
    assert_same(relative(found, whole), relative(whole, whole), EPS64 / 1e-5)


@pytest.mark.parametrize("constant", [1, 3, 6])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_rounding_is_not_enlarged_by_constant_steps(op, step, constant):
    case = constant_beginning(op, constant, 10, 12, 5).to(torch.float32)
    if not has_compiled_step(op) and step == "compiled":
        pytest.skip("has no compiled step")
    with cpu_step(step):
        _, found = differentiate(case, "cpu")
    _, expected = differentiate(case.to(torch.float64), "reference")
    # The largest error of these was 1.3e-4; without the rule they are 0.016 to 1.8e19.
    assert_same(shared(found), shared(expected), 2e-3)
    if op == "bn_gru":  # its update gate passes h0 on
        assert_same({"h0": found["h0"]}, {"h0": expected["h0"]}, 2e-3)
    else:
        assert found["h0"].abs().max() == 0


@pytest.mark.parametrize("options", [{}, {"input_stats": "sequence"}, {"absent": ("gamma_c",)}])
@pytest.mark.parametrize("step", STEPS)
def test_small_recurrent_weights_have_their_gradient_in_float32(step, options):
    case = make_case("bn_lstm", 4, 5, 3, **options)
    weight = case.tensors["weight_hh"] * 1e-6
    case = case.with_tensors(weight_hh=weight).to(torch.float32)
    with cpu_step(step):
        _, found = differentiate(case, "cpu")
    _, expected = differentiate(case.to(torch.float64), "reference")
    assert expected["weight_hh"].abs().max() > 1
    # 1 / sqrt(var + eps) may be off by 5e-6 there; the rest is float32 rounding, magnified by 316.
    assert_same(found, expected, 2e-4)


@pytest.mark.parametrize("op", OPS)
def test_float32_stays_finite_without_variance(op):
    case = identical_rows(op, 7, torch.float32)
    results, gradients = differentiate(case, "cpu")
    for name, value in (results | gradients).items():
        assert value is None or value.isfinite().all(), name


@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_steps_that_no_row_reaches_have_the_statistics_of_all_others(op):
    case = make_case(op, 5, 3, 2, lengths=[3, 1, 2])
    results = call(case, "cpu")
    rows = torch.tensor([3, 2, 1])
    for term in ("x", "h"):
        mean, var = results[f"mean_{term}"], results[f"var_{term}"]
        expected = pooled(mean[:3], var[:3], rows, 1e-5)
        for found, want in zip((mean, var), expected, strict=True):
            assert found.shape[0] == 5
            torch.testing.assert_close(found[3:], want.expand(2, -1), rtol=1e-9, atol=1e-12)


# NaN and infinity ------------------------------------------------------------------------------


@both_types
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_a_bad_value_shows_in_every_row_of_a_training_batch(op, backend, value, dtype):
    H, unit = 3, 1
    case = make_case(op, 4, 5, H, dtype=dtype)
    clean = call(case, backend)
    wx = case.tensors["wx"].clone()
    wx[1, 2, unit] = value
    results, gradients = differentiate(case.with_tensors(wx=wx), backend)

    assert torch.equal(results["output"][0], clean["output"][0])
    assert results["output"][1, :, unit].isnan().all()
    others = [u for u in range(H) if u != unit]
    assert torch.equal(results["output"][1][:, others], clean["output"][1][:, others])
    assert results["output"][2:].isnan().all()
    for name in RESULTS[op][1:]:
        assert results[name].isnan().all(), name
    assert not results["mean_x"][1, unit].isfinite()
    assert results["var_x"][1, unit].isnan()
    assert results["mean_h"][2:].isnan().all()
    for name in ("weight_hh", "gamma_h", "bias"):
        assert gradients[name].isnan().all(), name


@both_types
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_a_bad_value_shows_at_every_step_with_sequencewise_statistics(op, backend, dtype):
    case = make_case(op, 4, 5, 3, input_stats="sequence", dtype=dtype)
    wx = case.tensors["wx"].clone()
    wx[3, 2, 1] = NAN
    output = call(case.with_tensors(wx=wx), backend)["output"]
    assert output[0, :, 1].isnan().all()
    assert output[1:].isnan().all()


@both_types
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_a_bad_value_stays_in_its_row_in_inference(op, backend, value, dtype):
    options = {"population": 3} if op in NORMALIZED_BY_BATCH else {}
    case = make_case(op, 4, 5, 3, dtype=dtype, **options)
    wx = case.tensors["wx"].clone()
    wx[1, 2, 0] = value
    clean, results = call(case, backend), call(case.with_tensors(wx=wx), backend)
    others = [0, 1, 3, 4]
    for name in RESULTS[op]:
        assert torch.equal(results[name][..., others, :], clean[name][..., others, :]), name
    assert torch.equal(results["output"][0], clean["output"][0])
    assert not torch.equal(results["output"][1, 2], clean["output"][1, 2])
    if value != value:
        assert results["output"][1, 2, 0].isnan()
        assert results["output"][2:, 2].isnan().all()


# Padding ---------------------------------------------------------------------------------------


@both_types
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("bn_lstm", {}),
        ("bn_lstm", {"input_stats": "sequence"}),
        ("bn_lstm", {"population": 2}),
        ("bn_lstm", {"absent": ("gamma_x",), "zoneout": ("mask", 0.3)}),
        ("lstm", {}),
        ("ln_lstm", {}),
        ("bn_rnn", {}),
        ("bn_rnn", {"input_stats": "sequence", "zoneout": (0.0, 0.3)}),
        ("bn_gru", {}),
        ("bn_gru", {"input_stats": "sequence", "zoneout": (0.0, 0.3)}),
    ],
)
def test_what_lies_in_the_padding_reaches_nothing(op, options, backend, value, dtype):
    lengths = [2, 4, 1, 3]
    case = make_case(op, 4, 4, 2, lengths=lengths, dtype=dtype, **options)
    padded = torch.arange(4)[:, None] >= torch.tensor(lengths)
    bad = case.with_tensors(wx=case.tensors["wx"].masked_fill(padded[:, :, None], value))
    expected, expected_gradients = differentiate(case, backend)
    results, gradients = differentiate(bad, backend)
    assert_same(results, expected, 0.0)
    assert_same(gradients, expected_gradients, 0.0)
    assert (gradients["wx"][padded] == 0).all()
    assert (results["output"][padded] == 0).all()
    assert (gradients["wx"][~padded] != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_that_counts_is_seen(backend):
    """The other mode: padded rows affect the statistics, and get a gradient for it."""
    case = make_case("bn_lstm", 4, 4, 2, lengths=[2, 4, 1, 3], padding="include")
    padded = torch.arange(4)[:, None] >= case.options["lengths"]
    moved = case.with_tensors(wx=case.tensors["wx"] + padded[:, :, None])
    assert (call(case, backend)["output"] - call(moved, backend)["output"]).abs().max() > 1e-3
    _, gradients = differentiate(case, backend)
    assert gradients["wx"][padded].abs().max() > 1e-6
    bad = case.with_tensors(wx=case.tensors["wx"].masked_fill(padded[:, :, None], NAN))
    assert call(bad, backend)["output"][2, 1].isnan().all()


# The initial state -----------------------------------------------------------------------------


def output_alone(case):
    return {"output": case.cotangents["output"]}


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_under_batch_statistics_a_shared_h0_has_no_effect_but_c0_has(backend, data):
    """W_h h0 is the same for all rows, so its normalization removes it completely."""
    T, B, H = (data.draw(st.integers(*limits)) for limits in ((1, 5), (3, 6), (1, 4)))
    lengths = data.draw(st.none() | st.lists(st.integers(1, T), min_size=B, max_size=B))
    padding = data.draw(st.sampled_from(("exclude", "include")))
    seed = data.draw(st.integers(0, 2**20))
    case = make_case("bn_lstm", T, B, H, seed, lengths=lengths, padding=padding)
    h0, c0 = (case.tensors[name][:1].repeat(B, 1) for name in ("h0", "c0"))
    case = case.with_tensors(h0=h0, c0=c0)
    results, gradients = differentiate(replace(case, cotangents=output_alone(case)), backend)

    def change(**moved):
        return (call(case.with_tensors(**moved), backend)["output"] - results["output"]).abs().max()

    # Rounding of W_h h0, magnified by its own normalization and once more by a later one, each time
    # by 1 / sqrt(eps) at most.
    assert change(h0=h0 + 1) <= GRADIENT_TOLERANCE
    assert change(c0=c0 + 1) > 1e-5
    # A shared state's gradient is the sum over rows: zero except for the rounding of its terms.
    of_h0, of_c0 = gradients["h0"], gradients["c0"]
    assert (of_h0.sum(0).abs() <= 64 * EPS64 * (1 + of_h0.abs().sum(0))).all()
    assert of_c0.sum(0).abs().max() > 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_population_statistics_a_shared_h0_has_an_effect(backend):
    case = make_case("bn_lstm", 3, 4, 2, population=3)
    results, gradients = differentiate(case, backend)
    moved = call(case.with_tensors(h0=case.tensors["h0"] + 1), backend)
    assert (moved["output"] - results["output"]).abs().max() > 1e-3
    assert gradients["h0"].sum(0).abs().max() > 1e-3


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_means_far_from_zero_at_test_time(op, step, rate):
    """The difference must not be computed from rounded numbers."""
    if not has_compiled_step(op) and step == "compiled":
        pytest.skip("has no compiled step")
    zoneout = (rate, rate) if op == "bn_lstm" else (0.0, rate)
    case = make_case(op, 3, 5, 4, population=3, zoneout=zoneout)
    mean, var = case.options["population"][:2]
    moved = case.options["population"]._replace(mean_x=mean + 1000, var_x=var * 0.01)
    wx = 1000 + 0.1 * case.tensors["wx"]
    case = case.with_tensors(wx=wx).with_options(population=moved).to(torch.float32)
    with cpu_step(step):
        found = differentiate(case, "cpu")
    expected = differentiate(case.to(torch.float64), "reference")
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_padding_is_not_looked_at_where_units_keep_a_part(op, backend):
    zoneout = (0.3, 0.3) if op == "bn_lstm" else (0.0, 0.3)
    case = make_case(op, 3, 4, 3, lengths=[1, 3, 3, 3], padding="include", zoneout=zoneout)
    expected = call(case, backend)
    wx = case.tensors["wx"].clone()
    wx[2, 0] = torch.nan  # the last step: its effect on the other rows is not used any more
    found = call(case.with_tensors(wx=wx), backend)
    assert torch.equal(found["h_n"][0], expected["h_n"][0])
    if op == "bn_lstm":
        assert torch.equal(found["c_n"][0], expected["c_n"][0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_cells_stay_so_where_units_keep_a_part(backend):
    case = make_case("lstm", 2, 3, 2, zoneout=(0.3, 0.0))
    c0 = case.tensors["c0"].clone()
    c0[1, 1] = torch.inf
    found = call(case.with_tensors(c0=c0), backend)["c_n"]
    assert torch.equal(found.isinf().nonzero(), torch.tensor([[1, 1]]))
    assert not found.isnan().any()


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize(("rows", "units"), [(2, 3), (9, 20), (64, 20)])
def test_inputs_next_to_nothing_have_the_references_gradients(nonlinearity, rows, units):
    """Normalization magnifies them step by step, until they are as large as any others."""
    torch.manual_seed(0)
    weights = [torch.randn(units, 5), torch.linalg.qr(torch.randn(units, units))[0]]
    inputs, cotangent = torch.randn(12, rows, 5), torch.randn(12, rows, units)

    def gradient(scale, backend, dtype):
        leaf = weights[1].to(dtype, copy=True).requires_grad_()
        wx = (scale * inputs.double()).to(dtype) @ weights[0].to(dtype).T
        gammas = torch.full((2, units), 0.1, dtype=dtype)
        with rbn.backend(backend):
            output, *_ = rbn.ops.bn_rnn(
                wx,
                leaf,
                torch.zeros(units, dtype=dtype),
                *gammas,
                torch.zeros(rows, units, dtype=dtype),
                nonlinearity=nonlinearity,
            )
        (output * cotangent.to(dtype)).sum().backward()
        return leaf.grad.double()

    for scale in (1e-10, 1e-11, 1e-12, 3e-13, 1e-13, 1e-14):
        wanted = gradient(scale, "reference", torch.float64)
        # float32's reference is off by up to 5e-4: products of terms close to 0.
        for backend, dtype in (("reference", torch.float32), ("cpu", torch.float32)):
            found = gradient(scale, backend, dtype)
            error = (found - wanted).norm() / wanted.norm()
            assert error < 2e-3, (scale, backend, float(error))


@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_normalization_of_equal_features_has_the_true_gradient(backend):
    """It is large, because biases that differ between features would have a large effect."""
    torch.manual_seed(0)
    T, B, H = 3, 2, 6
    new = {"dtype": torch.float64}
    wx = torch.zeros(T, B, 4 * H, **new)  # the features of a row are equal until the last step
    wx[-1] = torch.randn(B, 4 * H, **new)
    weight, states = torch.randn(4 * H, H, **new), torch.zeros(B, H, **new)
    gammas = [torch.full((n * H,), 0.1, **new) for n in (4, 4, 1)]
    bias = torch.zeros(4 * H, **new)
    direction, cotangent = torch.randn(4 * H, **new), torch.randn(H, **new)

    def loss(bias):
        with rbn.backend(backend):
            output, *_ = rbn.ops.ln_lstm(
                wx, weight, bias, *gammas, torch.zeros(H, **new), states, states
            )
        return (output[-1] * cotangent).sum()

    leaf = bias.clone().requires_grad_()
    loss(leaf).backward()
    step = 1e-10 * direction
    expected = (loss(bias + step) - loss(bias - step)) / 2e-10
    assert expected.abs() > 1e3
    torch.testing.assert_close(leaf.grad @ direction, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("lead", [(), (2,)])
def test_steps_with_identical_inputs(lead):
    wx = torch.randn(*lead, 6, 4, 5)
    wx[..., 1, :, :] = 0.5
    wx[..., 2, -1, :] = wx[..., 2, 0, :]  # the rows in between differ
    wx[..., 3, :, :] = wx[..., 3, :1, :]
    wx[..., 4, :, :] = float("nan")
    found = identical_inputs(wx, None)
    assert found.tolist() == torch.tensor([0, 1, 0, 1, 0, 0]).bool().expand(*lead, 6).tolist()


@pytest.mark.parametrize("shape", [(3, 0, 2), (0, 4, 2), (3, 1, 2)])
def test_identical_inputs_of_at_most_one_row(shape):
    found = identical_inputs(torch.randn(shape), None)
    assert found.tolist() == [True] * shape[0]
