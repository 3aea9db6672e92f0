"""Batches of labelled sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.data.epochs import batch_bounds, batch_count, epoch_generator
from rbn.data.split import Split


class Minibatches:
    """Minibatches of a split, shuffled in every epoch.

    An epoch's order depends only on `seed` and the epoch's number, so any batch can be made without
    the earlier ones. Sequences that do not fill a batch are dropped, different ones in each epoch.

    With ``shuffle=False``, for evaluation, sequences come in order, and the last batch may be
    smaller.

    Args:
        split: inputs ``[T, N, features]`` and labels ``[N]``. Batches are on its device.
        batch_size: number of sequences in a batch.
        seed: random seed of the order.
        shuffle: whether the order is random.
    """

    def __init__(
        self, split: Split, batch_size: int, seed: int = 0, *, shuffle: bool = True
    ) -> None:
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.batches_per_epoch = batch_count(len(split), batch_size, shuffle, "sequences")
        self._epoch = -1
        self._order = torch.empty(0)

    def order(self, epoch: int) -> Tensor:
        """The rows of the split in the order of an epoch: int64 ``[N]``."""
        if not self.shuffle:
            epoch = 0
        if epoch != self._epoch:
            order = torch.arange(len(self.split))
            if self.shuffle:
                order = torch.randperm(len(order), generator=epoch_generator(self.seed, epoch))
            self._order = order.to(self.split.labels.device)
            self._epoch = epoch
        return self._order

    def batch(self, epoch: int, k: int) -> tuple[Tensor, Tensor]:
        """Batch `k` of an epoch, both counted from 0.

        Returns:
            Inputs ``[T, B, features]`` and labels ``[B]``.
        """
        first, end = batch_bounds(
            len(self.split), self.batch_size, self.batches_per_epoch, epoch, k
        )
        rows = self.order(epoch)[first:end]
        return self.split.inputs.index_select(1, rows), self.split.labels[rows]
