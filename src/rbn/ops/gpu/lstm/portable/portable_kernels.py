"""CUDA C++ kernels for every GPU of compute capability 8.0 or later.

A block owns 8 units and keeps its part of W_h in shared memory or registers. See
``portable_forward.cu`` and ``portable_backward.cu``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from rbn.ops.gpu.lstm.term import Term
from rbn.ops.gpu.runtime import nvrtc
from rbn.ops.gpu.runtime.driver import Kernel, shared_limit
from rbn.ops.gpu.runtime.nvrtc import Program

UNITS = 8
_SHARED = 227 * 1024  # bytes of shared memory that a block may use on an H100 or H200
_MOST_TILES = 8  # tiles of 16 rows


@dataclass(frozen=True)
class PortableTiling:
    """How the product of one kernel is divided among the warps of a block.

    Attributes:
        tiles: tiles of 16 rows.
        row_warps, column_warps: warps that divide the rows, and the columns of W_h.
        chunk: blocks of columns that a warp loads at once.
        registers: whether the weights stay in registers instead of shared memory.
        barrier: whether the blocks synchronize through a counter. Otherwise they poll the data
            itself, in a buffer that starts as EMPTY.
    """

    tiles: int
    row_warps: int
    column_warps: int
    chunk: int
    registers: bool
    barrier: bool = False

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.row_warps * self.column_warps


def shared_bytes(direction: str, tiling: PortableTiling, dtype: torch.dtype, hidden: int) -> int:
    """Bytes of shared memory, as the kernels lay it out."""
    forward, warps = direction == "forward", tiling.row_warps * tiling.column_warps
    pitch, sums, given, columns = (40, 64, 144, 4) if forward else (8, 96, 112, 1)
    part = tiling.column_warps * 16 * tiling.tiles * pitch
    width = 16 if dtype == torch.float32 else 32  # columns of W_h in a block
    blocks = -(-(hidden if forward else 4 * hidden) // width)
    per_warp = -(-blocks // tiling.column_warps)
    weights = 0 if tiling.registers else per_warp * tiling.column_warps * columns * 32 * 16
    return 4 * (part + sums * (warps | 1) + sums + 96 + given) + weights


@functools.lru_cache(maxsize=256)
def choose(
    direction: str, dtype: torch.dtype, batch: int, hidden: int, limit: int = _SHARED
) -> PortableTiling | None:
    """The tiling of the forward or the backward kernel.

    None if it needs more than `limit` bytes of shared memory, or if the batch has too many rows.
    """
    tiles = -(-batch // 16)
    if tiles > _MOST_TILES:
        return None
    tiling = (_forward if direction == "forward" else _backward)(dtype, tiles, hidden)
    return tiling if shared_bytes(direction, tiling, dtype, hidden) <= limit else None


def _forward(dtype: torch.dtype, tiles: int, hidden: int) -> PortableTiling:
    half = dtype != torch.float32
    blocks = -(-hidden // (32 if half else 16))
    many = blocks > 8 * (2 - half)
    if many and tiles > 1:
        return _for_many_columns(tiles)
    # Each warp has few weights, or the batch is small: poll the data.
    columns = 8 if many else _column_warps(tiles)
    per_warp = -(-blocks // columns)
    return PortableTiling(tiles, tiles, columns, min(4, per_warp), half and per_warp <= 4)


def _backward(dtype: torch.dtype, tiles: int, hidden: int) -> PortableTiling:
    half = dtype != torch.float32
    blocks = -(-4 * hidden // (32 if half else 16))
    if tiles == 1 and blocks >= 64:  # few waits for many columns each, because a wait has a latency
        return PortableTiling(1, 1, 8, min(12 if half else 8, -(-blocks // 8)), False, True)
    if blocks > 64:
        return _for_many_columns(tiles)
    return PortableTiling(tiles, tiles, _column_warps(tiles), 4, False, barrier=True)


def _column_warps(tiles: int) -> int:
    """Column warps such that a block has 4 to 8 warps."""
    return 1 if tiles > 4 else 2 if tiles > 1 else 4


def _for_many_columns(tiles: int) -> PortableTiling:
    rows = 1 if tiles <= 4 else 2
    return PortableTiling(-(-tiles // rows) * rows, rows, 8 // rows, 2, False, barrier=True)


def fits(term: Term) -> bool:
    """Whether all blocks of a call fit on the GPU at once."""
    *lead, _, B, G = term.shape
    return _fits(term.dtype, lead[0] if lead else 1, B, G // 4, term.device.index or 0)


@functools.lru_cache(maxsize=256)
def _fits(dtype: torch.dtype, recurrences: int, batch: int, hidden: int, device: int) -> bool:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    limit = shared_limit(device)
    return bool(
        hidden % 2 == 0
        and processors >= recurrences * -(-hidden // UNITS)
        and choose("forward", dtype, batch, hidden, limit) is not None
        and choose("backward", dtype, batch, hidden, limit) is not None
    )


def macros(tiling: PortableTiling, shared: int, defines: tuple[Any, ...]) -> dict[str, int]:
    """The macros of a kernel: those of the call and those of the tiling."""
    return dict(defines) | {
        "MT": tiling.tiles,
        "MW": tiling.row_warps,
        "KS": tiling.column_warps,
        "CHUNK": tiling.chunk,
        "REGISTERS": int(tiling.registers),
        "BARRIER": int(tiling.barrier),
        "SHARED_BYTES": shared,
        "FEW": int(tiling.tiles == 1),  # a warp owns all rows and reduces over them alone
    }


def program(
    direction: str, tiling: PortableTiling, device: int, shared: int, defines: tuple[Any, ...]
) -> Program:
    """What to compile for a tiling."""
    arch = nvrtc.architecture_of(device)
    return f"portable_{direction}", macros(tiling, shared, defines), arch


@functools.lru_cache(maxsize=256)
def kernel(
    direction: str, tiling: PortableTiling, device: int, shared: int, defines: tuple[Any, ...]
) -> Kernel:
    """The kernel, compiled if necessary."""
    wanted = program(direction, tiling, device, shared, defines)
    return Kernel(nvrtc.compiled(*wanted), wanted[0], tiling.threads, shared)
