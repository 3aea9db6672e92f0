"""Batches of windows of a long stream of characters."""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.data.epochs import batch_bounds, batch_count, epoch_generator

_AT_ONCE = 2**20  # about how many characters to gather at once, to save kernel launches


class Windows:
    """Non-overlapping windows of a stream, cut and shuffled anew in every epoch.

    An epoch's cut and order depend only on `seed` and the epoch's number, so any batch can be made
    without the earlier ones. The windows are contiguous from a random offset, drawn anew in every
    epoch, so that all characters are used over the epochs. All epochs have the same number of
    windows. Windows that do not fill a batch are dropped, different ones in each epoch.

    With ``shuffle=False``, for evaluation, the windows begin at the first character in every epoch,
    and the characters after the last full window are dropped. Batch k of n has windows k, k + n,
    k + 2n, ..., from all over the text, like a shuffled batch: neighbouring windows are too similar
    for the statistics of a batch. Batch sizes differ by at most one.

    Args:
        stream: integers ``[n]``. Batches are on its device.
        length: number of characters in a window.
        batch_size: number of windows in a batch.
        seed: random seed of cuts and orders.
        shuffle: whether cut and order are random.
    """

    def __init__(
        self,
        stream: Tensor,
        length: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if stream.dim() != 1:
            raise ValueError(f"stream must have one dimension, got shape {tuple(stream.shape)}")
        if stream.is_floating_point() or stream.is_complex():
            raise TypeError(f"stream must hold integers, got {stream.dtype}")
        if length < 2:
            raise ValueError(f"length must be at least 2, got {length}")
        self.stream = stream
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        # As many as fit after any of `length` offsets, so that all epochs have the same size.
        last_offset = length - 1 if shuffle else 0
        self.windows_per_epoch = max(len(stream) - last_offset, 0) // length
        self.batches_per_epoch = batch_count(
            self.windows_per_epoch, batch_size, shuffle, f"windows of {length} characters"
        )
        # A window starting at each character, without a copy.
        self._windows = stream.unfold(0, length, 1)
        self._epoch = -1
        self._starts = torch.empty(0)
        # Consecutive batches [K, length, B]; then the epoch and the number of the first.
        self._together = max(1, min(_AT_ONCE // (length * batch_size), self.batches_per_epoch))
        self._gathered, self._gathered_from = torch.empty(0), (-1, -1)

    def starts(self, epoch: int) -> Tensor:
        """Where the windows of an epoch begin: int64 ``[windows_per_epoch]``."""
        if not self.shuffle:
            epoch = 0
        if epoch != self._epoch:
            self._starts = self._cut(epoch).to(self.stream.device)
            self._epoch = epoch
        return self._starts

    def batch(self, epoch: int, k: int) -> tuple[Tensor, Tensor]:
        """Batch `k` of an epoch, both counted from 0.

        Returns:
            Inputs, int64 ``[length - 1, B]``: all characters of the windows except the last; and
            targets of the same shape: the characters that follow them. Both are views of a tensor
            that later calls may return again, so do not modify them.
        """
        # Only for its error.
        batch_bounds(self.windows_per_epoch, self.batch_size, self.batches_per_epoch, epoch, k)
        if self.shuffle:
            characters = self._gather(epoch, k - k % self._together)[k % self._together]
        else:
            rows = self.starts(epoch)[k :: self.batches_per_epoch]
            characters = self._characters(rows[None])[0]
        return characters[:-1], characters[1:]

    def _gather(self, epoch: int, first: int) -> Tensor:
        """Consecutive shuffled batches of an epoch, starting at `first`: ``[K, length, B]``."""
        if self._gathered_from != (epoch, first):
            end = min(first + self._together, self.batches_per_epoch)
            rows = self.starts(epoch)[first * self.batch_size : end * self.batch_size]
            self._gathered = self._characters(rows.view(-1, self.batch_size))
            self._gathered_from = (epoch, first)
        return self._gathered

    def _characters(self, starts: Tensor) -> Tensor:
        """The windows that begin at `starts` ``[K, B]``: int64 ``[K, length, B]``."""
        windows = self._windows.index_select(0, starts.flatten()).view(*starts.shape, self.length)
        turned = windows.transpose(1, 2)
        # One copy in total; `to` makes none if the dtype is already int64.
        return turned.to(torch.int64, memory_format=torch.contiguous_format).contiguous()

    def _cut(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.windows_per_epoch) * self.length
        generator = epoch_generator(self.seed, epoch)
        unused = len(self.stream) - self.windows_per_epoch * self.length
        offset = torch.randint(unused + 1, (), generator=generator)
        return offset + self.length * torch.randperm(self.windows_per_epoch, generator=generator)
