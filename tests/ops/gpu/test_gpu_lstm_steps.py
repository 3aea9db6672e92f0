"""The LSTM launched step by step, with a product and a kernel each, against the reference.

On a GPU, or on the CPU in Triton's interpreter: the same code except for the matrix products.
"""

import copy
import logging
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

from rbn.ops.gpu.bn_rnn import rnn_single
from rbn.ops.gpu.ln_lstm import ln_single
from rbn.ops.gpu.lstm import backward, cuda_kernels, workspace
from rbn.ops.gpu.lstm.plan import STEPS
from rbn.ops.gpu.lstm.steps import step_launches
from rbn.ops.gpu.runtime import direct_launch
from rbn.ops.gpu.runtime.launch_cache import RepeatedLaunch

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

beyond_the_batch = pytest.mark.filterwarnings(  # rows that only fill a tile
    "ignore:overflow encountered in exp"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
OPS = ("bn_lstm", "lstm")
# Tiles that hold a small batch, and tiles that do not: of 2 rows, with 8 units or with fewer.
TILES = {"one tile": (1024, 2048, 1), "several": (1024, 16, 1), "more programs": (1024, 8, 99)}


def tiles(name):
    """Use a `PortableTiling` for batch and layer."""
    sizes = zip(("_TILE", "_LARGEST", "_PROGRAMS"), TILES[name], strict=True)
    return mock.patch.multiple(step_launches, **dict(sizes))


@pytest.fixture(autouse=True, scope="module")
def _steps():
    """Step by step, whatever would run otherwise, with exact products."""

    def none(term, a):  # a mock would keep its arguments, and so all graphs
        return None

    with mock.patch.object(cuda_kernels, "family", none), products(tf32=False):
        yield


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ["one tile", "several"])
@pytest.mark.parametrize(("op", "option"), EVERY_OPTION)
def test_every_option(op, option, name):
    with tiles(name):
        compare(make_case(op, 5, 3, 6, fresh_seed(), **calm(op), **OPTIONS[option]))


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 1, 1), "one tile"),
        ((2, 1, 3), "one tile"),
        ((1, 2, 2), "several"),
        ((2, 17, 5), "several"),
        ((2, 3, 9), "more programs"),
        ((2, 3, 33), "one tile"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_shapes(op, shape, name):
    with tiles(name):
        compare(make_case(op, *shape, fresh_seed(), **calm(op)))


def test_a_batch_beyond_the_tile_as_it_is():
    """Rows are processed 512 at a time, with 4 units; for the means of the input, 128 at a time."""
    case = make_case("bn_lstm", 2, 515, 3, fresh_seed(), lengths="random", **calm("bn_lstm"))
    assert step_launches.tile_of(515, 3, 4) == (512, 4)
    compare(case)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=4)  # on a GPU, a compilation each
@given(data=st.data())
def test_random_calls(op, data):
    with tiles(data.draw(st.sampled_from(list(TILES)))):
        compare(data.draw(cases(op, eps=(CALM,))))


# The interpreter knows no tf32, and what it makes of the 16-bit types differs in nothing but how
# they round. One rounding for the values that are kept, some for those that add up over the steps.
UNITS = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("op", "options"),
    [("bn_lstm", {}), ("bn_lstm", {"zoneout": ("mask", 0.3), "lengths": [3, 2, 1]}), ("lstm", {})],
)
def test_half_precision(op, dtype, options):
    case = make_case(op, 3, 3, 7, fresh_seed(), **calm(op), **options)
    with tiles("several"):
        compare(case, dtype, (4 * UNITS[dtype], 16 * UNITS[dtype]))


# The interpreter knows no tf32, and what it makes of the 16-bit types differs in nothing but how
# they round: there a third of the options is enough.
ROUNDED = {"bf16": torch.bfloat16}
if torch.cuda.is_available():
    ROUNDED |= {"fp16": torch.float16, "tf32": torch.float32}


@pytest.mark.no_cover
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize(("op", "name"), EVERY_OPTION[:: 1 if torch.cuda.is_available() else 3])
def test_every_option_in_every_precision(op, name, precision):
    unit = 2**-7 if precision == "bf16" else 2**-10
    case = make_case(op, 5, 3, 6, fresh_seed(), **calm(op), **OPTIONS[name])
    with products(tf32=precision == "tf32"):
        compare(case, ROUNDED[precision], (4 * unit, 16 * unit))


