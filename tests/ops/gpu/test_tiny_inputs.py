"""Inputs of a tiny scale, in every kernel family: relative errors are the same as at scale 1.

Batch normalization magnifies tiny terms, by up to 1 / sqrt(eps) in each step. So the first states
are tiny and their gradients are huge, and an error that is only small in absolute terms shows.
"""

import itertools

import pytest
import torch
from cuda_cases import needs_clusters, needs_hopper, on_a_card

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from cuda_emulation import COMPILER, EmulatedKernel
from gpu_cases import DEVICE, products

from rbn.ops.gpu.bn_rnn import rnn_single
from rbn.ops.gpu.bn_rnn.rnn_single import Tiling
from rbn.ops.gpu.lstm import cuda_kernels, plan
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.portable import portable_kernels
from rbn.ops.types import CONSTANT

STEPS, ROWS, FEATURES, HIDDEN = 6, 8, 5, 12
SCALES = (1e-6, 1e-12)
LAYERS = {"lstm": rbn.BatchNormLSTM, "rnn": rbn.BatchNormRNN, "ln": rbn.LayerNormLSTM}
FLOAT, TF32, BF16 = 2**-24, 2**-11, 2**-9  # half of the last bit
EVERY = list(itertools.product(("lstm", "rnn"), SCALES))
triton_marks = pytest.mark.gpu if DEVICE == "cuda" else lambda test: test
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def differentiated(kind, scale, dtype, backend, rounding, hidden, change, device="cpu"):
    """The output and all gradients of a new layer, whose numbers are rounded to a dtype first."""
    torch.manual_seed(0)
    layer = LAYERS[kind](FEATURES, hidden)
    with torch.no_grad():
        change(layer)
    layer = layer.to(rounding).to(device, dtype)
    x = (scale * torch.randn(STEPS, ROWS, FEATURES)).to(rounding).to(device, dtype)
    cotangent = torch.randn(STEPS, ROWS, hidden).to(rounding).to(device, dtype)
    x.requires_grad_()
    with rbn.backend(backend):
        output = layer(x)[0]
        output.backward(cotangent)
    found = {"output": output.detach(), "input": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: value.double().cpu() for name, value in found.items()}


def compare(
    kind,
    scale,
    backend,
    unit=FLOAT,
    dtype=torch.float32,
    hidden=HIDDEN,
    change=lambda layer: None,
    times=1,
):
    """Compare with the reference in float64.

    times: factor of the allowed error.

    Allows 64 units of the dtype, or for sums that cancel 8 times float32's effect on the reference.
    Kernels also raise small variances to the threshold of constant terms: two terms a step, whose
    gradients change by `CONSTANT`.
    """
    device = DEVICE if backend == "gpu" else "cpu"
    given = dtype, hidden, change
    expected = differentiated(kind, scale, torch.float64, "reference", *given)
    rounded = differentiated(kind, scale, torch.float32, "reference", *given)
    found = differentiated(kind, scale, dtype, backend, *given, device)
    for name, want in expected.items():
        size = want.norm()
        enlarged = (rounded[name] - want).norm() / FLOAT
        allowed = unit * (64 * size + 8 * enlarged) + 2 * STEPS * CONSTANT * size
        error = (found[name] - want).norm()
        assert error <= times * allowed, (
            f"{name}: {error / size:.2g}, allowed {times * allowed / size:.2g}"
        )


@pytest.mark.parametrize(("kind", "scale"), EVERY)
def test_on_the_cpu(kind, scale):
    compare(kind, scale, "cpu")


@triton_marks
@pytest.mark.parametrize("scale", SCALES)
def test_lstm_in_triton(scale, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: None)
    monkeypatch.setattr(plan, "_CACHE", {})
    with products(tf32=False):
        compare("lstm", scale, "gpu")


@triton_marks
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", ["rnn", "ln"])
def test_step_by_step(kind, scale):
    with products(tf32=False):
        compare(kind, scale, "gpu")


def stretched(layer):
    """One unit's part of W_h h varies far more than the others."""
    layer.weight_hh_l0[0] *= 1e6


@pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("gpu", marks=[pytest.mark.gpu] if DEVICE == "cuda" else [])]
)
@pytest.mark.parametrize("kind", ["lstm", "rnn"])
def test_a_term_is_constant_in_all_units_or_in_none(kind, backend):
    with products(tf32=False):
        compare(kind, 1e-12, backend, change=stretched)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("barrier", [False, True])
def test_emulated_rnn(barrier, scale, emulated_folder, monkeypatch):
    tiling = Tiling(1, 1, 1, 1, registers=not barrier, barrier=barrier)

    def kernel(direction, tiling, device, shared, defines):
        macros = rnn_single.macros(tiling, shared, defines)
        name, threads = f"rnn_{direction}", tiling.threads
        return EmulatedKernel(emulated_folder, name, macros, threads, shared)

    monkeypatch.setattr(rnn_single, "kernel", kernel)
    monkeypatch.setattr(rnn_single, "tiling_for", lambda a: tiling)
    compare("rnn", scale, "gpu", TF32)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_emulated_portable(scale, emulate_portable):
    launches = emulate_portable()
    compare("lstm", scale, "gpu", TF32)
    assert launches == ["forward", "backward"]


# On a GPU ----------------------------------------------------------------------------------------


def marked(test):
    for mark in on_a_card:
        test = mark(test)
    return test


@pytest.fixture
def families_of_cuda(monkeypatch, record_runs):
    """Makes a family run all calls; records its launches."""

    def given(family):
        monkeypatch.setattr(plan, "_CACHE", {})
        if family != "cluster":
            monkeypatch.setattr(cluster_kernels, "choose", lambda term: None)
        if family == "grid":
            monkeypatch.setattr(portable_kernels, "fits", lambda term: False)
        return record_runs(family)

    return given


DTYPES = pytest.mark.parametrize(
    ("dtype", "unit"), [(torch.float32, TF32), (torch.bfloat16, BF16)], ids=["tf32", "bf16"]
)


@marked
@DTYPES
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("family", "hidden"),
    [
        pytest.param("cluster", 12, marks=needs_clusters),
        pytest.param("cluster", 136, marks=needs_hopper),
        pytest.param("grid", 12, marks=needs_hopper),
        ("portable", 12),
    ],
)
def test_lstm_in_cuda(family, hidden, scale, dtype, unit, families_of_cuda):
    launched = families_of_cuda(family)
    # Two families pass on states in float32 as scaled float16, which has fewer bits below 4e-9.
    coarse = scale == 1e-12 and dtype == torch.float32 and family != "portable"
    with products(tf32=True):
        compare("lstm", scale, "gpu", unit, dtype, hidden, times=3 if coarse else 1)
    assert launched == ["forward", "backward"]


@marked
@DTYPES
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("hidden", [12, 1100])  # 8 units in a block, or 16 and teams
def test_rnn_in_cuda(hidden, scale, dtype, unit):
    with products(tf32=True):
        compare("rnn", scale, "gpu", unit, dtype, hidden)
