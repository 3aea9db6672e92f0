"""Which kernels run a call of the LSTM."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.persistent.tiles import (
    Plan,
    make_plan,
    multiprocessors,
    shared_memory,
    widens,
)
from rbn.ops.gpu.lstm.signature import Inputs

CUDA = "one kernel in CUDA C++"
PERSISTENT = "one persistent kernel"
STEPS = "a product and a kernel for each step"

# Bytes of W_h that persistent kernels may read from L2 in every step, at most.
STREAMED = 24 * 2**20


def plan_for(wx: Tensor) -> Plan | None:
    """How to run over an input term ``[R, T, B, 4H]``, or ``[T, B, 4H]`` for one recurrence."""
    R = wx.shape[0] if wx.dim() == 4 else 1
    B, G = wx.shape[-2:]
    where = (wx.device.index or 0) if wx.is_cuda else None
    if torch.compiler.is_compiling():  # which looks through caches, and says so
        return _new_plan(R, B, G // 4, wx.dtype, where)
    return _plan(R, B, G // 4, wx.dtype, where)


def _new_plan(R: int, B: int, H: int, dtype: torch.dtype, where: int | None) -> Plan | None:
    if where is None:
        return make_plan(R, B, H, None)
    widened = dtype != torch.float32 and widens(where)
    sizes = (R, B, H, multiprocessors(where), dtype.itemsize, shared_memory(where))
    return make_plan(*sizes, widened)


_plan = functools.lru_cache(maxsize=256)(_new_plan)


def is_streamed(wx: Tensor) -> bool:
    """Whether W_h of a layer with this input term ``[..., 4H]`` is far too large for the chip."""
    G = wx.shape[-1]
    return G * (G // 4) * wx.itemsize > STREAMED


def choose(a: Inputs) -> str:
    """`CUDA`, `PERSISTENT` (in Triton) or `STEPS`, for an input term ``[R, T, B, 4H]``.

    The kernels in CUDA C++ are the fastest for what they cover. A persistent kernel in Triton takes
    any option, but holds all rows of its units in registers, and all its programs must be on the
    card at once: neither a batch too large for a tile nor a layer too large for the card will do.
    What of W_h does not stay on the chip it reads in every step, at less than the speed of a
    product of cuBLAS; beyond `STREAMED` bytes that costs more than the launches it saves. All of
    those calls go step by step, which takes any shape.
    """
    if cuda_kernels.covers(a):
        return CUDA
    plan = plan_for(a.wx)
    if plan is None or not plan.persistent or is_streamed(a.wx):
        return STEPS
    return PERSISTENT
