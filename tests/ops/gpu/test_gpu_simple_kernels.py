"""The GPU's stepwise kernels against the reference.

On a GPU, or on the CPU in Triton's interpreter: the same code except for the matrix products.
"""

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_cases import (
    CALM,
    ONE_STATE,
    RESULTS,
    TOLERANCES,
    assert_same,
    call,
    calm,
    cases,
    constant_beginning,
    differentiate,
    from_input,
    make_case,
    operator_call,
    poisoned_memory,
    results_to_keep,
    saved_results,
    shared,
)

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from gpu_cases import DEVICE

from rbn.ops.gpu.ln_lstm import ln_steps

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

OPS = ("ln_lstm", "bn_rnn", "bn_gru")
ROWS = {
    "plain": {},
    "no bias": {"absent": ("bias",)},
    "lengths": {"lengths": [5, 1, 3]},
    "no row to the end": {"lengths": [3, 1, 2]},
    "zoneout masks": {"zoneout": ("mask", "mask")},
    "zoneout rates": {"zoneout": (0.2, 0.3)},
    "zoneout and lengths": {"zoneout": ("mask", 0.3), "lengths": [2, 5, 3]},
    "zoneout, the other way": {"zoneout": (0.3, "mask"), "lengths": [2, 5, 3]},
    "output alone": {"used": ("output",)},
    "final state alone": {"used": ("h_n",), "lengths": [2, 5, 3]},
}
BATCH = {
    "padding counted": {"lengths": [2, 5, 1], "padding": "include"},
    "sequencewise": {"input_stats": "sequence"},
    "sequencewise, lengths": {"input_stats": "sequence", "lengths": [5, 4, 1]},
    "sequencewise, padding counted": {
        "input_stats": "sequence",
        "lengths": [5, 4, 1],
        "padding": "include",
    },
    "population": {"population": (2, 7, 5)},
    "population, lengths": {"population": (7, 1, 5), "lengths": [5, 4, 1], "padding": "include"},
    "zoneout, padding counted": {
        "zoneout": (0.0, "mask"),
        "lengths": [2, 5, 3],
        "padding": "include",
    },
}
OPTIONS = {
    "ln_lstm": ROWS,
    "bn_rnn": ROWS | BATCH | {"relu": {"nonlinearity": "relu"}},
    "bn_gru": ROWS | BATCH | {"no shifts": {"absent": ("bias", "beta_n")}},
}


@pytest.fixture(autouse=True, scope="module")
def _exact_products():
    """Exact float32 products, without tf32."""
    settings = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [setting.allow_tf32 for setting in settings]
    for setting in settings:
        setting.allow_tf32 = False
    yield
    for setting, value in zip(settings, before, strict=True):
        setting.allow_tf32 = value


def assert_equal(actual, expected):
    """Bit for bit the same, whatever is in memory."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        assert (actual[name] is None) == (want is None), name
        assert want is None or torch.equal(actual[name], want), name


def compare(case):
    """Results and gradients in float32 against those of the reference in float64."""
    found = differentiate(case.to(torch.float32).on(DEVICE), "gpu")
    expected = differentiate(case.to(torch.float32).to(torch.float64), "reference")
    results, gradients = TOLERANCES[torch.float32]
    assert_same(found[0], expected[0], results)
    assert_same(found[1], expected[1], gradients)


@pytest.mark.no_cover
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in OPTIONS[op]])
def test_every_option(op, name):
    compare(make_case(op, 5, 3, 6, **calm(op), **OPTIONS[op][name]))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 2, 3), (2, 1, 2), (3, 17, 5), (2, 5, 33), (2, 3, 70), (1, 2, 300)]
)
@pytest.mark.parametrize("op", OPS)
def test_shapes(op, shape):
    compare(make_case(op, *shape, **calm(op)))


@pytest.mark.parametrize("op", ONE_STATE)
@pytest.mark.parametrize("padding", ["exclude", "include"])
def test_batches_of_several_tiles(padding, op):
    """Rows are processed 64 at a time."""
    for B in (64, 65, 150):
        compare(make_case(op, 3, B, 5, lengths="random", padding=padding, **calm(op)))


def test_a_program_for_each_row(monkeypatch):
    """As on a GPU; in the interpreter several at once, to save time."""
    monkeypatch.setattr(ln_steps, "_TILE_INTERPRETED", 1)
    compare(make_case("ln_lstm", 2, 3, 5, lengths=[2, 1, 2], **calm("ln_lstm")))


def test_sums_over_many_rows():
    """For the layer-normalized LSTM's parameters: several programs, each with several tiles."""
    compare(make_case("ln_lstm", 5, 30, 3, lengths="random", **calm("ln_lstm")))


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("op", OPS)
@settings(max_examples=4)
@given(data=st.data())
def test_random_calls(op, data):
    compare(data.draw(cases(op, eps=(CALM,))))


