"""The batch-normalized RNN in one CUDA C++ launch: on a GPU, or emulated on the CPU."""

import copy

import pytest
import torch
from cuda_cases import UNITS, compare, compare_emulated, same_bits
from recurrence_cases import (
    CALM,
    assert_same,
    call,
    calm,
    differentiate,
    make_case,
)

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from cuda_emulation import COMPILER, EmulatedKernel

from rbn.ops.gpu.bn_rnn import rnn_single
from rbn.ops.gpu.bn_rnn.rnn_single import Tiling

KB = 1024


def polled(tiles, blocks=1):
    return Tiling(tiles, tiles, 1, blocks, registers=True)


# Each tiling, with sizes that do not divide evenly.
FLOAT, HALF = torch.float32, torch.bfloat16
TILINGS = {
    "polled": (FLOAT, (5, 7, 10), polled(1)),
    "polled, two tiles": (HALF, (4, 19, 34), polled(2, 2)),
    "barrier": (HALF, (4, 18, 42), Tiling(2, 1, 2, 2, registers=False, barrier=True)),
    "row warps": (FLOAT, (3, 35, 20), Tiling(4, 2, 1, 1, registers=False, barrier=True)),
    "teams": (HALF, (4, 21, 74), Tiling(2, 2, 2, 2, False, True, units=16, team=2)),
    "teams, float32": (FLOAT, (3, 5, 30), Tiling(1, 1, 1, 2, False, True, team=4)),
    "one row": (HALF, (2, 1, 10), polled(1)),
    "one step": (HALF, (1, 2, 10), polled(1)),
}
OPTIONS = {
    "plain": {},
    "relu": {"nonlinearity": "relu"},
    "no bias": {"absent": ("bias",)},
    "lengths": {"lengths": [5, 1, 3, 2, 5, 4, 1]},
    "few rows": {"lengths": [5, 1, 3, 2, 5, 4, 1], "min_rows": 4},
    "no row to the end": {"lengths": [3, 1, 2, 3, 1, 1, 2]},
    "sequencewise": {"input_stats": "sequence", "lengths": [5, 1, 3, 2, 5, 4, 1]},
    "population": {"population": (2, 7, 5)},
    "output alone": {"used": ("output",)},
    "final state alone": {"used": ("h_n",), "lengths": [2, 5, 3, 1, 2, 4, 5]},
}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def on_gpu(test):
    missing = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason="needs a CUDA device")(test))


@pytest.fixture
def emulate(emulated_folder, monkeypatch):
    """Runs all calls with this tiling, on the CPU."""
    launches = []

    def kernel(direction, tiling, device, shared, defines):
        launches.append(direction)
        macros = rnn_single.macros(tiling, shared, defines)
        name, threads = f"rnn_{direction}", tiling.threads
        return EmulatedKernel(emulated_folder, name, macros, threads, shared)

    def given(tiling):
        supports = rnn_single.supports_options
        monkeypatch.setattr(rnn_single, "kernel", kernel)
        monkeypatch.setattr(rnn_single, "tiling_for", lambda a: tiling if supports(a) else None)
        return launches

    return given


@needs_compiler
@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("name", TILINGS)
def test_emulated_tilings(name, emulate):
    dtype, shape, tiling = TILINGS[name]
    launches = emulate(tiling)
    compare_emulated(make_case("bn_rnn", *shape, **calm("bn_rnn")), dtype)
    assert launches == ["forward", "backward"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_emulated_options(name, emulate):
    launches = emulate(polled(1))
    compare_emulated(make_case("bn_rnn", 5, 7, 10, **calm("bn_rnn"), **OPTIONS[name]), HALF)
    assert launches == ["forward", "backward"]


@needs_compiler
@pytest.mark.slow
def test_emulated_state_that_all_rows_share(emulate):
    emulate(polled(1))
    case = make_case("bn_rnn", 5, 7, 10, **calm("bn_rnn"), lengths=[5, 1, 3, 2, 5, 4, 1])
    compare_emulated(case.with_tensors(h0=case.tensors["h0"][0]), HALF)


@needs_compiler
@pytest.mark.slow
def test_emulated_float32_parameters_of_a_half_precision_input(emulate):
    """As under autocast."""
    emulate(polled(1))
    case = make_case("bn_rnn", 5, 7, 10, **calm("bn_rnn")).to(HALF)
    exact = differentiate(case, "gpu")
    names = ("bias", "gamma_x", "gamma_h", "h0")
    found = differentiate(case.with_tensors(**{n: case.tensors[n].float() for n in names}), "gpu")
    for name in ("output", "h_n", "mean_h", "var_h"):
        assert torch.equal(found[0][name], exact[0][name]), name
    for name, value in exact[1].items():
        assert found[1][name].dtype == (FLOAT if name in names else HALF), name
        assert torch.equal(found[1][name].to(HALF), value), name


@needs_compiler
@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("units", [10, 8])  # rows of h have padding, or not
def test_emulated_layer(units, emulate):
    """With a separate input term and a learned state; called directly, and as a custom operator."""
    launches = emulate(polled(1))
    torch.manual_seed(0)
    layer = rbn.BatchNormRNN(3, units, eps=CALM).to(HALF)
    x = torch.randn(5, 7, 3).to(HALF)

    def gradients(layer, x, backend):
        x = x.clone().requires_grad_()
        with rbn.backend(backend):
            output, h_n = layer(x)
        (output.square().sum() + h_n.sum()).backward()
        found = {name: parameter.grad for name, parameter in layer.named_parameters()}
        return {"output": output, "h_n": h_n}, found | {"x": x.grad}

    found = gradients(copy.deepcopy(layer), x, "gpu")
    assert launches == ["forward", "backward"]
    expected = gradients(copy.deepcopy(layer).double(), x.double(), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[HALF])
    for name, want in expected[1].items():
        error = (found[1][name].double() - want).norm() / max(1, want.norm())
        assert error <= 8 * UNITS[HALF], f"gradient of {name}: {error:.2g}"
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    again = gradients(compiled, x, "gpu")
    assert len(launches) == 4
    for name, value in found[0].items():
        assert torch.equal(again[0][name], value), name
    for name, value in found[1].items():
        other = again[1][name if name == "x" else f"_orig_mod.{name}"]
        assert (other - value).norm() <= 2 * UNITS[HALF] * value.norm(), name


@needs_compiler
@pytest.mark.slow
def test_emulated_padding_is_never_used(emulate):
    emulate(polled(1))
    case = make_case("bn_rnn", 5, 7, 10, **calm("bn_rnn"), **OPTIONS["lengths"]).to(HALF)
    wx = case.tensors["wx"].clone()
    wx[torch.arange(5)[:, None] >= case.options["lengths"]] = torch.nan
    clean, found = differentiate(case, "gpu"), differentiate(case.with_tensors(wx=wx), "gpu")
    assert torch.equal(found[0]["output"], clean[0]["output"])
    for name, value in clean[1].items():
        assert torch.equal(found[1][name], value), name


@needs_compiler
@pytest.mark.slow
def test_emulated_constant_terms(emulate):
    """All rows are identical in the first steps: the variances are 0, and no gradient passes."""
    emulate(polled(1))
    case = make_case("bn_rnn", 5, 7, 10, **calm("bn_rnn"))
    wx = case.tensors["wx"].clone()
    wx[:2] = wx[:2, :1]
    h0 = case.tensors["h0"][:1].expand(7, 10).contiguous()
    case = case.with_tensors(wx=wx, h0=h0).with_options(eps=1e-5)
    compare_emulated(case, HALF)
    var_h = call(case.to(HALF), "gpu")["var_h"]
    assert (var_h[:3] == 0).all()
    assert (var_h[3:] > 0).all()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["one row", "barrier"])
