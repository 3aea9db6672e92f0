"""Chooses the kernels that run a call of the LSTM."""

from __future__ import annotations

import functools

import torch

from rbn.ops.definition import LSTMArguments
from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.persistent.tiles import (
    Tiles,
    make_tiles,
    multiprocessors,
    shared_memory,
    widens,
)
from rbn.ops.gpu.lstm.term import Term

CUDA = "one kernel in CUDA C++"
PERSISTENT = "one persistent kernel"
STEPS = "a product and a kernel for each step"

# Bytes of W_h that the persistent Triton kernels may read from L2 in every step, at most.
STREAMED = 24 * 2**20


def tiles_for(term: Term) -> Tiles | None:
    """The tiles of the persistent Triton kernels; None if the batch is too large for a tile."""
    R = term.shape[0] if len(term.shape) == 4 else 1
    B, G = term.shape[-2:]
    where = (term.device.index or 0) if term.is_cuda else None
    return _tiles(R, B, G // 4, term.dtype, where)


@functools.lru_cache(maxsize=256)
def _tiles(R: int, B: int, H: int, dtype: torch.dtype, where: int | None) -> Tiles | None:
    if where is None:
        return make_tiles(R, B, H, None)
    widened = dtype != torch.float32 and widens(where)
    sizes = (R, B, H, multiprocessors(where), dtype.itemsize, shared_memory(where))
    return make_tiles(*sizes, widened)


def is_streamed(term: Term) -> bool:
    """Whether W_h is far too large to stay on the chip."""
    G = term.shape[-1]
    return G * (G // 4) * term.dtype.itemsize > STREAMED


def choose(term: Term, a: LSTMArguments) -> str:
    """Choose the path: `CUDA`, `PERSISTENT` (in Triton) or `STEPS`.

    The CUDA C++ kernels are the fastest for the calls they cover. A persistent Triton kernel
    supports any option, but holds all rows of its units in registers, and all its programs must be
    on the GPU at once. So the batch must fit into a tile, and the layer onto the GPU. The part of
    W_h that does not stay on the chip is read again in every step, more slowly than in a cuBLAS
    product; beyond `STREAMED` bytes that costs more than the saved launches. All remaining calls
    run step by step, which supports any shape.
    """
    if cuda_kernels.covers(term, a):
        return CUDA
    tiles = tiles_for(term)
    if tiles is None or not tiles.persistent or is_streamed(term):
        return STEPS
    return PERSISTENT
