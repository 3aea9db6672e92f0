"""Which kernels the GPU's LSTM runs, how those that go step by step are cut, how they multiply."""

import types

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from gpu_cases import products

from rbn.ops.gpu import cuda_lstm, gradients, lstm_steps, paths
from rbn.ops.gpu.plan import make_plan


@pytest.mark.parametrize(
    ("shape", "dtype", "path"),
    [
        ((1, 180, 128, 2000), torch.float32, paths.STEPS),  # 64 MB of weights
        ((1, 180, 128, 2000), torch.bfloat16, paths.STEPS),  # 32
        ((1, 100, 64, 1000), torch.float32, paths.PERSISTENT),  # 16
        ((1, 784, 5000, 100), torch.float32, paths.STEPS),  # no tile for the batch
        ((1, 50, 4, 9000), torch.bfloat16, paths.STEPS),  # no room for all programs
        ((2, 784, 100, 100), torch.float32, paths.PERSISTENT),
    ],
)
def test_which_path_is_taken(shape, dtype, path, monkeypatch):
    R, T, B, H = shape
    wx = torch.empty(R, T, B, 4 * H, dtype=dtype, device="meta")
    plan = make_plan(R, B, H, 132, dtype.itemsize, 227 * 1024)
    monkeypatch.setattr(paths, "plan_for", lambda wx: plan)
    given_ = types.SimpleNamespace(wx=wx)
    assert paths.choose(given_) == path
    monkeypatch.setattr(cuda_lstm, "covers", lambda a: True)
    assert paths.choose(given_) == paths.CUDA


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
    assert lstm_steps.tile_of(batch, hidden, itemsize) == tile


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("level", ["highest", "high", "medium"])
def test_products_follow_the_switch_of_cudnn(tf32, level):
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(level)
        outside = matmul.allow_tf32
        with products(tf32), lstm_steps.multiplied_as_by_cudnn():
            assert matmul.allow_tf32 == tf32
        assert matmul.allow_tf32 == outside
        assert torch.get_float32_matmul_precision() == level
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("level", ["highest", "high"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_weights_is_multiplied_as_the_kernels_do(tf32, level, dtype):
    """In tf32 if cuDNN's switch allows it, whatever PyTorch's says; if not, as that says."""
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    wx = types.SimpleNamespace(is_cuda=True, dtype=dtype)
    try:
        torch.set_float32_matmul_precision(level)
        outside = matmul.allow_tf32
        with products(tf32), gradients._multiplied_as_by_kernels(wx):
            assert matmul.allow_tf32 == (outside or (tf32 and dtype == torch.float32))
        assert matmul.allow_tf32 == outside
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="needs torch 2.9 or later"
)
def test_products_follow_the_switch_of_cudnn_beside_newer_settings():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with products(False), lstm_steps.multiplied_as_by_cudnn():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
