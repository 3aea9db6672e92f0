"""The layer-normalized LSTM in one launch, in CUDA C++: on a GPU, or emulated on the CPU."""

import copy

import pytest
import torch
from cuda_cases import UNITS, compare, same_bits
from recurrence_cases import (
    CALM,
    assert_same,
    calm,
    differentiate,
    make_case,
    poisoned_memory,
)

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from cuda_emulation import COMPILER, EmulatedKernel

from rbn.ops.gpu.ln_lstm import ln_single
from rbn.ops.gpu.ln_lstm.ln_single import Tiling

KB = 1024
FLOAT, HALF = torch.float32, torch.bfloat16
# Each way to divide the work, with sizes that do not divide evenly.
TILINGS = {
    "one block": (HALF, (4, 11, 10), Tiling(1, 16)),
    "one block, float32": (FLOAT, (4, 7, 9), Tiling(1, 16)),
    "several units in a lane": (HALF, (3, 5, 37), Tiling(1, 40)),
    "two blocks": (FLOAT, (4, 11, 10), Tiling(2, 8)),
    "cluster": (HALF, (4, 5, 25), Tiling(4, 8, split=4)),
    "cluster, float32": (FLOAT, (4, 9, 42), Tiling(3, 16, split=2)),
    "16 rows": (HALF, (3, 19, 14), Tiling(2, 8, tiles=2, split=8)),
    "registers": (HALF, (3, 5, 70), Tiling(2, 40, split=1, registers=24)),
    "all in registers": (FLOAT, (3, 5, 24), Tiling(2, 16, split=2, registers=64)),
    "streamed": (HALF, (3, 5, 70), Tiling(2, 40, registers=8, room=30 * KB)),
    "streamed, float32": (FLOAT, (3, 11, 26), Tiling(4, 8, tiles=2, split=8, room=20 * KB)),
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def emulate(folder, monkeypatch):
    """Runs all calls with this tiling, on the CPU."""
    launches = []

    def kernel(direction, tiling, dtype, device, defines):
        launches.append(direction)
        macros = ln_single.macros(direction, tiling, dtype, defines)
        name, shared = f"ln_{direction}", tiling.shared(direction, dtype)
        return EmulatedKernel(folder, name, macros, tiling.threads, shared)

    def given(tiling):
        supports = ln_single.supports_options
        monkeypatch.setattr(ln_single, "kernel", kernel)
        monkeypatch.setattr(ln_single, "tiling_for", lambda a: tiling if supports(a) else None)
        return launches

    return given


def compare_emulated(case, dtype):
    """Results and all gradients beside those of the reference in float64."""
    with poisoned_memory():
        found = differentiate(case.to(dtype), "gpu")
    expected = differentiate(case.to(dtype).to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[dtype])
    for key, want in expected[1].items():
        error = (found[1][key].double() - want).norm() / max(1, want.norm())
        assert error <= 8 * UNITS[dtype], f"gradient of {key}: {error:.2g}"


@needs_compiler
@pytest.mark.slow
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
