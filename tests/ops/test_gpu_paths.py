"""Which kernels the GPU's LSTM runs, how those that go step by step are cut, how they multiply."""

import threading
import types

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from gpu_cases import DEVICE, products

import rbn
from rbn.ops.gpu.lstm import backward, cuda_kernels, families
from rbn.ops.gpu.lstm.persistent.tiles import make_plan
from rbn.ops.gpu.lstm.steps import step_launches
from rbn.ops.gpu.runtime import precision


@pytest.mark.parametrize(
    ("shape", "dtype", "path"),
    [
        ((1, 180, 128, 2000), torch.float32, families.STEPS),  # 64 MB of weights
        ((1, 180, 128, 2000), torch.bfloat16, families.STEPS),  # 32
        ((1, 100, 64, 1000), torch.float32, families.PERSISTENT),  # 16
        ((1, 784, 5000, 100), torch.float32, families.STEPS),  # no tile for the batch
        ((1, 50, 4, 9000), torch.bfloat16, families.STEPS),  # no room for all programs
        ((2, 784, 100, 100), torch.float32, families.PERSISTENT),
    ],
)
def test_which_path_is_taken(shape, dtype, path, monkeypatch):
    R, T, B, H = shape
    wx = torch.empty(R, T, B, 4 * H, dtype=dtype, device="meta")
    plan = make_plan(R, B, H, 132, dtype.itemsize, 227 * 1024)
    monkeypatch.setattr(families, "plan_for", lambda wx: plan)
    given_ = types.SimpleNamespace(wx=wx)
    assert families.choose(given_) == path
    monkeypatch.setattr(cuda_kernels, "covers", lambda a: True)
    assert families.choose(given_) == families.CUDA


@pytest.mark.parametrize(
    ("batch", "hidden", "itemsize", "tile"),
    [
        (128, 2000, 4, (128, 8)),
        (128, 2000, 2, (128, 8)),
        (64, 4096, 2, (64, 16)),
        (512, 1000, 4, (512, 4)),
        (5000, 100, 4, (512, 4)),
        (1, 1, 4, (1, 1)),
        (3, 4095, 2, (4, 16)),
    ],
)
def test_the_tile_of_a_program(batch, hidden, itemsize, tile):
    assert step_launches.tile_of(batch, hidden, itemsize) == tile


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("level", ["highest", "high", "medium"])
def test_products_are_as_exact_as_the_kernels(tf32, level):
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(level)
        outside = matmul.allow_tf32
        with precision.multiplied_in_tf32(tf32):
            assert matmul.allow_tf32 == tf32
        assert matmul.allow_tf32 == outside
        assert torch.get_float32_matmul_precision() == level
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("level", ["highest", "high"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_weights_is_multiplied_as_the_kernels_do(tf32, level, dtype):
    """In tf32 if the call allows it, whatever PyTorch's switch says; if not, as that says."""
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    call = types.SimpleNamespace(
        flat=types.SimpleNamespace(is_cuda=True, dtype=dtype), a=types.SimpleNamespace(tf32=tf32)
    )
    try:
        torch.set_float32_matmul_precision(level)
        outside = matmul.allow_tf32
        with backward._multiplied_as_by_kernels(call):
            assert matmul.allow_tf32 == (outside or (tf32 and dtype == torch.float32))
        assert matmul.allow_tf32 == outside
    finally:
        torch.set_float32_matmul_precision(before)


def test_threads_share_the_switch_of_products():
    """Whoever leaves first does not take it from the others; who needs it otherwise waits."""
    matmul, seen = torch.backends.cuda.matmul, []
    assert not matmul.allow_tf32
    inside, may_leave = threading.Event(), threading.Event()

    def stay():
        with precision.multiplied_in_tf32(True):
            inside.set()
            may_leave.wait(60)
            seen.append(matmul.allow_tf32)

    def ask_for_the_other():
        with precision.multiplied_in_tf32(False):
            seen.append(matmul.allow_tf32)

    threads = [threading.Thread(target=stay), threading.Thread(target=ask_for_the_other)]
    threads[0].start()
    inside.wait(60)
    with precision.multiplied_in_tf32(True):
        threads[1].start()
    assert matmul.allow_tf32
    may_leave.set()
    for thread in threads:
        thread.join(60)
    assert seen == [True, False]
    assert not matmul.allow_tf32


def test_the_backward_pass_takes_the_path_of_the_forward_pass(monkeypatch):
    """Though what it may multiply in was changed meanwhile: what was saved lies in its order."""
    asked = []

    def choose(a):
        asked.append(a.tf32)
        return families.STEPS

    monkeypatch.setattr(families, "choose", choose)
    wx = torch.randn(3, 2, 16, device=DEVICE, requires_grad=True)
    weight, states = torch.randn(16, 4, device=DEVICE), torch.zeros(2, 2, 4, device=DEVICE)
    for tf32 in (True, False):
        with rbn.backend("gpu"):
            with products(tf32):
                output, *_ = rbn.ops.lstm(wx, weight, None, None, *states)
            with products(not tf32):
                output.sum().backward()
        assert asked == [tf32, tf32]
        asked.clear()


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="needs torch 2.9 or later"
)
def test_products_are_as_exact_as_the_kernels_beside_newer_settings():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with precision.multiplied_in_tf32(False):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
