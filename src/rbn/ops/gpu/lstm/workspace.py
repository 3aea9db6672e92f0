"""Buffers of the LSTM's kernels: saved tensors, and one allocation for all small results."""

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


FAR = 32  # elements of padding that keep results and counters in different cache lines


def vector_size(elements: int) -> int:
    """Float32 elements that a vector occupies, padded to a multiple of 16 bytes."""
    return -(-elements // 4) * 4


def laid_out(sizes: dict[str, int], begin: int) -> dict[str, int]:
    """Byte offsets of parts laid out one after another from `begin`. sizes: in bytes."""
    results = {}
    for name, size in sizes.items():
        results[name] = begin
        begin += size
    return results


def stride_of(hidden: int) -> int:
    """Elements from one row of h to the next, so that rows start at multiples of 16 bytes."""
    return -(-hidden // 8) * 8


def saved_rows(batch: int) -> int:
    """Rows of saved tensors: even, because some kernels store rows in pairs."""
    return batch + batch % 2


def sizes_to_save(shape: Sequence[int], save: bool) -> tuple[int, int, int]:
    """Elements to allocate for the cells, for the products W_h h, and in addition to the products.

    The additional elements let d(W_h h) reuse the memory of W_h h, see `backward._consumed`.

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
    """One allocation for the small buffers of the forward pass.

    In order: the last cells, memory that must start as zero, the parameters `VECTORS` in float32,
    the statistics. The Triton kernels need only the statistics.

    Attributes:
        memory: the allocation, float32.
        first: its address.
    """

    def __init__(self, plan: Plan, separate: bool) -> None:
        """separate: whether each statistic gets its own memory."""
        self._plan = plan
        full, device = torch.float32, plan.term.device
        size = plan.ahead if separate else plan.moments.size
        self.memory = torch.empty(size, dtype=full, device=device)
        self.first = self.memory.data_ptr()
        self._moments: list[Tensor | None] = []
        if separate:
            self._moments = [
                torch.empty(part[0], dtype=full, device=device) if part else None
                for part in plan.moments.parts
            ]

    def at(self) -> dict[str, int]:
        """The addresses for the forward kernel, by struct member."""
        first = self.first
        results = {name: first + begin for name, begin in self._plan.places}
        if self._moments:
            pairs = zip(LSTM.moments, self._moments, strict=True)
            results |= {name: part.data_ptr() for name, part in pairs if part is not None}
        return results

    def moments(self) -> list[Tensor | None]:
        """Mean and var of the terms x, h and c; None for absent ones."""
        if not self._moments:
            view = self.memory.as_strided
            self._moments = [view(*part) if part else None for part in self._plan.moments.parts]
        return self._moments

    def input_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and var of the input term, which must exist."""
        mean, var = self.moments()[:2]
        assert mean is not None
        assert var is not None
        return mean, var

    def part(self, begin: int, size: int) -> Tensor:
        """A part of the memory, for Triton."""
        return self.memory.narrow(0, begin, size)


class Scratch:
    """One allocation for the float32 buffers of the backward pass in CUDA C++.

    In order: the gradients of the last states, memory that must start as zero, the gradients of
    `VECTORS` (and of w with one feature), raised variances, and the transposed W_h.

    Attributes:
        memory: the allocation, float32.
        at: the addresses of its parts, by struct member.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        size = plan.scratch["end"] // 4
        self.memory = torch.empty(size, dtype=torch.float32, device=plan.term.device)
        first = self.memory.data_ptr()
        self.at = {name: first + begin for name, begin in plan.scratch.items()}

    def part(self, name: str, *shape: int) -> Tensor:
        """One of the parts."""
        strides = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        return self.memory.as_strided(shape, strides, self._plan.scratch[name] // 4)
