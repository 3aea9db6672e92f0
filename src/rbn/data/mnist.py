"""MNIST as sequences of pixels."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from rbn.data.files import load
from rbn.data.split import Split, Splits

PIXELS = 784  # 28 x 28
CLASSES = 10
VALID = 10_000  # the last of the training file
_BRIGHTEST = 255
_IMAGES, _LABELS = 0x0803, 0x0801  # the files' first four bytes

Order = Literal["rows", "permutation", "with-replacement"]


def mnist(
    order: Order = "rows",
    *,
    seed: int = 0,
    root: str | Path | None = None,
    download: bool = False,
) -> Splits:
    """Handwritten digits of 28x28 pixels, each a sequence of 784 pixels.

    The training file's first 50,000 images are for training, its last 10,000 for validation; the
    test set has 10,000. Inputs are float32 ``[784, N, 1]`` in [0, 1], labels int64 ``[N]``.

    Args:
        order: the order in which the pixels of every image are read (see `pixel_order`).
        seed: random seed of the order.
        root: the data folder; by default RBN_DATA, else ``~/.cache/rbn/data``.
        download: download missing files.
    """
    pixels = pixel_order(order, seed)
    files = load("mnist", root, fetch=download)
    train_images, train_labels, test_images, test_labels = (
        read_idx(file, magic)
        for file, magic in zip(files, (_IMAGES, _LABELS, _IMAGES, _LABELS), strict=True)
    )
    first = len(train_labels) - VALID
    return Splits(
        _split(train_images[:first], train_labels[:first], pixels),
        _split(train_images[first:], train_labels[first:], pixels),
        _split(test_images, test_labels, pixels),
    )


def pmnist(
    order: Literal["permutation", "with-replacement"] = "permutation",
    *,
    seed: int = 0,
    root: str | Path | None = None,
    download: bool = False,
) -> Splits:
    """`mnist` with the pixels of all images in the same random order."""
    return mnist(order, seed=seed, root=root, download=download)


def pixel_order(order: Order, seed: int = 0) -> Tensor:
    """Which pixel is read at each step, int64 ``[784]``.

    Args:
        order: ``"rows"``: from left to right and from top to bottom. ``"permutation"``: each pixel
            once, in random order, as in the paper. ``"with-replacement"``: each step draws from all
            784 pixels, as in the authors' code, so about 63% of the pixels are seen, some of them
            more than once. The draw uses torch's generator, so the order differs from theirs.
        seed: random seed of the order; ``"rows"`` ignores it.
    """
    generator = torch.Generator().manual_seed(seed)
    if order == "rows":
        return torch.arange(PIXELS)
    if order == "permutation":
        return torch.randperm(PIXELS, generator=generator)
    if order == "with-replacement":
        return torch.randint(PIXELS, (PIXELS,), generator=generator)
    raise ValueError(f"order must be one of {', '.join(get_args(Order))}, got {order!r}")


def read_idx(content: bytes, magic: int) -> Tensor:
    """Read an array in MNIST's file format (idx), uint8.

    Args:
        content: a magic number, the sizes, and then one byte per number.
        magic: what the file must start with; its last byte is the number of dimensions.
    """
    dimensions = magic & 0xFF
    header = 4 * (1 + dimensions)
    if len(content) < header:
        raise ValueError(f"an idx file has at least {header} bytes, got {len(content)}")
    actual, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    if actual != magic:
        raise ValueError(f"expected the magic number {magic:#06x}, got {actual:#06x}")
    numbers = torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:]
    if len(numbers) != torch.Size(shape).numel():
        raise ValueError(f"expected an array of shape {shape}, got {len(numbers)} bytes")
    return numbers.view(shape)


def _split(images: Tensor, labels: Tensor, pixels: Tensor) -> Split:
    # Reorder bytes, which is a quarter of the memory traffic of float32.
    inputs = images.reshape(len(images), PIXELS).T.contiguous()[pixels].to(torch.float32)
    return Split(inputs.div_(_BRIGHTEST).unsqueeze(-1), labels.to(torch.int64))
