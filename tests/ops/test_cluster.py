"""The cluster kernels, for small layers, on a card."""

import pytest
import torch
from cuda_cases import (
    OPTIONS,
    UNITS,
    compare,
    needs_clusters,
    needs_hopper,
    on_a_card,
    same_bits,
)
from recurrence_cases import assert_same, calm, differentiate, make_case

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.gpu.lstm import backward, forward
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.operator import Incoming

pytestmark = [*on_a_card, needs_clusters]


@pytest.fixture
def runs(record_runs):
    """The directions in which the cluster kernels ran."""
    return record_runs("cluster")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_layers_give_the_same_bits_every_time(dtype, runs):
    same_bits(make_case("bn_lstm", 9, 100, 100, dtype=dtype).on("cuda"), 200)
    assert len(runs) == 402


@pytest.fixture
def sixteen(monkeypatch, runs):
    """Layers of more than 128 units run in one cluster, too."""
    monkeypatch.setattr(cluster_kernels, "SIXTEEN", tuple(UNITS))
    return runs


@pytest.mark.parametrize(
    ("op", "of_h0", "of_gradients", "hidden"),
    [
        *(("bn_lstm", 1, size, 30) for size in (1e-20, 1e20)),
        *(("lstm", size, 1, 30) for size in (1e6, 1e-6)),
        # Of more units some gate is near 0 where h0 is large, by less than a product's error.
        *(
            pytest.param(*sizes, 150, marks=needs_hopper)
            for sizes in [("bn_lstm", 1, 1e-20), ("bn_lstm", 1, 1e20), ("lstm", 1e-6, 1)]
        ),
    ],
)
def test_a_small_layer_with_numbers_of_any_size(op, of_h0, of_gradients, hidden, sixteen):
    """Float16's range does not show: what is multiplied is brought to it."""
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


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_16_units_give_the_same_bits_every_time(dtype, sixteen):
    same_bits(make_case("bn_lstm", 9, 64, 240, dtype=dtype).on("cuda"), 200)
    assert len(sixteen) == 402


@pytest.fixture
def switched(monkeypatch):
    """Cluster kernels compiled with other switches, of which none is left behind."""

    def switch(**switches):
        monkeypatch.setattr(cluster_kernels, "SWITCHES", switches)
        cluster_kernels.kernel.cache_clear()

    yield switch
    cluster_kernels.kernel.cache_clear()


@needs_hopper
@pytest.mark.parametrize("hidden", [100, 240])
@pytest.mark.parametrize("name", ["STAGGERED", "ALL_WAIT"])
@pytest.mark.parametrize("dtype", UNITS)
def test_switches_of_cluster_kernels(hidden, name, dtype, sixteen, switched):
    switched(**{name: 1})
    compare("bn_lstm", (7, 64, hidden), dtype, {})
    assert sixteen == ["forward", "backward"]


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
