"""Epochs that can be resumed at any batch."""

from __future__ import annotations

import hashlib

import torch


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """A CPU generator that depends only on seed and epoch."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def batch_bounds(count: int, batch_size: int, batches: int, epoch: int, k: int) -> tuple[int, int]:
    """The first row of batch `k` and the row after its last one. Raises `IndexError`."""
    if epoch < 0:
        raise IndexError(f"epoch must be at least 0, got {epoch}")
    if not 0 <= k < batches:
        raise IndexError(f"batch must be from 0 to {batches - 1}, got {k}")
    return k * batch_size, min((k + 1) * batch_size, count)


def batch_count(count: int, batch_size: int, shuffle: bool, what: str) -> int:
    """The number of batches in an epoch.

    Shuffled epochs have only full batches; otherwise the last batch may be smaller.

    Args:
        count: number of examples.
        batch_size: size of a full batch.
        shuffle: whether the examples come in random order.
        what: what the examples are, for the error message if there are too few.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    batches = count // batch_size if shuffle else -(-count // batch_size)
    if batches == 0:
        raise ValueError(f"too few {what} for one batch of {batch_size}: {count}")
    return batches
