"""The cluster kernels, for small layers: emulated on the CPU, and on a GPU."""

import copy

import pytest
import torch
from cuda_cases import (
    OPTIONS,
    UNITS,
    compare,
    compare_emulated,
    needs_clusters,
    needs_hopper,
    on_card,
    same_as_float64,
    same_bits,
)
from recurrence_cases import CALM, assert_same, calm, differentiate, make_case

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from cuda_emulation import emulated
from gpu_cases import differentiate_together

from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.gpu.lstm import backward, forward
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.operator import Incoming


@pytest.fixture
def runs(record_runs):
    """The directions in which the cluster kernels ran."""
    return record_runs("cluster")


# Emulated on the CPU -----------------------------------------------------------------------------

FLOAT, HALF = torch.float32, torch.bfloat16
EIGHT, SIXTEEN = cluster_kernels.cluster_tiling, cluster_kernels.cluster_tiling_16
LENGTHS = [5, 1, 3, 2, 5, 4, 1]
# The sizes do not divide evenly. Of each, the blocks of the cluster.
TILINGS = {
    "float32": (FLOAT, (5, 7, 10), EIGHT, 2),
    "one row": (FLOAT, (2, 1, 10), EIGHT, 2),  # the code of "float32"
    "two tiles, idle block": (FLOAT, (4, 20, 18), EIGHT, 4),
    "one block": (HALF, (1, 20, 6), EIGHT, 1),
    "five blocks": (HALF, (4, 7, 40), EIGHT, 5),
    "16 units": (FLOAT, (3, 7, 20), SIXTEEN, 2),
    "16 units, two tiles, idle block": (HALF, (3, 34, 40), SIXTEEN, 4),
}
EMULATED_OPTIONS = {
    "lstm, lengths": ("lstm", HALF, EIGHT, {"lengths": LENGTHS}),
    "few rows": ("bn_lstm", FLOAT, EIGHT, {"lengths": LENGTHS, "min_rows": 4}),
    "few rows, 16 units": ("bn_lstm", HALF, SIXTEEN, {"lengths": LENGTHS, "min_rows": 4}),
    "raw output, no bias": ("bn_lstm", HALF, EIGHT, {"absent": ("gamma_c", "bias")}),
    "sequencewise": ("bn_lstm", HALF, EIGHT, {"input_stats": "sequence", "lengths": LENGTHS}),
    "population": ("bn_lstm", HALF, EIGHT, {"population": (2, 7, 5)}),
    "final state alone": ("bn_lstm", HALF, EIGHT, {"used": ("h_n",), "lengths": LENGTHS}),
}


@pytest.fixture
def emulate(emulate_hopper, monkeypatch, runs):
    """Runs all calls in clusters of so many blocks, on the CPU."""

    def given(tiling_of, cluster):
        def choose(term):
            return tiling_of(term.dtype, term.shape[-2], term.shape[-1] // 4)

        emulate_hopper("cluster")
        monkeypatch.setattr(cluster_kernels, "choose", choose)
        monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *sizes: cluster)
        return runs

    return given


@emulated
@pytest.mark.parametrize("name", TILINGS)
def test_emulated_tilings(name, emulate):
    dtype, shape, tiling_of, cluster = TILINGS[name]
    runs = emulate(tiling_of, cluster)
    compare_emulated(make_case("bn_lstm", *shape, **calm("bn_lstm")), dtype)
    assert runs == ["forward", "backward"]


@emulated
@pytest.mark.parametrize("name", EMULATED_OPTIONS)
def test_emulated_options(name, emulate):
    op, dtype, tiling_of, options = EMULATED_OPTIONS[name]
    runs = emulate(tiling_of, 2)
    hidden = 10 if tiling_of is EIGHT else 20
    compare_emulated(make_case(op, 5, 7, hidden, **calm(op), **options), dtype)
    assert runs == ["forward", "backward"]


@emulated
def test_emulated_recurrences_side_by_side(emulate):
    runs = emulate(EIGHT, 2)
    options = calm("bn_lstm") | {"min_rows": 4, "dtype": FLOAT}
    cases = [make_case("bn_lstm", 5, 7, 10, seed, **options) for seed in (1, 2)]
    lengths = torch.tensor(LENGTHS)  # of both
    cases = [case.with_options(lengths=lengths) for case in cases]
    for case, found in zip(cases, differentiate_together(cases), strict=True):
        same_as_float64(found, differentiate(case.to(torch.float64), "reference"), FLOAT)
    assert runs == ["forward", "backward"]


@emulated
@pytest.mark.parametrize("kind", ["step", "sequence", "population"])
def test_emulated_layer_with_one_feature(kind, emulate, monkeypatch):
    """Its kernels take the input, not the input term: of both directions at once."""
    runs, taken = emulate(EIGHT, 2), []
    compile_kernel = cluster_kernels.kernel
    monkeypatch.setattr(
        cluster_kernels,
        "kernel",
        lambda *args: taken.append(dict(args[-1])["SCALAR"]) or compile_kernel(*args),
    )
    torch.manual_seed(0)
    stats = "sequence" if kind == "sequence" else "step"
    layer = rbn.BatchNormLSTM(1, 10, bidirectional=True, input_stats=stats, eps=CALM)
    x, lengths = torch.randn(5, 7, 1), torch.tensor(LENGTHS) if kind == "sequence" else None
    if kind == "population":
        for statistics in layer._all_statistics():
            size = 5, statistics.features
            statistics.update(0.3 * torch.randn(size), torch.rand(size) + 0.25)
        layer.eval()

    def gradients(layer, x, backend):
        with rbn.backend(backend):
            output, (h_n, c_n) = layer(x, lengths=lengths)
        (output.square().sum() + (h_n * c_n).sum()).backward()
        results = {"output": output, "h_n": h_n, "c_n": c_n}
        return results, {name: p.grad for name, p in layer.named_parameters()}

    found = gradients(copy.deepcopy(layer), x, "gpu")
    assert runs == ["forward", "backward"]
    assert taken == [1, 1]
    same_as_float64(found, gradients(layer.double(), x.double(), "reference"), FLOAT)


