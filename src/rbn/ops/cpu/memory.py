"""Large buffers, reused and in huge pages.

A training step touches hundreds of megabytes. The C library returns such buffers to the system when
they are freed, so the pages of the next step's buffers fault in and are cleared again, which can
cost more than the recurrence. So freed buffers stay here for the next step. Together with those in
use they never exceed the peak of memory in use, and Linux may reclaim their pages when it needs
memory. Buffers request pages of 2 MiB.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import mmap
import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

_PAGE = 2**21
_LEAST = 2 * _PAGE  # smaller buffers usually come from already mapped memory


class Pool:
    """Mapped memory, in use or free. Does nothing on systems other than Linux."""

    def __init__(self) -> None:
        self.peak = 0  # largest number of bytes in use
        self._used = 0  # bytes in use, or given back but not yet collected
        self._free: list[Any] = []  # least recently used first
        # A finalizer may run anywhere, even inside these methods, so it only appends.
        self._given_back: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes in use."""
        with self._lock:
            self._collect()
            return self._used

    @property
    def free(self) -> list[Any]:
        """The free blocks, kept for later use."""
        with self._lock:
            self._collect()
            return list(self._free)

    def take(self, size: int) -> Any | None:
        """Get at least `size` bytes, free again when the array is garbage; None if mmap fails."""
        size = -(-size // _PAGE) * _PAGE
        with self._lock:
            self._collect()
            fits = [k for k, block in enumerate(self._free) if size <= len(block) <= size * 5 // 4]
            if fits:  # of equally large ones the most recently used, which may be in the caches
                block = self._free.pop(min(reversed(fits), key=lambda k: len(self._free[k])))
            else:
                try:
                    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                    block = mmap.mmap(-1, size, flags=flags)
                except OSError:
                    return None
                _advise(block, "MADV_HUGEPAGE")
            self._used += len(block)
            self.peak = max(self.peak, self._used)
            self._unmap()
        memory = (ctypes.c_char * len(block)).from_buffer(block)
        weakref.finalize(memory, self._give_back, block).atexit = False
        return memory

    def _give_back(self, block: Any) -> None:
        _advise(block, "MADV_FREE")
        self._given_back.append(block)

    def _collect(self) -> None:
        while self._given_back:
            block = self._given_back.popleft()
            self._used -= len(block)
            self._free.append(block)
        self._unmap()

    def _unmap(self) -> None:
        while self._free and self._used + sum(map(len, self._free)) > self.peak:
            del self._free[0]


def _advise(block: Any, advice: str) -> None:
    """Give the system a hint, which it may not know or reject."""
    with contextlib.suppress(AttributeError, OSError):
        block.madvise(getattr(mmap, advice))


_pool = Pool()
_number = itertools.count()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in huge pages, ``[..., I]`` and ``[G, I]`` to ``[..., G]``. No autograd."""
    rows = x.reshape(-1, x.shape[-1])
    product = empty(len(rows), len(weight), rows)
    if rows.shape[1] == 1:
        torch.mul(rows, weight.t(), out=product)
    else:
        torch.mm(rows, weight.t(), out=product)
    return product.view(*x.shape[:-1], len(weight))


def empty(rows: int, features: int, like: Tensor) -> Tensor:
    """Uninitialized ``[rows, features]`` with the dtype and device of `like`."""
    size = rows * features * like.element_size()
    if size >= _LEAST and like.device.type == "cpu" and sys.platform == "linux":
        memory = None if torch.compiler.is_compiling() else _pool.take(size + 4096)
        if memory is not None:
            # Vary the offset within a page: rows of a power of two would share few cache lines.
            offset = 192 * next(_number) % 4096
            flat = torch.frombuffer(memory, dtype=like.dtype, count=rows * features, offset=offset)
            return flat.view(rows, features)
    return like.new_empty(rows, features)
