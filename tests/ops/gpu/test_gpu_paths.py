"""Kernel selection of the GPU's LSTM, tilings of stepwise kernels, and product precision."""

import threading
import types

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from gpu_cases import DEVICE, products

import rbn
from rbn.ops.gpu.lstm import backward, cuda_kernels, forward
from rbn.ops.gpu.lstm.steps import step_launches
from rbn.ops.gpu.runtime import precision


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
    """In tf32 if the call allows it, whatever PyTorch's switch says; otherwise that decides."""
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    call = types.SimpleNamespace(
        term=types.SimpleNamespace(is_cuda=True, dtype=dtype), a=types.SimpleNamespace(tf32=tf32)
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


@pytest.mark.parametrize("compiled", [False, True])
def test_the_backward_pass_takes_the_path_of_the_forward_pass(
    compiled, emulate_portable, monkeypatch
):
    """Though what it may multiply in was changed meanwhile: what was saved lies in its order."""
    if DEVICE == "cpu":
        emulate_portable()
    found, plans = {True: cuda_kernels.PORTABLE, False: None}, []
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: found[a.tf32])
    for module in (forward, backward):
        join = module.join

        def counted(calls, plan, *saved, _join=join):
            plans.append((plan, calls[0].tf32))
            return _join(calls, plan, *saved)

        monkeypatch.setattr(module, "join", counted)
    weight, states = torch.randn(16, 4, device=DEVICE), torch.zeros(2, 2, 4, device=DEVICE)

    def run(wx):
        with rbn.backend("gpu"):
            return rbn.ops.lstm(wx, weight, None, None, *states)[0].sum()

    for tf32 in (True, False):
        torch._dynamo.reset()
        wx = torch.randn(3, 2, 16, device=DEVICE, requires_grad=True)
        with products(tf32):
            loss = (torch.compile(run, backend="aot_eager") if compiled else run)(wx)
        with products(not tf32):
            loss.backward()
        (plan, first), (again, second) = plans
        assert first == second == tf32
        assert plan is again
        assert plan.family == found[tf32]
        plans.clear()


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