@beyond_the_batch
@pytest.mark.parametrize("name", ["one tile", "several"])
def test_rounding_is_not_enlarged_by_constant_steps(name):
    case = constant_beginning("bn_lstm", 2, 4, 6, 5).to(torch.float32)
    with tiles(name):
        _, found = differentiate(case.on(DEVICE), "gpu")
    _, expected = differentiate(case.to(torch.float64), "reference")
    assert_same(shared(found), shared(expected), 2e-3)  # as on the CPU
    assert found["h0"].abs().max() == 0


@beyond_the_batch
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


@beyond_the_batch
@pytest.mark.parametrize("name", ["one tile", "several"])
def test_a_mean_far_from_zero_takes_nothing_from_the_variance(name):
    """Terms of 1000 whose rows differ by 1: sums of squares would lose the variance in float32."""
    case = make_case("bn_lstm", 2, 5, 3, **calm("bn_lstm"))
    far = case.with_tensors(wx=case.tensors["wx"] + 1000.0).to(torch.float32)
    with tiles(name):
        found = call(far.on(DEVICE), "gpu")
    expected = call(far.to(torch.float64), "reference")
    # wx itself is right to 1000 * 2**-24, which a standard deviation near 1 does not enlarge.
    for key in ("var_x", "mean_h", "var_h", "output"):
        torch.testing.assert_close(found[key].cpu().double(), expected[key], rtol=1e-3, atol=1e-4)


@beyond_the_batch
def test_identical_rows_have_no_variance_at_all():
    """However large their value, which a mean only approximates to the last bits."""
    case = make_case("bn_lstm", 1, 5, 3, dtype=torch.float32, absent=("gamma_x",))
    row = torch.tensor(1e4 / 3)
    same = {n: row.expand_as(case.tensors[n]).clone() for n in ("wx", "h0", "c0")}
    found = call(case.with_tensors(**same).on(DEVICE), "gpu")
    assert found["var_h"].eq(0).all()
    assert found["var_c"].eq(0).all()


@pytest.mark.parametrize("name", ["one tile", "several"])
def test_a_nan_is_seen(name):
    case = make_case("bn_lstm", 3, 4, 5, dtype=torch.float32)
    wx = case.tensors["wx"].clone()
    wx[1, 2, 0] = float("nan")
    with tiles(name):
        found = call(case.with_tensors(wx=wx).on(DEVICE), "gpu")
    expected = call(case.with_tensors(wx=wx), "reference")
    for key in ("output", "h_n", "c_n", "var_x", "var_h", "var_c"):
        assert torch.equal(found[key].cpu().isnan(), expected[key].isnan()), key


@pytest.mark.parametrize("name", ["one tile", "several"])
def test_nothing_is_kept_without_a_gradient(name):
    """One cell buffer for all steps, which each step reads and writes."""
    options = {"zoneout": (0.3, "mask"), "lengths": [4, 1, 2]}
    case = make_case("bn_lstm", 4, 3, 5, dtype=torch.float32, **calm("bn_lstm"), **options)
    with tiles(name), torch.no_grad():
        found = call(case.on(DEVICE), "gpu")
    assert_same(found, call(case.to(torch.float64), "reference"), TOLERANCES[torch.float32][0])


@pytest.mark.slow
@pytest.mark.parametrize("population", [None, (2, 1, 4)])
def test_several_recurrences_one_after_another(population):
    """With the numbers of each alone, whatever else the operator gets at the same time."""
    options = calm("bn_lstm") | {"population": population, "zoneout": ("mask", 0.0)}
    made = [make_case("bn_lstm", 2, 3, 5, seed, **options).to(torch.float32) for seed in (0, 1)]
    made = [case.on(DEVICE) for case in made]
    with tiles("several"):
        alone = [differentiate(case, "gpu") for case in made]
        together = differentiate_together(made)
    for (results, gradients), (expected, expected_gradients) in zip(together, alone, strict=True):
        for name, want in expected.items():
            assert want is results[name] is None or torch.equal(results[name], want), name
        for name, want in expected_gradients.items():
            torch.testing.assert_close(gradients[name], want, rtol=1e-4, atol=1e-5)


