"""The layer-normalized LSTM in one CUDA C++ launch: on a GPU, or emulated on the CPU."""

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

from rbn.ops.gpu.ln_lstm import ln_single
from rbn.ops.gpu.ln_lstm.ln_single import Tiling

KB = 1024
FLOAT, HALF = torch.float32, torch.bfloat16
# Each tiling, with sizes that do not divide evenly.
TILINGS = {
    "one block": (HALF, (4, 11, 10), Tiling(1, 16)),
    "one block, float32": (FLOAT, (4, 7, 9), Tiling(1, 16)),
    "several units in a lane": (HALF, (3, 5, 37), Tiling(1, 40)),
    "two blocks": (HALF, (4, 11, 10), Tiling(2, 8)),
    "cluster": (HALF, (4, 5, 25), Tiling(4, 8, split=4)),
    "cluster, float32": (FLOAT, (4, 9, 42), Tiling(3, 16, split=2)),
    "16 rows": (HALF, (3, 19, 14), Tiling(2, 8, tiles=2, split=8)),
    "registers": (HALF, (3, 5, 70), Tiling(2, 40, split=1, registers=24)),
    "all in registers": (FLOAT, (3, 5, 24), Tiling(2, 16, split=2, registers=64)),
    "streamed": (HALF, (3, 5, 70), Tiling(2, 40, registers=8, capacity=30 * KB)),
    "streamed, float32": (FLOAT, (3, 11, 26), Tiling(4, 8, tiles=2, split=8, capacity=20 * KB)),
    "blocks without units": (HALF, (3, 5, 10), Tiling(4, 8)),
    "one row": (HALF, (2, 1, 10), Tiling(2, 8)),
    "one step": (HALF, (1, 2, 10), Tiling(2, 8)),
    "one unit": (FLOAT, (2, 2, 1), Tiling(1, 8)),
}
OPTIONS = {
    "plain": {},
    "no bias": {"absent": ("bias",)},
    "lengths": {"lengths": [5, 1, 3, 2, 5, 4, 1]},
    "no row to the end": {"lengths": [3, 1, 2, 3, 1, 1, 2]},
    "output alone": {"used": ("output",)},
    "final state alone": {"used": ("h_n",), "lengths": [2, 5, 3, 1, 2, 4, 5]},
    "final cell alone": {"used": ("c_n",)},
}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def on_gpu(test):
    missing = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(missing, reason="needs a CUDA device")(test))


@pytest.fixture
def emulate(emulated_folder, monkeypatch):
    """Runs all calls with this tiling, on the CPU."""
    launches = []

    def kernel(direction, tiling, dtype, device, defines):
        launches.append(direction)
        macros = ln_single.macros(direction, tiling, dtype, defines)
        name, shared = f"ln_{direction}", tiling.shared(direction, dtype)
        return EmulatedKernel(emulated_folder, name, macros, tiling.threads, shared, tiling.cluster)

    def given(tiling):
        supports = ln_single.supports_options
        monkeypatch.setattr(ln_single, "kernel", kernel)
        monkeypatch.setattr(ln_single, "tiling_for", lambda a: tiling if supports(a) else None)
        return launches

    return given