def test_emulated_nan_shows(name, emulate):
    dtype, (_, _, H), tiling = TILINGS[name]
    emulate(tiling)
    case = make_case("bn_rnn", 5, 7, H, **calm("bn_rnn")).to(dtype)
    case.tensors["wx"][2, 3, 4] = torch.nan
    output = differentiate(case, "gpu")[0]["output"]
    assert not output[:2].isnan().any()
    assert output[2:].isnan().any(-1).any(-1).all()


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [{"zoneout": (0.0, "mask")}, {"lengths": [2, 5, 1], "padding": "include"}],
    ids=["zoneout", "padding counted"],
)
def test_other_options_run_step_by_step(options, emulate):
    launches = emulate(polled(1))
    differentiate(make_case("bn_rnn", 5, 3, 6, **options).to(HALF), "gpu")
    assert not launches


def test_true_float32_runs_step_by_step(emulate):
    launches, before = emulate(polled(1)), torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        differentiate(make_case("bn_rnn", 2, 3, 6).to(FLOAT), "gpu")
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert not launches


# Tilings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("hidden", [2, 8, 100, 256, 258, 512, 1000, 1056, 1058, 2000, 2048])
@pytest.mark.parametrize("batch", [1, 16, 17, 64, 65, 100, 128])
def test_a_tiling_covers_the_batch_and_fits_the_gpu(dtype, hidden, batch):
    tiling = rnn_single.choose(dtype, batch, hidden, 132, 227 * KB)
    assert 16 * tiling.tiles >= batch
    assert tiling.tiles % tiling.row_warps == 0
    assert tiling.blocks(hidden) * tiling.units >= hidden
    assert tiling.blocks(hidden) <= 132
    forward, backward = (tiling.shared(d, dtype, hidden) for d in ("forward", "backward"))
    assert forward < backward <= 227 * KB
    assert 32 <= tiling.threads <= 256


@pytest.mark.parametrize(
    ("batch", "hidden", "processors", "limit"),
    [
        (129, 64, 132, 227),  # too many rows
        (8, 63, 132, 227),  # pairs of units
        (8, 2114, 132, 227),  # more than 16 units per multiprocessor
        (8, 512, 16, 227),
        (128, 2000, 132, 99),  # W_h does not fit
    ],
)
def test_what_runs_step_by_step(batch, hidden, processors, limit):
    assert rnn_single.choose(HALF, batch, hidden, processors, limit * KB) is None


# On a GPU ----------------------------------------------------------------------------------------

SHAPES = [(5, 100, 100), (4, 64, 512), (3, 64, 1000), (3, 128, 2000), (3, 37, 1058), (2, 2, 6)]


@pytest.fixture
def launched(monkeypatch):
    """The directions of the launches."""
    found, launch = [], rnn_single._launch

    def recorded(direction, *rest):
        found.append(direction)
        launch(direction, *rest)

    monkeypatch.setattr(rnn_single, "_launch", recorded)
    return found


@on_gpu
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, (5, 7, 50)) for name in OPTIONS), *(("plain", shape) for shape in SHAPES)],
)
def test_against_the_reference(name, shape, dtype, launched):
    compare("bn_rnn", shape, dtype, OPTIONS[name])
    assert launched == ["forward", "backward"]


@on_gpu
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("shape", [(9, 100, 100), (9, 64, 512), (5, 128, 2000)])
def test_the_same_bits_every_time(shape, dtype, launched):
    same_bits(make_case("bn_rnn", *shape, dtype=dtype).on("cuda"), 50)
    assert len(launched) == 102
