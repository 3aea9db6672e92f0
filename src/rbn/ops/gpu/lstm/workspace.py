"""Buffers for the LSTM's kernels: saved tensors, and small results in one allocation."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rbn.ops.definition import LSTM

if TYPE_CHECKING:
    from rbn.ops.gpu.lstm.plan import Plan


def stride_of(hidden: int) -> int:
    """Elements from one row of h to the next: rows start at multiples of 16 bytes."""
    return -(-hidden // 8) * 8


def saved_rows(batch: int) -> int:
    """Rows of saved tensors: an even number, because some kernels store them in pairs."""
    return batch + batch % 2


def sizes_to_save(shape: Sequence[int], save: bool) -> tuple[int, int, int]:
    """The numbers of elements to allocate for the cells, for the products W_h h, and beyond those.

    The extra elements let d(W_h h) reuse the memory of W_h h, see `backward`.

    shape: shape of the input term, ``[..., T, B, 4H]``.
    """
    *lead, T, B, G = shape
    R, rows, stride = math.prod(lead), saved_rows(B), stride_of(G // 4)
    cells = R * (T + 1 if save else 1) * rows * stride
    if not save:
        return cells, 0, 0
    return cells, R * T * rows * 4 * stride, B * G + 8 if R == 1 else 0


saved_sizes = functools.lru_cache(maxsize=256)(sizes_to_save)  # for ints, not a compiler's SymInts


class StatisticsLayout(NamedTuple):
    """Means and variances of the terms x, h and c in one allocation."""

    rows: list[int]  # rows of each term's statistics
    parts: list[Any]  # shape, strides and first element of each; None for absent ones
    at: list[tuple[str, int]]  # names and byte offsets of those that exist
    size: int  # elements, including those before the statistics


def statistics_layout(shapes: Sequence[tuple[int, ...] | None], begin: int = 0) -> StatisticsLayout:
    """The layout after `begin` elements; each part starts at a multiple of 16 bytes."""
    parts: list[Any] = []
    for shape in shapes:
        for _ in range(2):
            if shape is None:
                parts.append(None)
                continue
            strides = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
            parts.append((shape, strides, begin))
            begin += -(-math.prod(shape) // 4) * 4
    rows = [0 if shape is None else shape[-2] for shape in shapes]
    at = [(name, 4 * part[2]) for name, part in zip(LSTM.moments, parts, strict=True) if part]
    return StatisticsLayout(rows, parts, at, begin)


def steps_of(states: Tensor, hidden: int) -> Tensor:
    """The states after each step ``[..., T, B, H]`` in a buffer ``[..., T + 1, B, stride]``."""
    *lead, steps, batch, stride = states.shape
    begin = states.storage_offset() + batch * stride
    return states.as_strided((*lead, steps - 1, batch, hidden), states.stride(), begin)


def states_buffer(plan: Plan, stride: int, empty: bool = False) -> Tensor:
    """Allocate ``[R, T + 1, B, stride]``; step 1, the output's first, is aligned to 16 bytes.

    empty: whether to fill it with the bit pattern that the kernels call EMPTY.
    """
    lead, _, T, B, _ = plan.sizes
    shape, dtype, device = (*lead, T + 1, B, stride), plan.term.dtype, plan.term.device
    skip = -B * stride % 8
    size = math.prod(shape)
    padded = (skip + size,) if skip else shape
    if empty:
        bits = torch.int16 if dtype != torch.float32 else torch.int32
        buffer = torch.full(padded, -1, dtype=bits, device=device).view(dtype)
    else:
        buffer = torch.empty(padded, dtype=dtype, device=device)
    return buffer.narrow(0, skip, size).view(shape) if skip else buffer


class Workspace:
    """One allocation for the last cells, for memory that must start as zero, and for statistics.

    Triton kernels need only the statistics.

    Attributes:
        at: the addresses of `c_n`, `clear` and the statistics that exist.
        rows: the numbers of rows of the statistics of x, h and c.
    """

    def __init__(self, plan: Plan, separate: bool) -> None:
        """separate: whether each statistic gets its own memory."""
        self._plan, layout = plan, plan.moments
        self.rows = layout.rows
        full, device = torch.float32, plan.term.device
        ahead = plan.cell + plan.clear
        self._memory = torch.empty(ahead if separate else layout.size, dtype=full, device=device)
        first = self._memory.data_ptr()
        self.at = {"c_n": first, "clear": first + 4 * plan.cell}
        self._moments: list[Tensor | None] = []
        if separate:
            self._moments = [
                torch.empty(part[0], dtype=full, device=device) if part else None
                for part in layout.parts
            ]
            parts = zip(LSTM.moments, self._moments, strict=True)
            self.at |= {name: part.data_ptr() for name, part in parts if part is not None}
        else:
            for name, begin in layout.at:
                self.at[name] = first + begin

    def moments(self) -> list[Tensor | None]:
        """Mean and var of the terms x, h and c; None for absent ones."""
        if not self._moments:
            view = self._memory.as_strided
            self._moments = [view(*part) if part else None for part in self._plan.moments.parts]
        return self._moments

    def input_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and var of the input term, which must exist."""
        mean, var = self.moments()[:2]
        assert mean is not None
        assert var is not None
        return mean, var

    def cell(self) -> Tensor:
        """The memory for the last cells, padded to a multiple of 4 elements."""
        return self._memory.narrow(0, 0, self._plan.cell)

    def clear(self) -> Tensor:
        """The memory that must start as zero, as int32; may be empty."""
        return self._memory.view(torch.int32).narrow(0, self._plan.cell, self._plan.clear)