@needs_compiler
@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("name", TILINGS)
def test_emulated_tilings(name, emulate):
    dtype, shape, tiling = TILINGS[name]
    launches = emulate(tiling)
    compare_emulated(make_case("ln_lstm", *shape, **calm("ln_lstm")), dtype)
    assert launches == ["forward", "backward"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_emulated_options(name, emulate):
    launches = emulate(Tiling(2, 8))
    compare_emulated(make_case("ln_lstm", 5, 7, 10, **calm("ln_lstm"), **OPTIONS[name]), HALF)
    assert launches == ["forward", "backward"]


@needs_compiler
@pytest.mark.slow
def test_emulated_state_that_all_rows_share(emulate):
    emulate(Tiling(2, 8))
    case = make_case("ln_lstm", 5, 7, 10, **calm("ln_lstm"), **OPTIONS["lengths"])
    shared = {name: case.tensors[name][0] for name in ("h0", "c0")}
    compare_emulated(case.with_tensors(**shared), HALF)


@needs_compiler
@pytest.mark.slow
def test_emulated_float32_parameters_of_a_half_precision_input(emulate):
    """As under autocast."""
    emulate(Tiling(2, 8))
    case = make_case("ln_lstm", 5, 7, 10, **calm("ln_lstm")).to(HALF)
    exact = differentiate(case, "gpu")
    names = ("bias", "gamma_x", "gamma_h", "gamma_c", "beta_c", "h0", "c0")
    found = differentiate(case.with_tensors(**{n: case.tensors[n].float() for n in names}), "gpu")
    for name in ("output", "h_n", "c_n"):
        assert torch.equal(found[0][name], exact[0][name]), name
    for name, value in exact[1].items():
        assert found[1][name].dtype == (FLOAT if name in names else HALF), name
        assert torch.equal(found[1][name].to(HALF), value), name


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_emulated_float32_of_any_size(scale, emulate):
    """Products have float16 factors, so everything is scaled into float16's range."""
    emulate(Tiling(2, 8))
    case = make_case("ln_lstm", 4, 7, 10, **calm("ln_lstm")).to(FLOAT)
    weight = case.tensors["weight_hh"]
    scaled = case.with_tensors(weight_hh=scale * weight)
    found = differentiate(scaled, "gpu")
    expected = differentiate(scaled.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[FLOAT])
    for key, want in expected[1].items():
        error = (found[1][key].double() - want).norm() / want.norm()
        assert error <= 16 * UNITS[FLOAT], f"gradient of {key}: {error:.2g}"
    large = case.with_tensors(h0=1e5 * case.tensors["h0"])
    found = call(large, "gpu")
    assert_same(found, call(large.to(torch.float64), "reference"), 16 * UNITS[FLOAT])


@needs_compiler
@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("units", [10, 9])
def test_emulated_layer(units, emulate):
    """With a separate input term and a learned state; called directly, and as a custom operator."""
    launches = emulate(Tiling(2, 8))
    torch.manual_seed(0)
    layer = rbn.LayerNormLSTM(3, units, eps=CALM).to(HALF)
    x = torch.randn(5, 7, 3).to(HALF)

    def gradients(layer, x, backend):
        x = x.clone().requires_grad_()
        with rbn.backend(backend):
            output, (h_n, c_n) = layer(x)
        (output.square().sum() + h_n.sum() + c_n.sum()).backward()
        found = {name: parameter.grad for name, parameter in layer.named_parameters()}
        return {"output": output, "h_n": h_n, "c_n": c_n}, found | {"x": x.grad}

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
def test_emulated_inference_keeps_nothing(emulate):
    launches = emulate(Tiling(2, 8))
    case = make_case("ln_lstm", 5, 7, 10, **calm("ln_lstm"), **OPTIONS["lengths"]).to(HALF)
    expected = differentiate(case, "gpu")[0]
    with torch.no_grad():
        found = call(case, "gpu")
    assert launches == ["forward", "backward", "forward"]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@needs_compiler
@pytest.mark.slow
def test_emulated_padding_is_never_used(emulate):
    emulate(Tiling(2, 8))
    case = make_case("ln_lstm", 5, 7, 10, **calm("ln_lstm"), **OPTIONS["lengths"]).to(HALF)
    wx = case.tensors["wx"].clone()
    wx[torch.arange(5)[:, None] >= case.options["lengths"]] = torch.nan
    clean, found = differentiate(case, "gpu"), differentiate(case.with_tensors(wx=wx), "gpu")
    assert torch.equal(found[0]["output"], clean[0]["output"])
    for name, value in clean[1].items():
        assert torch.equal(found[1][name], value), name


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_emulated_zero_variance(dtype, emulate):
    """W_h h is zero, and so are the cells of one row: only eps keeps these finite."""
    emulate(Tiling(2, 8))
    case = make_case("ln_lstm", 3, 4, 10, **calm("ln_lstm"))
    weight, c0 = torch.zeros_like(case.tensors["weight_hh"]), case.tensors["c0"].clone()
    wx, bias = case.tensors["wx"].clone(), torch.zeros_like(case.tensors["bias"])
    wx[:, 2], c0[2] = 1.0, 0.0
    compare_emulated(case.with_tensors(weight_hh=weight, wx=wx, bias=bias, c0=c0), dtype)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_emulated_nan_shows_in_its_row_alone(dtype, emulate):
    emulate(Tiling(2, 8))
    case = make_case("ln_lstm", 5, 7, 10, **calm("ln_lstm")).to(dtype)
    case.tensors["wx"][2, 3, 4] = torch.nan
    output = differentiate(case, "gpu")[0]["output"]
    assert not output[:2].isnan().any()
    assert output[2:, 3].isnan().all()
    assert not output[:, torch.arange(7) != 3].isnan().any()


@needs_compiler
@pytest.mark.parametrize("zoneout", [(0.0, "mask"), (0.2, 0.0)])
def test_zoneout_runs_step_by_step(zoneout, emulate):
    launches = emulate(Tiling(2, 8))
    differentiate(make_case("ln_lstm", 5, 3, 6, zoneout=zoneout).to(HALF), "gpu")
    assert not launches


def test_true_float32_runs_step_by_step(emulate):
    launches, before = emulate(Tiling(2, 8)), torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        differentiate(make_case("ln_lstm", 2, 3, 6).to(FLOAT), "gpu")
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert not launches


# Tilings -----------------------------------------------------------------------------------------

AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}  # clusters on an H200


