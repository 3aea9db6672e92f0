"""Handwritten digits as sequences of pixels: small enough to come with scikit-learn."""

from __future__ import annotations

import torch

from rbn.data.split import Split, Splits

PIXELS = 64  # 8 x 8
CLASSES = 10
SIZES = (1200, 297, 300)  # train, valid, test; 1,797 images in all
_BRIGHTEST = 16


def digits(permuted: bool = False, *, seed: int = 0) -> Splits:
    """Scikit-learn's 1,797 images of 8x8 pixels, each a sequence of 64 pixels read row by row.

    Needs no download. For every split, inputs are float32 ``[64, N, 1]`` in [0, 1], labels int64
    ``[N]``.

    Args:
        permuted: put the pixels of all images into the same random order, so that neighbouring
            pixels are far apart in the sequence (the paper's harder task).
        seed: determines the division into 1,200 training, 297 validation and 300 test images, and
            the order of the pixels.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install 'recurrent-batchnorm[demo]'"
        ) from error
    if not isinstance(permuted, bool):
        raise TypeError(f"permuted must be true or false, got {permuted!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).T[:, :, None] / _BRIGHTEST
    if permuted:
        inputs = inputs[pixel_order(seed)]
    targets = torch.tensor(labels, dtype=torch.int64)
    shuffled = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    train, valid, test = (
        Split(inputs[:, rows].contiguous(), targets[rows]) for rows in shuffled.split(SIZES)
    )
    return Splits(train, valid, test)


def pixel_order(seed: int = 0) -> torch.Tensor:
    """The order in which permuted digits are read: a permutation of the 64 pixels, int64."""
    return torch.randperm(PIXELS, generator=torch.Generator().manual_seed(seed))
