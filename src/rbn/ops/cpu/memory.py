"""Large buffers in huge pages.

A training step touches hundreds of megabytes of fresh memory. With pages of 4 KiB, page faults can
cost more than the recurrence. On Linux a buffer may request pages of 2 MiB.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from typing import Any

import torch
from torch import Tensor

_PAGE = 2**21
_LEAST = 2 * _PAGE  # smaller buffers usually come from already mapped memory


@functools.lru_cache(maxsize=1)
def _madvise() -> Any | None:
    """The system call `madvise`, or None if there is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in huge pages, ``[..., I]`` and ``[G, I]`` to ``[..., G]``. No autograd."""
    rows = x.reshape(-1, x.shape[-1])
    product = empty(len(rows), len(weight), rows)
    torch.mm(rows, weight.t(), out=product)
    return product.view(*x.shape[:-1], len(weight))


def empty(rows: int, features: int, like: Tensor) -> Tensor:
    """Uninitialized ``[rows, features]`` with the dtype and device of `like`."""
    buffer = like.new_empty(rows, features)
    size = buffer.numel() * buffer.element_size()
    if size >= _LEAST and buffer.device.type == "cpu" and not torch.compiler.is_compiling():
        madvise = _madvise()
        if madvise is not None:  # only a hint: it may be refused
            start = -(-buffer.data_ptr() // _PAGE) * _PAGE
            end = (buffer.data_ptr() + size) // _PAGE * _PAGE
            madvise(start, end - start, mmap.MADV_HUGEPAGE)
    return buffer
