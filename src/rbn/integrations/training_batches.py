"""Reads a trainer's training data during training, without side effects on the training."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader


def check_batches(batches: Iterable[Any] | None, max_batches: int | None) -> None:
    """Check the arguments that the callbacks share."""
    if isinstance(batches, Iterator) or (batches is not None and not isinstance(batches, Iterable)):
        raise TypeError(
            "batches must be an iterable that can be read many times, such as a DataLoader or a "
            f"list, got {type(batches).__name__}"
        )
    if max_batches is not None and (isinstance(max_batches, bool) or max_batches < 1):
        raise ValueError(f"max_batches must be a positive integer or None, got {max_batches!r}")


def check_loader(loader: object) -> None:
    """Check that `read` can read a trainer's training data."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            "ExactStatistics reads the training data from a torch.utils.data.DataLoader, got "
            f"{type(loader).__name__}: pass batches=, an iterable of training batches"
        )


def read(batches: Iterable[Any], max_batches: int | None) -> Iterator[Any]:
    """Yield the first batches of a pass over the data, without changing a `DataLoader`.

    Copies its samplers and generators, so that a pass already in progress continues with the same
    samples.
    """
    if isinstance(batches, DataLoader):
        batches = _copied(batches)
    yield from itertools.islice(batches, max_batches)


def _copied(loader: DataLoader[Any]) -> DataLoader[Any]:
    # Accelerate's loaders change its gradient accumulation state; the loader they wrap does not.
    loader = getattr(loader, "base_dataloader", loader)
    shared = [loader.dataset, getattr(loader.sampler, "data_source", None)]
    memo: dict[int, Any] = {id(data): data for data in shared if data is not None}
    copied = copy.copy(loader)
    # Through __dict__, because DataLoader does not allow setting most of these.
    for name in ("sampler", "batch_sampler", "generator"):
        copied.__dict__[name] = copy.deepcopy(getattr(loader, name), memo)
    copied.__dict__["_iterator"] = None  # the iterator of persistent workers
    return copied


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore all global random states after the ``with`` block."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(arrays)