@pytest.mark.no_cover
@pytest.mark.parametrize("options", [{}, {"zoneout": ("mask", 0.3), "lengths": [3, 1, 2, 3, 2]}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_half_precision(op, dtype, options):
    """Products of rounded values; sums, cells and statistics in float32."""
    case = make_case(op, 3, 5, 7, dtype=dtype, **calm(op), **options)
    found = differentiate(case.on(DEVICE), "gpu")
    expected = differentiate(case.to(torch.float64), "reference")
    unit = torch.finfo(dtype).eps
    assert_same(found[0], expected[0], 4 * unit)
    assert_same(found[1], expected[1], 16 * unit)
    for name, value in found[0].items():
        wanted = dtype if name in RESULTS[op] else torch.float32
        assert value is None or value.dtype == wanted, name
    assert {grad.dtype for grad in found[1].values()} == {dtype}


@pytest.mark.parametrize("op", OPS)
def test_parameters_in_float32_with_inputs_in_half_precision(op):
    """As under autocast."""
    case = make_case(op, 3, 4, 5, dtype=torch.float32, **calm(op))
    case = case.with_tensors(wx=case.tensors["wx"].bfloat16())
    case.cotangents = {name: v.bfloat16() for name, v in case.cotangents.items()}
    found, gradients = differentiate(case.on(DEVICE), "gpu")
    assert found["output"].dtype == torch.bfloat16
    for name, grad in gradients.items():
        assert grad.dtype == case.tensors[name].dtype, name
    expected = differentiate(case.to(torch.float64), "reference")
    unit = torch.finfo(torch.bfloat16).eps
    assert_same(found, expected[0], 4 * unit)
    assert_same(gradients, expected[1], 16 * unit)


@pytest.mark.parametrize("op", ONE_STATE)
@pytest.mark.parametrize("constant", [1, 4])
def test_rounding_is_not_enlarged_by_constant_steps(constant, op):
    case = constant_beginning(op, constant, 8, 12, 5).to(torch.float32)
    _, found = differentiate(case.on(DEVICE), "gpu")
    _, expected = differentiate(case.to(torch.float64), "reference")
    assert_same(shared(found), shared(expected), 2e-3)  # as on the CPU
    if op == "bn_gru":  # its update gate passes h0 on
        assert_same({"h0": found["h0"]}, {"h0": expected["h0"]}, 2e-3)
    else:
        assert found["h0"].abs().max() == 0


@pytest.mark.parametrize("op", OPS)
def test_nothing_is_kept_without_a_gradient(op):
    case = make_case(op, 4, 3, 5, dtype=torch.float32, lengths=[1, 4, 2], **calm(op)).on(DEVICE)
    expected = call(case.on("cpu").to(torch.float64), "reference")
    assert_same(call(case, "gpu"), expected, TOLERANCES[torch.float32][0])
    name, args = operator_call(case, "gpu")
    saved = saved_results(op, getattr(torch.ops.rbn, name).default(*args))
    assert len(saved) >= 3
    assert not any(value.numel() for value in saved)
    kept = saved_results(op, getattr(torch.ops.rbn, name).default(*args._replace(save=True)))
    assert any(value.numel() for value in kept)


@pytest.mark.parametrize("op", OPS)
def test_noncontiguous_arguments(op):
    case = make_case(op, 4, 3, 5, dtype=torch.float32, zoneout=("mask", "mask"), **calm(op))
    expected = differentiate(case.on(DEVICE), "gpu")

    def turned(value):
        last = value.dim() - 1
        return value.transpose(0, last).contiguous().transpose(0, last)

    other = case.with_tensors(**{name: turned(v) for name, v in case.present().items()})
    masks = {name: turned(v) for name, v in case.options.items() if isinstance(v, torch.Tensor)}
    other = other.with_options(**masks)
    other.cotangents = {name: turned(v) for name, v in case.cotangents.items()}
    for found, want in zip(differentiate(other.on(DEVICE), "gpu"), expected, strict=True):
        assert_same(found, {k: None if v is None else v.cpu() for k, v in want.items()}, 1e-6)


@pytest.mark.parametrize("op", OPS)
def test_the_same_numbers_every_time(op):
    case = make_case(op, 3, 9, 6, dtype=torch.float32, lengths="random").on(DEVICE)
    for once, again in zip(differentiate(case, "gpu"), differentiate(case, "gpu"), strict=True):
        assert_equal(once, again)


@pytest.mark.parametrize("op", OPS)
def test_a_nan_is_seen(op):
    """NaN only affects its own row, or all rows whose statistics include it."""
    for options in ({}, {"nonlinearity": "relu"} if op == "bn_rnn" else {}):
        case = make_case(op, 3, 4, 5, dtype=torch.float32, **options)
        wx = case.tensors["wx"].clone()
        wx[1, 2, 0] = float("nan")
        found = call(case.with_tensors(wx=wx).on(DEVICE), "gpu")
        expected = call(case.with_tensors(wx=wx), "reference")
        for name in RESULTS[op]:
            assert torch.equal(found[name].cpu().isnan(), expected[name].isnan()), name
            assert found[name].isnan().any()


@pytest.mark.parametrize("op", OPS)
def test_what_padding_holds_is_never_used(op):
    case = make_case(op, 4, 3, 5, dtype=torch.float32, lengths=[2, 4, 1], **calm(op))
    wx, lengths = case.tensors["wx"].clone(), case.options["lengths"]
    wx[torch.arange(4)[:, None] >= lengths] = float("nan")
    clean = differentiate(case.on(DEVICE), "gpu")
    for found, want in zip(
        differentiate(case.with_tensors(wx=wx).on(DEVICE), "gpu"), clean, strict=True
    ):
        assert_equal(found, want)


@pytest.mark.parametrize("op", OPS)
def test_memory_is_written_before_it_is_read(op):
    case = make_case(op, 3, 3, 5, dtype=torch.float32, lengths=[2, 2, 1], **calm(op)).on(DEVICE)
    expected = differentiate(case, "gpu")
    with poisoned_memory():
        found = differentiate(case, "gpu")
    for actual, want in zip(found, expected, strict=True):
        assert_equal(actual, want)


@pytest.mark.parametrize("op", OPS)
def test_a_double_runs_the_reference(op, caplog):
    case = make_case(op, 3, 4, 5).on(DEVICE)
    with caplog.at_level(logging.DEBUG, "rbn.ops.gpu"):
        found = differentiate(case, "gpu")
    assert "the reference runs" in caplog.text
    for actual, want in zip(found, differentiate(case, "reference"), strict=True):
        assert_equal(actual, want)


def test_rows_too_long_run_the_reference(monkeypatch, caplog):
    monkeypatch.setattr(ln_steps, "LARGEST", 4)
    case = make_case("ln_lstm", 2, 2, 5, dtype=torch.float32).on(DEVICE)
    with caplog.at_level(logging.DEBUG, "rbn.ops.gpu"):
        call(case, "gpu")
    assert "the reference runs" in caplog.text


@pytest.mark.parametrize("op", OPS)
def test_the_log_says_that_the_kernels_ran(op, caplog):
    case = make_case(op, 2, 3, 4, dtype=torch.float32).on(DEVICE)
    with caplog.at_level(logging.DEBUG, "rbn.ops.gpu"):
        differentiate(case, "gpu")
    assert [f"{op} {way} T=2 B=3 H=4" in caplog.text for way in ("forward", "backward")] == [
        True
    ] * 2


# What opcheck does without tracing, which takes most of its time; once per operator is enough.
UNTRACED = ("test_schema", "test_autograd_registration", "test_faketensor")
# Two steps only: PyTorch runs each a dozen times.
CHECKED = [("ln_lstm", {}), ("ln_lstm", {"lengths": [2, 1, 2], "zoneout": (0.2, "mask")})]
for op in ONE_STATE:
    CHECKED += [
        (op, {}),
        (op, {"lengths": [2, 1, 2], "padding": "include"}),
        (op, {"population": 4}),
    ]


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize(("op", "options"), CHECKED)
def test_the_operator(op, options):
    """Its schema, its fake implementation and its autograd formula, as PyTorch checks them."""
    case = make_case(op, 2, 3, 5, dtype=torch.float32, **calm(op), **options).on(DEVICE)
    training = "population" not in options
    leaves = {name: v.requires_grad_(training) for name, v in case.present().items()}
    name, args = operator_call(case.with_tensors(**leaves), "gpu")
    assert args.save is training
    # A compiled call may differ from this one in the last bits.
    operator = getattr(torch.ops.rbn, name).default
    torch.library.opcheck(operator, tuple(args), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize(("op", "options"), CHECKED)
def test_the_backward_operator(op, options):
    case = make_case(op, 2, 3, 5, dtype=torch.float32, **calm(op), **options).on(DEVICE)
    name, args = operator_call(case, "gpu")
    args = args._replace(save=True)
    results = results_to_keep(op, getattr(torch.ops.rbn, name).default(*args))
    cotangents = list(case.cotangents.values())
    torch.library.opcheck(
        getattr(torch.ops.rbn, f"{name}_backward").default,
        (*cotangents, results, True, *args),
        **({"test_utils": UNTRACED} if options else {}),
    )


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("op", OPS)
def test_the_operators_from_an_input_and_states_for_all_rows(op):
    case = make_case(op, 2, 3, 5, dtype=torch.float32, **calm(op), lengths=[2, 1, 2]).on(DEVICE)
    leaves = {name: v.requires_grad_() for name, v in case.present().items()}
    name, args = operator_call(case.with_tensors(**leaves), "gpu")
    args = from_input(args)
    operator = getattr(torch.ops.rbn, name).default
    torch.library.opcheck(operator, tuple(args), rtol=1e-4, atol=1e-5)
    args = args._replace(**{n: v.detach() for n, v in args._asdict().items() if torch.is_tensor(v)})
    results, cotangents = results_to_keep(op, operator(*args)), list(case.cotangents.values())
    for needs_input in (True, False):
        torch.library.opcheck(
            getattr(torch.ops.rbn, f"{name}_backward").default,
            (*cotangents, results, needs_input, *args),
            test_utils=UNTRACED,
        )


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("layer_class", [rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU])
def test_compiled_as_one_graph(layer_class):
    torch.manual_seed(0)
    layer = layer_class(3, 6).to(DEVICE)
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 5, 3, device=DEVICE)

    def loss(module, x):
        with rbn.backend("gpu"):
            return module(x)[0].square().mean()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(layer, x).backward()
    loss(twin, x).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("op", OPS)
def test_in_a_cuda_graph(op):
    case = make_case(op, 4, 5, 6, dtype=torch.bfloat16, lengths="random", **calm(op)).on(DEVICE)
    expected = differentiate(case, "gpu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = differentiate(case, "gpu")
    graph.replay()
    torch.cuda.synchronize()
    for actual, want in zip(found, expected, strict=True):
        assert_equal(actual, want)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("op", "H"), [(op, H) for op in OPS for H in (1000, 2049, 4096)] + [("ln_lstm", 8192)]
)
def test_large_sizes(op, H, dtype):
    case = make_case(op, 2, 70, H, dtype=dtype, **calm(op)).on(DEVICE)
    found = differentiate(case, "gpu")
    expected = differentiate(case.to(torch.float64), "reference")
    unit = torch.finfo(dtype).eps
    tolerances = TOLERANCES[dtype] if dtype == torch.float32 else (4 * unit, 16 * unit)
    for actual, want, tolerance in zip(found, expected, tolerances, strict=True):
        want = {name: None if v is None else v.cpu() for name, v in want.items()}
        assert_same(actual, want, tolerance)


@pytest.mark.parametrize("layer_class", [rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU])
def test_autocast(layer_class):
    torch.manual_seed(0)
    layer = layer_class(3, 6, eps=CALM).to(DEVICE)
    twin = copy.deepcopy(layer)
    x = torch.randn(3, 5, 3, device=DEVICE)
    for module, name in ((layer, "gpu"), (twin, "reference")):
        with torch.autocast(DEVICE, dtype=torch.bfloat16), rbn.backend(name):
            output, _ = module(x)
            assert output.dtype == torch.bfloat16
            output.float().square().sum().backward()
    for name, parameter in layer.named_parameters():
        expected = twin.get_parameter(name).grad
        limit = 0.05 * max(1.0, expected.abs().max().item())
        assert (parameter.grad - expected).abs().max() <= limit, name