def test_the_same_bits_from_a_graph_that_is_kept(monkeypatch):
    """The last backward pass overwrites what was saved, those before it do not."""
    case = make_case("bn_lstm", 3, 3, 6, fresh_seed(), dtype=torch.float32, **calm("bn_lstm"))
    case = case.on(DEVICE)
    leaves = {name: v.requires_grad_() for name, v in case.present().items()}
    buffers = []
    consumed = backward._consumed
    monkeypatch.setattr(
        backward, "_consumed", lambda *args: buffers.append(consumed(*args)) or buffers[-1]
    )
    with tiles("several"):
        output = call(case.with_tensors(**leaves), "gpu")["output"]

        def differentiate_again(**options):
            cotangent = case.cotangents["output"]
            return torch.autograd.grad(output, list(leaves.values()), cotangent, **options)

        kept, last = differentiate_again(retain_graph=True), differentiate_again()
    assert [buffer is not None for buffer in buffers] == [True]
    for name, one, other in zip(leaves, kept, last, strict=True):
        assert torch.equal(one, other), name


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["bn_lstm", "lstm", "ln_lstm", "bn_rnn", "bn_gru"])
def test_steps_launched_by_the_driver_or_by_triton(op, dtype, monkeypatch):
    """Bit for bit the same, whoever launches them, and from the second call on."""
    case = make_case(op, 6, 33, 40, fresh_seed(), dtype=dtype, **calm(op)).on(DEVICE)
    launchers, launcher = [], direct_launch.launcher

    def counted(*args):
        launchers.append(launcher(*args))
        return launchers[-1]

    for single in (ln_single, rnn_single):
        monkeypatch.setattr(single, "tiling_for", lambda a: None)
    monkeypatch.setattr(direct_launch, "launcher", counted)
    found = [differentiate(case, "gpu") for _ in range(2)]
    assert len(launchers) == 4
    assert None not in launchers
    monkeypatch.setattr(direct_launch, "launcher", lambda *args: None)
    found.append(differentiate(case, "gpu"))

    def plainly(step, *numbers):
        step._kernel[step._grid](*step._tensors, *numbers, **step._flags)

    monkeypatch.setattr(RepeatedLaunch, "__call__", plainly)
    found.append(differentiate(case, "gpu"))
    for other in found[1:]:
        for one, values in zip(found[0], other, strict=True):
            for name, value in one.items():
                assert value is None or torch.equal(value, values[name]), name


@needs_cuda
@pytest.mark.parametrize(
    "layer_class", [rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
)
def test_a_graph_of_steps(layer_class, capture):
    """Captured steps match a call, and replays use what is then in memory."""
    torch.manual_seed(0)
    layer = layer_class(8, 40).cuda()
    x = torch.randn(5, 32, 8, device="cuda")

    def step(layer, x):
        layer.zero_grad(set_to_none=False)
        output = layer(x)[0]
        output.square().mean().backward()
        return output.detach()

    graph, output = capture(lambda: step(layer, x))
    twin = copy.deepcopy(layer)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(output, step(twin, x))
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, twin.get_parameter(name).grad), name


@pytest.mark.slow
@pytest.mark.no_cover
def test_the_operator():
    """Its schema, its fake implementation and its autograd formula, as PyTorch checks them."""
    # With 8 units and an even batch the saved buffers have no unwritten parts, which would differ
    # from call to call.
    options = calm("bn_lstm") | {"lengths": [2, 1, 2, 1], "padding": "include"}
    case = make_case("bn_lstm", 2, 4, 8, dtype=torch.float32, **options)
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
@pytest.mark.no_cover
@pytest.mark.parametrize("tf32", [False, True] if torch.cuda.is_available() else [True])
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
@pytest.mark.no_cover
@pytest.mark.parametrize("layer_class", [rbn.LSTM, rbn.BatchNormLSTM])
def test_compiled_as_one_graph_under_autocast(layer_class):
    torch.manual_seed(0)
    layer = layer_class(3, 6).to(DEVICE)
    twin = copy.deepcopy(layer)
    x = torch.randn(2, 5, 3, device=DEVICE)

    def loss(module, x):
        with rbn.backend("gpu"), torch.autocast(DEVICE, dtype=torch.bfloat16):
            return module(x)[0].float().square().mean()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(layer, x).backward()
    loss(twin, x).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad)


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
    """In the memory of W_h h, whose steps are as far apart as the kernels' layouts say."""
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
    """Random values by name, on the device."""
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
    """Lengths on a GPU are not checked."""
    monkeypatch.setattr("rbn.ops.definition.check_sequence_lengths", lambda *args: None)
    lengths = torch.tensor([0, 5, 2], device=DEVICE)
    found, expected = beside_the_reference(op, lengths=lengths)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_log_names_both_directions(caplog):
    case = make_case("lstm", 1, 2, 3, dtype=torch.float32).on(DEVICE)
    with caplog.at_level(logging.DEBUG, "rbn.ops.gpu"):
        differentiate(case, "gpu")
    for way in ("forward", "backward"):
        assert f"lstm {way} R=1 T=1 B=2 H=3 torch.float32: {STEPS}" in caplog.text