@pytest.fixture
def h200(monkeypatch):
    def at_once(found, dtype, hidden, device):
        return AT_ONCE[found.cluster]

    monkeypatch.setattr(ln_single, "shared_limit", lambda device: 227 * KB)
    monkeypatch.setattr(ln_single, "clusters_at_once", at_once)
    return ln_single.choose.__wrapped__


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("hidden", [1, 8, 100, 129, 240, 256, 400, 512])
@pytest.mark.parametrize("batch", [1, 8, 64, 65, 130])
def test_a_tiling_covers_the_layer_and_fits_the_gpu(dtype, hidden, batch, h200):
    check_tiling(h200(dtype, batch, hidden, 0), dtype, hidden, batch)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("tiles", [1, 2])
def test_a_tiling_with_streamed_weights_fits_the_gpu(dtype, tiles):
    found = ln_single.tiling(dtype, 1000, 16, 227 * KB, tiles)
    assert found.streamed(dtype)
    check_tiling(found, dtype, 1000, 64)


def check_tiling(found, dtype, hidden, batch):
    assert found.units * found.cluster >= hidden
    assert found.units % 8 == 0
    assert found.blocks(batch) * 8 * found.tiles >= batch * found.cluster
    assert (8 * found.tiles) % found.split == 0
    for direction in ("forward", "backward"):
        assert found.shared(direction, dtype) <= 227 * KB
        assert found.shared(direction, dtype) % 16 == 0
        tiles, columns = found._product(direction)
        assert sum(found.fragments(direction, dtype)) == 2 * tiles * columns


@pytest.mark.parametrize(
    ("batch", "hidden", "expected"),
    [
        (100, 100, (4, 1)),
        (64, 512, (8, 1)),  # eight clusters of 16 blocks would not run at once
        (1000, 100, (1, 1)),
        (256, 256, (4, 2)),
        (1000, 512, None),  # too many waves
        (56, 1000, (16, 1)),  # weights do not fit on the chip: some come from L2
        (64, 1000, (16, 2)),
        (130, 1000, None),  # more than one wave
        (128, 2000, None),
    ],
)
def test_how_layers_are_divided(batch, hidden, expected, h200):
    found = h200(HALF, batch, hidden, 0)
    assert (found and (found.cluster, found.tiles)) == expected


# On a GPU ----------------------------------------------------------------------------------------

SHAPES = [(5, 100, 100), (4, 64, 512), (3, 37, 400), (3, 9, 255), (2, 2, 6), (3, 130, 512)]
needs_clusters = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="there are clusters of blocks from Hopper on",
)


@pytest.fixture
def launched(monkeypatch):
    """The directions of the launches."""
    found, launch = [], ln_single._launch

    def recorded(direction, *rest):
        found.append(direction)
        launch(direction, *rest)

    monkeypatch.setattr(ln_single, "_launch", recorded)
    return found


@on_gpu
@needs_clusters
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, (5, 7, 50)) for name in OPTIONS), *(("plain", shape) for shape in SHAPES)],
)
def test_against_the_reference(name, shape, dtype, launched):
    compare("ln_lstm", shape, dtype, OPTIONS[name])
    assert launched == ["forward", "backward"]


@on_gpu
@needs_clusters
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize(
    ("cluster", "tiles"), [(1, 1), (1, 2), (2, 1), (4, 2), (8, 1), (8, 2), (16, 1), (16, 2)]
)
def test_every_size_of_cluster(cluster, tiles, dtype, launched, monkeypatch):
    tiling = ln_single.tiling(dtype, 12 * cluster, cluster, 227 * KB, tiles)
    assert tiling.cluster == cluster
    monkeypatch.setattr(ln_single, "tiling_for", lambda a: tiling)
    compare("ln_lstm", (5, 19, 12 * cluster), dtype, {})
    assert launched == ["forward", "backward"]


@on_gpu
@needs_clusters
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("tiles", [1, 2])
def test_streamed_weights(tiles, dtype, launched, monkeypatch):
    tiling = ln_single.tiling(dtype, 1000, 16, 227 * KB, tiles)
    monkeypatch.setattr(ln_single, "tiling_for", lambda a: tiling)
    compare("ln_lstm", (4, 37, 1000), dtype, {})
    assert launched == ["forward", "backward"]


@on_gpu
@needs_clusters
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("shape", [(9, 100, 100), (9, 64, 512)])
def test_the_same_bits_every_time(shape, dtype, launched):
    same_bits(make_case("ln_lstm", *shape, dtype=dtype).on("cuda"), 50)
    assert len(launched) == 102
