"""The persistent Triton kernels against the reference: on a GPU, or by Triton's interpreter.

The interpreter runs the programs of a launch one after another, so the host launches each step by
itself; all but the barrier between the steps is the code that runs on the card.
"""

import copy
import types
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_cases import (
    CALM,
    NORMALIZED_BY_BATCH,
    ONE_STATE,
    TOLERANCES,
    assert_same,
    call,
    calm,
    cases,
    constant_beginning,
    could_be_parted,
    definition_of,
    differentiate,
    fresh_seed,
    from_input,
    make_case,
    operator_call,
    poisoned_memory,
    relative,
    shared,
)
from recurrence_cases import OPS as EVERY_OP

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from gpu_cases import DEVICE, EVERY_OPTION, OPTIONS, compare, differentiate_together, products

from rbn.ops.gpu.lstm import backward, families, workspace

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

OPS = ("bn_lstm", "lstm")


@pytest.fixture(autouse=True, scope="module")
def _triton():
    """The persistent Triton kernels run whatever else would, with exact products."""

    def persistent(term, a):  # a mock would keep what it is called with, and so all graphs
        return families.PERSISTENT

    with mock.patch.object(families, "choose", persistent), products(tf32=False):
        yield


@pytest.mark.no_cover
@pytest.mark.parametrize(("op", "name"), EVERY_OPTION)
def test_every_option(op, name):
    compare(make_case(op, 5, 3, 6, fresh_seed(), **calm(op), **OPTIONS[name]))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 3), (3, 17, 5), (4, 5, 33), (2, 3, 70)])
@pytest.mark.parametrize("op", OPS)
def test_shapes(op, shape):
    compare(make_case(op, *shape, fresh_seed(), **calm(op)))


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=8)  # a compilation each
@given(data=st.data())
def test_random_calls(op, data):
    compare(data.draw(cases(op, eps=(CALM,))))


@pytest.mark.no_cover
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_half_precision(op, dtype):
    """Products of rounded values; states and statistics in float32."""
    unit = torch.finfo(dtype).eps
    compare(make_case(op, 6, 9, 7, fresh_seed(), **calm(op)), dtype, (4 * unit, 16 * unit))


# The interpreter knows no tf32, and what it makes of the 16-bit types differs in nothing but how
# they round.
ROUNDED = {"bf16": torch.bfloat16}
if torch.cuda.is_available():
    ROUNDED |= {"fp16": torch.float16, "tf32": torch.float32}


@pytest.mark.no_cover
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize(("op", "name"), EVERY_OPTION)
def test_every_option_in_every_precision(op, name, precision):
    unit = 2**-7 if precision == "bf16" else 2**-10
    case = make_case(op, 5, 3, 6, fresh_seed(), **calm(op), **OPTIONS[name])
    with products(tf32=precision == "tf32"):
        compare(case, ROUNDED[precision], (4 * unit, 16 * unit))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in rows that fill a tile
@pytest.mark.parametrize("constant", [1, 4])
def test_rounding_is_not_enlarged_by_constant_steps(constant):
    case = constant_beginning("bn_lstm", constant, 8, 12, 5).to(torch.float32)
    _, found = differentiate(case.on(DEVICE), "gpu")
    _, expected = differentiate(case.to(torch.float64), "reference")
    assert_same(shared(found), shared(expected), 2e-3)  # as on the CPU
    assert found["h0"].abs().max() == 0


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in rows that fill a tile
@pytest.mark.parametrize("by", ["inputs", "zoneout", "padding", "gates"])
@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_rows_that_could_be_parted_have_their_gradient(op, by):
    case = could_be_parted(op)[by].to(torch.float32)
    found = shared(differentiate(case.on(DEVICE), "gpu")[1])
    expected = shared(differentiate(case.to(torch.float64), "reference")[1])
    # Rounding of float32, 6e-8, enlarged by 1 / sqrt(eps) in each of two steps.
    assert_same(relative(found, expected), relative(expected, expected), 6e-8 / 1e-5)


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


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("options", [{}, {"lengths": [4, 1, 2, 2], "padding": "include"}])
def test_the_operator(options):
    """Its schema, its fake implementation and its autograd formula, as PyTorch checks them."""
    # With 8 units and an even batch the saved buffers have no unwritten parts, which would differ
    # from call to call.
    case = make_case("bn_lstm", 4, 4, 8, dtype=torch.float32, **calm("bn_lstm"), **options)
    leaves = {name: v.requires_grad_() for name, v in case.on(DEVICE).present().items()}
    name, args = operator_call(case.on(DEVICE).with_tensors(**leaves), "gpu")
    assert name == "gpu_lstm"
    assert args.save
    # A compiled call may differ from this one in the last bits.
    torch.library.opcheck(torch.ops.rbn.gpu_lstm.default, tuple(args), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("options", [{}, {"lengths": [4, 1, 2, 2], "padding": "include"}])
def test_the_operator_from_an_input_and_states_for_all_rows(options):
    case = make_case("bn_lstm", 4, 4, 8, dtype=torch.float32, **calm("bn_lstm"), **options)
    leaves = {name: v.requires_grad_() for name, v in case.on(DEVICE).present().items()}
    _, args = operator_call(case.on(DEVICE).with_tensors(**leaves), "gpu")
    args = from_input(args)
    torch.library.opcheck(torch.ops.rbn.gpu_lstm.default, tuple(args), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tf32", [False, True])
def test_compiled_as_one_graph(tf32):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 6, max_length=4).to(DEVICE)
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 5, 3, device=DEVICE)

    def loss(module, x):
        with rbn.backend("gpu"):
            return module(x)[0].square().mean()

    with products(tf32):
        torch.compile(loss, fullgraph=True, backend="aot_eager")(layer, x).backward()
        loss(twin, x).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad)


