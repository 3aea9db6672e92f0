"""The kernels for small layers, whose blocks meet in a cluster, on a card."""

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

from rbn.ops.gpu.lstm import forward
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.signature import Inputs

pytestmark = [*on_a_card, needs_clusters]


@pytest.fixture
def small(noting):
    """The directions in which the kernels for small layers ran."""
    return noting("_run_small")


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
def test_small_layers_against_the_reference(op, name, shape, dtype, calls, small):
    compare(op, shape, dtype, OPTIONS[name])
    assert calls == ["forward", "backward"]
    assert small == ["forward", "backward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_layers_give_the_same_bits_every_time(dtype, small):
    same_bits(make_case("bn_lstm", 9, 100, 100, dtype=dtype).on("cuda"), 200)
    assert len(small) == 402


@pytest.fixture
def sixteen(monkeypatch, small):
    """Layers of more than 128 units run in one cluster, too."""
    monkeypatch.setattr(cluster_kernels, "SIXTEEN", tuple(UNITS))
    return small


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
    """Small kernels compiled with other switches, of which none is left behind."""

    def switch(**switches):
        monkeypatch.setattr(cluster_kernels, "SWITCHES", switches)
        cluster_kernels.kernel.cache_clear()

    yield switch
    cluster_kernels.kernel.cache_clear()


@needs_hopper
@pytest.mark.parametrize("hidden", [100, 240])
@pytest.mark.parametrize("name", ["STAGGERED", "ALL_WAIT"])
@pytest.mark.parametrize("dtype", UNITS)
def test_switches_of_small_kernels(hidden, name, dtype, sixteen, switched):
    switched(**{name: 1})
    compare("bn_lstm", (7, 64, hidden), dtype, {})
    assert sixteen == ["forward", "backward"]


@pytest.mark.parametrize(("B", "H"), [(100, 100), pytest.param(64, 240, marks=needs_hopper)])
def test_more_small_layers_than_fit_at_once(B, H, sixteen):
    R, T = 20, 30
    torch.manual_seed(0)
    wx, weight = torch.randn(R, T, B, 4 * H), torch.randn(R, 4 * H, H) * H**-0.5
    state = torch.randn(2, R, B, H)

    def run(pick):
        tensors = (v[pick].cuda() for v in (wx, weight, state[0], state[1]))
        x, w, h0, c0 = tensors
        nothing = [None] * 5
        options = (0.0, 0.0, "none", 0.0, "step", "exclude", False, True, True)
        a = Inputs(x, w, *nothing, h0, c0, None, [], None, None, *options)
        results = forward.forward(a)
        return results, forward.backward(a, results, torch.ones_like(results.output), None, None)

    together, gradients = run(slice(None))
    for r in range(0, R, 7):
        alone, gradient = run(slice(r, r + 1))
        assert torch.equal(together.output[r], alone.output[0])
        assert torch.equal(gradients.wx[r], gradient.wx[0])
    assert len(sixteen) == 8
