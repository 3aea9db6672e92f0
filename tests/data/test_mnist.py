"""MNIST as sequences, in three orders."""

import importlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rbn.data import DataNotFound, Splits, mnist, pmnist
from rbn.data.mnist import pixel_order, read_idx

Make = Callable[..., Any]


def idx(magic: int, *shape: int, content: bytes) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", magic, *shape) + content


def images(count: int, first: int) -> bytes:
    """Images whose pixel p is (number of the image + p) mod 256."""
    numbers = torch.arange(first, first + count)[:, None] + torch.arange(784)
    return idx(0x803, count, 28, 28, content=bytes(numbers.remainder(256).flatten().tolist()))


def labels(count: int) -> bytes:
    return idx(0x801, count, content=bytes(i % 10 for i in range(count)))


@pytest.fixture
def tiny(
    make_source: Make, register: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Path:
    """A data folder with 30 training images, the last 10 of them for validation, and 7 to test."""
    files = {
        "train-images-idx3-ubyte": images(30, 0),
        "train-labels-idx1-ubyte": labels(30),
        "t10k-images-idx3-ubyte": images(7, 100),
        "t10k-labels-idx1-ubyte": labels(7),
    }
    register("mnist", *(make_source(name, content) for name, content in files.items()))
    (tmp_path / "mnist").mkdir()
    for name, content in files.items():
        (tmp_path / "mnist" / name).write_bytes(content)
    monkeypatch.setattr(importlib.import_module("rbn.data.mnist"), "VALID", 10)
    return tmp_path


def test_splits_shapes_types_and_range(tiny: Path) -> None:
    data = mnist(root=tiny)
    parts = ((data.train, 20, 0), (data.valid, 10, 20), (data.test, 7, 100))
    for split, size, first in parts:
        assert split.inputs.shape == (784, size, 1)
        assert split.inputs.dtype == torch.float32
        assert split.inputs.is_contiguous()
        assert split.labels.dtype == torch.int64
        numbers = torch.arange(784)[:, None] + torch.arange(first, first + size)
        expected = numbers.remainder(256).float() / 255
        assert torch.equal(split.inputs[:, :, 0], expected)
    assert data.train.labels.tolist() == [i % 10 for i in range(20)]
    assert data.valid.labels.tolist() == [i % 10 for i in range(20, 30)]
    assert data.test.labels.tolist() == list(range(7))


@pytest.mark.parametrize("order", ["permutation", "with-replacement"])
def test_pixels_are_read_in_the_order(tiny: Path, order: Any) -> None:
    plain, ordered = mnist(root=tiny), pmnist(order, root=tiny, seed=5)
    pixels = pixel_order(order, 5)
    for name in ("train", "valid", "test"):
        before, after = getattr(plain, name), getattr(ordered, name)
        assert torch.equal(after.inputs, before.inputs[pixels])
        assert torch.equal(after.labels, before.labels)
    assert torch.equal(mnist(order, root=tiny, seed=5).train.inputs, ordered.train.inputs)


def test_pmnist_is_a_permutation_by_default(tiny: Path) -> None:
    expected = mnist(root=tiny).test.inputs[pixel_order("permutation")]
    assert torch.equal(pmnist(root=tiny).test.inputs, expected)


def test_orders() -> None:
    assert torch.equal(pixel_order("rows", 3), torch.arange(784))
    for seed in range(5):
        permutation = pixel_order("permutation", seed)
        assert permutation.dtype == torch.int64
        assert not torch.equal(permutation, torch.arange(784))
        assert torch.equal(permutation.sort().values, torch.arange(784))
        assert torch.equal(permutation, pixel_order("permutation", seed))
        assert not torch.equal(permutation, pixel_order("permutation", seed + 1))
        drawn = pixel_order("with-replacement", seed)
        assert drawn.dtype == torch.int64
        assert drawn.shape == (784,)
        assert 0.58 < len(drawn.unique()) / 784 < 0.68  # 1 - 1/e is 0.632
        assert torch.equal(drawn, pixel_order("with-replacement", seed))


def test_orders_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    pixel_order("permutation")
    pixel_order("with-replacement")
    assert torch.equal(torch.get_rng_state(), before)


def test_unknown_order() -> None:
    order: Any = "columns"
    with pytest.raises(ValueError, match=r"order.*rows, permutation, with-replace"):
        mnist(order)


def test_without_the_files(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match=r"train-images-idx3-ubyte\.gz, 9,912,422 bytes"):
        mnist(root=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at least 8 bytes, got 0"),
        (idx(0x801, 2, content=b"\1\2")[:7], "at least 8 bytes, got 7"),
        (idx(0x803, 2, content=b"\1\2"), "magic number 0x0801, got 0x0803"),
        (idx(0x801, 3, content=b"\1\2"), r"\[3\], got 2 bytes"),
        (idx(0x801, 1, content=b"\1\2"), r"\[1\], got 2 bytes"),
    ],
)
def test_wrong_idx_files(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_idx(content, 0x801)


@pytest.fixture(scope="module")
def real_mnist(real: Path) -> Splits:
    return mnist(root=real)


def test_real_sizes_and_range(real_mnist: Splits) -> None:
    parts = ((real_mnist.train, 50_000), (real_mnist.valid, 10_000), (real_mnist.test, 10_000))
    for split, size in parts:
        assert split.inputs.shape == (784, size, 1)
        assert split.inputs.min() == 0
        assert split.inputs.max() == 1
        assert split.labels.unique().tolist() == list(range(10))
    assert real_mnist.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert real_mnist.test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    # The known mean brightness of the 60,000 images.
    total = 50_000 * real_mnist.train.inputs.mean() + 10_000 * real_mnist.valid.inputs.mean()
    assert abs(total / 60_000 - 0.1307) < 1e-4