@pytest.mark.slow
def test_several_recurrences_at_once():
    """Two directions, or models, in one launch give the numbers of each alone."""
    cases_ = [
        make_case("bn_lstm", 4, 5, 6, seed, dtype=torch.float32, **calm("bn_lstm")).on(DEVICE)
        for seed in (0, 1)
    ]
    alone = [differentiate(case, "gpu") for case in cases_]
    together = differentiate_together(cases_)
    for (results, gradients), (expected, expected_gradients) in zip(together, alone, strict=True):
        for name, want in expected.items():
            torch.testing.assert_close(results[name], want)
        for name, want in expected_gradients.items():
            torch.testing.assert_close(gradients[name], want, rtol=1e-4, atol=1e-4)


# What is saved, and overwritten -----------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_a_graph_that_is_kept_can_be_used_again(op):
    """The last backward pass may overwrite what was saved, those before it may not."""
    case = make_case(op, 4, 3, 6, fresh_seed(), dtype=torch.float32, **calm(op)).on(DEVICE)
    leaves = {name: v.requires_grad_() for name, v in case.present().items()}
    output = call(case.with_tensors(**leaves), "gpu")["output"]
    cotangent = case.cotangents["output"]

    def differentiate_again(**options):
        return torch.autograd.grad(output, list(leaves.values()), cotangent, **options)

    kept = [differentiate_again(retain_graph=True) for _ in range(2)]
    last = differentiate_again()
    for name, *values in zip(leaves, *kept, last, strict=True):
        assert torch.equal(values[0], values[1]), name
        assert torch.equal(values[0], values[2]), name
    with pytest.raises(RuntimeError, match="second time"):
        differentiate_again()


@pytest.mark.parametrize("lead", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 8), (7, 5, 6), (50, 100, 100), (9, 2, 33)])
def test_gradients_lie_behind_what_is_still_to_be_read(shape, dtype, lead):
    """In the memory of W_h h, whose steps are as far apart as the layouts of the kernels say."""
    T, B, H = shape
    term = torch.empty(*lead, T, B, 4 * H, dtype=dtype)
    _, kept, beyond = saved = workspace.saved_sizes(term.shape, True)
    wh = torch.empty(kept + beyond, dtype=dtype).narrow(0, 0, kept)
    plan = types.SimpleNamespace(saved=saved, lockstep=True)
    plain = types.SimpleNamespace(term=term, R=1, B=B, H=H, plan=plan)
    da = backward._consumed(plain, wh)
    assert da.shape == term.shape
    assert (da.data_ptr() - wh.data_ptr()) % 16 == 0
    for t in range(T):
        begin = (da.view(T, B, 4 * H)[t].data_ptr() - wh.data_ptr()) // dtype.itemsize
        for step in (kept // T, B * 4 * H):  # in CUDA C++, in Triton
            assert begin >= (t + 1) * step
    assert backward._consumed(plain, torch.empty(kept, dtype=dtype)) is None  # nothing was left
    plan.lockstep = False  # some rows may be read later
    assert backward._consumed(plain, wh) is None
    plain.R, plan.lockstep = 2, True
    assert backward._consumed(plain, wh) is None


def arguments_of(op, rows=3, hidden=4, steps=5):
    """Random ones, by name, on the device."""
    gates = definition_of(op).gates
    sizes = {"wx": (steps, rows, gates * hidden), "weight_hh": (gates * hidden, hidden)}
    sizes |= {"bias": (gates * hidden,), "h0": (rows, hidden)}
    if op == "bn_gru":
        sizes["beta_n"] = (hidden,)
    if op not in ONE_STATE:
        sizes |= {"c0": (rows, hidden), "beta_c": (hidden,)}
    if op != "lstm":
        sizes |= {"gamma_x": (gates * hidden,), "gamma_h": (gates * hidden,)}
    if op in ("bn_lstm", "ln_lstm"):
        sizes["gamma_c"] = (hidden,)
    return {name: torch.randn(size, device=DEVICE) for name, size in sizes.items()}


def beside_the_reference(op, **lengths):
    """Output and last states of both."""
    given = arguments_of(op)
    found = []
    for backend in ("gpu", "reference"):
        with rbn.backend(backend), poisoned_memory(), products(False):
            found.append(getattr(rbn.ops, op)(**given, **lengths, **calm(op)))
    states = 2 if op in ONE_STATE else 3
    return (results[:states] for results in found)


beyond_the_batch = pytest.mark.filterwarnings(  # rows that only fill a tile
    "ignore:overflow encountered in exp"
)


@beyond_the_batch
@pytest.mark.parametrize("op", EVERY_OP)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_that_do_not_lie_side_by_side(op, dtype):
    lengths = torch.tensor([5, 1, 2, 1, 3, 1], dtype=dtype, device=DEVICE)[::2]
    found, expected = beside_the_reference(op, lengths=lengths)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@beyond_the_batch
@pytest.mark.parametrize("op", EVERY_OP)
def test_rows_without_a_step_keep_their_state(op, monkeypatch):
    """Lengths on a card are taken at their word."""
    monkeypatch.setattr("rbn.ops.definition.check_sequence_lengths", lambda *args: None)
    lengths = torch.tensor([0, 5, 2], device=DEVICE)
    found, expected = beside_the_reference(op, lengths=lengths)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