# On a GPU ----------------------------------------------------------------------------------------


def on_gpu(test):
    return on_card(needs_clusters(test))


@on_gpu
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 50)) for name in OPTIONS),
        *(
            ("bn_lstm", "plain", shape)
            for shape in [(5, 100, 100), (3, 128, 128), (6, 5, 6), (1, 16, 8), (3, 1, 2)]
        ),
        *(("lstm", name, (5, 40, 24)) for name in ("plain", "lengths")),
    ],
)
def test_small_layers_against_the_reference(op, name, shape, dtype, calls, runs):
    compare(op, shape, dtype, OPTIONS[name])
    assert calls == ["forward", "backward"]
    assert runs == ["forward", "backward"]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_layers_give_the_same_bits_every_time(dtype, runs):
    same_bits(make_case("bn_lstm", 9, 100, 100, dtype=dtype).on("cuda"), 200)
    assert len(runs) == 402


@pytest.fixture
def sixteen(monkeypatch, runs):
    """Layers of more than 128 units also run in one cluster."""
    monkeypatch.setattr(cluster_kernels, "SIXTEEN", tuple(UNITS))
    return runs


@on_gpu
@pytest.mark.parametrize(
    ("op", "of_h0", "of_gradients", "hidden"),
    [
        *(("bn_lstm", 1, size, 30) for size in (1e-20, 1e20)),
        *(("lstm", size, 1, 30) for size in (1e6, 1e-6)),
        # With more units some gate is near 0 where h0 is large, by less than a product's error.
        *(
            pytest.param(*sizes, 150, marks=needs_hopper)
            for sizes in [("bn_lstm", 1, 1e-20), ("bn_lstm", 1, 1e20), ("lstm", 1e-6, 1)]
        ),
    ],
)
def test_a_small_layer_with_numbers_of_any_size(op, of_h0, of_gradients, hidden, sixteen):
    """Float16's range has no effect, because factors are scaled to it."""
    case = make_case(op, 5, 20, hidden, dtype=torch.float32, **calm(op))
    case = case.with_tensors(h0=case.tensors["h0"] * of_h0)
    case.cotangents = {name: v * of_gradients for name, v in case.cotangents.items()}
    found = differentiate(case.on("cuda"), "gpu")
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[torch.float32])
    for key, want in expected[1].items():
        error = (found[1][key].double().cpu() - want).norm() / want.norm().clamp(min=1e-30)
        assert error <= 8 * UNITS[torch.float32], f"gradient of {key}: {error:.2g}"
    assert sixteen == ["forward", "backward"]


@on_gpu
@needs_hopper
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 37, 136)) for name in OPTIONS),
        *(
            ("bn_lstm", "plain", shape)
            for shape in [(7, 64, 240), (7, 37, 250), (3, 1, 256), (1, 64, 130)]
        ),
        *(("lstm", name, (5, 40, 250)) for name in ("plain", "lengths")),
    ],
)
def test_blocks_of_16_units_against_the_reference(op, name, shape, dtype, calls, sixteen):
    compare(op, shape, dtype, OPTIONS[name])
    assert calls == ["forward", "backward"]
    assert sixteen == ["forward", "backward"]


@on_gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_16_units_give_the_same_bits_every_time(dtype, sixteen):
    same_bits(make_case("bn_lstm", 9, 64, 240, dtype=dtype).on("cuda"), 200)
    assert len(sixteen) == 402


@pytest.fixture
def switched(monkeypatch):
    """Cluster kernels compiled with other switches, which are reset afterwards."""

    def switch(**switches):
        monkeypatch.setattr(cluster_kernels, "SWITCHES", switches)
        cluster_kernels.kernel.cache_clear()

    yield switch
    cluster_kernels.kernel.cache_clear()


@on_gpu
@needs_hopper
@pytest.mark.parametrize("hidden", [100, 240])
@pytest.mark.parametrize("dtype", UNITS)
def test_switches_of_cluster_kernels(hidden, dtype, sixteen, switched):
    switched(ALL_WAIT=1)
    compare("bn_lstm", (7, 64, hidden), dtype, {})
    assert sixteen == ["forward", "backward"]


@on_gpu
@pytest.mark.parametrize(("B", "H"), [(100, 100), pytest.param(64, 240, marks=needs_hopper)])
def test_more_small_layers_than_fit_at_once(B, H, sixteen):
    R, T = 20, 30
    torch.manual_seed(0)
    shapes = {"input": (T, B, 4 * H), "weight_hh": (4 * H, H), "h0": (B, H), "c0": (B, H)}

    def new_call():
        given = {name: torch.randn(shape) for name, shape in shapes.items()}
        given["weight_hh"] *= H**-0.5
        tensors = dict.fromkeys(LSTM.tensors) | {name: v.cuda() for name, v in given.items()}
        return LSTMArguments(**tensors, save=True, tf32=True)

    def run(calls):
        results = forward.forward(calls, separate=False)
        incoming = Incoming(torch.ones_like(results.output), (None, None))
        return results, backward.backward(calls, results.saved, results.plan, incoming)

    calls = [new_call() for _ in range(R)]
    together, gradients = run(calls)
    for r in range(0, R, 7):
        alone, (gradient,) = run([calls[r]])
        assert torch.equal(together.output[r], alone.output)
        assert torch.equal(gradients[r]["input"], gradient["input"])
    assert len(sixteen) == 8
