"""tanh and sigmoid of the GPU's kernels: relative errors are small, however small the value."""

import ctypes
from pathlib import Path

import pytest
import torch
from cuda_cases import on_a_card

pytest.importorskip("triton", reason="the GPU's kernels need triton")

import triton
import triton.language as tl
from cuda_emulation import COMPILER, EmulatedKernel
from gpu_cases import DEVICE

from rbn.ops.gpu.runtime import driver, nvrtc
from rbn.ops.gpu.runtime.triton_functions import sigmoid, tanh

BLOCK = 1024
MACROS = {"H": 8, "MT": 1, "MW": 1, "KS": 1, "CHUNK": 1, "REGISTERS": 1, "BARRIER": 0}
MACROS |= dict.fromkeys(("BIAS", "MODE_X", "MODE_H", "MODE_C"), 1)
EXACT, APPROXIMATE = 1e-6, 2**-10  # the hardware tanh has an error of 2^-11


class Values(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "tanh", "sigmoid")] + [
        ("n", ctypes.c_int)
    ]


@triton.jit
def both(x, y, z, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.store(y + at, tanh(v))
    tl.store(z + at, sigmoid(v))


def numbers():
    """Of every size and sign, with more where the two computations of tanh meet."""
    sizes = torch.cat([torch.logspace(-30, 2, 60 * BLOCK), torch.linspace(0.3, 0.5, 4 * BLOCK)])
    return torch.cat([sizes, -sizes])


def check(x, found_tanh, found_sigmoid, unit):
    x, found_tanh, found_sigmoid = (v.double().cpu() for v in (x, found_tanh, found_sigmoid))
    error = (found_tanh / x.tanh() - 1).abs()
    assert error.max() <= unit, f"tanh({x[error.argmax()]:.3g}): {error.max():.2g}"
    # exp(-x) of a large x has the error of x.
    error = (found_sigmoid / x.sigmoid() - 1).abs() / (1 - x.clamp(max=0)) * (x > -80)
    if unit == EXACT:
        assert error.max() <= unit, f"sigmoid({x[error.argmax()]:.3g}): {error.max():.2g}"


def check_limits(tanh, sigmoid):
    """The values at 0, infinity, minus infinity, NaN."""
    assert tanh[:3].tolist() == [0, 1, -1]
    assert sigmoid[:3].tolist() == [0.5, 1, 0]
    assert tanh[3].isnan()
    assert sigmoid[3].isnan()


LIMITS = torch.tensor([0, torch.inf, -torch.inf, torch.nan])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@(pytest.mark.gpu if DEVICE == "cuda" else lambda test: test)
def test_in_triton():
    x = torch.cat([LIMITS, numbers()[len(LIMITS) :]]).to(DEVICE)
    y, z = torch.empty_like(x), torch.empty_like(x)
    both[(len(x) // BLOCK,)](x, y, z, BLOCK=BLOCK)
    check_limits(y, z)
    check(x[4:], y[4:], z[4:], EXACT)


def run(kernel, x):
    y, z = torch.empty_like(x), torch.empty_like(x)
    kernel.launch((1, 1), bytes(Values(x.data_ptr(), y.data_ptr(), z.data_ptr(), len(x))))
    return y, z


@pytest.fixture
def known_source(monkeypatch):
    path = Path(__file__).parent / "nonlinearities.cu"
    monkeypatch.setitem(nvrtc._SOURCES, path.name, path)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.usefixtures("known_source")
def test_emulated(emulated_folder):
    x = torch.cat([LIMITS, numbers()])
    kernel = EmulatedKernel(emulated_folder, "nonlinearities", MACROS | {"TYPE": 0}, 32, 0)
    y, z = run(kernel, x)
    check_limits(y, z)
    check(x[4:], y[4:], z[4:], EXACT)


@pytest.mark.parametrize(("dtype", "unit"), [(0, EXACT), (1, APPROXIMATE), (2, APPROXIMATE)])
@pytest.mark.usefixtures("known_source")
def test_in_cuda(dtype, unit):
    arch = nvrtc.architecture(torch.cuda.get_device_capability())
    x = torch.cat([LIMITS, numbers()]).cuda()
    code = nvrtc.compiled("nonlinearities", MACROS | {"TYPE": dtype}, arch)
    y, z = run(driver.Kernel(code, "nonlinearities", 32, 0), x)
    check_limits(y, z)
    check(x[4:], y[4:], z[4:], unit)


for mark in on_a_card:
    test_in_cuda = mark(test_in_cuda)
