"""CUDA C++ kernels for wide LSTM layers, whose blocks share work in teams.

A block owns 16 units, so that layers of up to 16 units per multiprocessor fit on the GPU. See
``grid.cuh`` for how the blocks of a team divide the product, and ``grid_splits.cuh`` for
batches whose rows are split over several blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from rbn.ops.gpu.lstm.term import Term
from rbn.ops.gpu.runtime import nvrtc
from rbn.ops.gpu.runtime.driver import Kernel, shared_limit
from rbn.ops.gpu.runtime.nvrtc import Program
from rbn.ops.gpu.runtime.occupancy import clusters

UNITS = 16
# Supported dtypes. float32 factors are rounded to float16, which has as many mantissa bits as tf32,
# so tf32 must be allowed.
TYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
_THREADS = 256
_ROWS = 128

# Batch size (smallest first) -> the hidden size from which these kernels are preferred, for batches
# of up to that size and of more than 32 rows that the `portable` kernels cover as well. Without
# splits, blocks of 64 rows are used only if listed here.
PREFERRED: dict[int, int] = {64: 264, _ROWS: 136}
# The same for up to 32 rows: the smallest batch size and hidden size, for 16 bits and for float32.
_FEW_ROWS = 32
PREFERRED_FEW = {True: ((16, 1000), (32, 512)), False: ((16, 768), (32, 512))}

# Batches of more than `UNSPLIT` rows are split over at most `SPLITS` blocks; a GPU may refuse
# clusters of more than 8. `SPLIT_ROWS` are the possible numbers of rows per split, the best first.
SPLITS = 8
SPLIT_ROWS: tuple[int, ...] = (64, _ROWS)
UNSPLIT = 64

# Blocks per team, the best first. A larger team reads less from L2, but its blocks exchange more
# sums.
TEAMS: dict[str, tuple[int, ...]] = {"forward": (1,), "backward": (8, 4)}
_SIDE = {"forward": 64, "backward": 16}  # columns of the product per block
_PASSED = {"forward": 1, "backward": 4}  # pieces of 16 columns that a block passes on in a step
# float32 elements of shared memory besides the weights: sums of each warp, tables with an entry per
# column (80) or unit (16), parameters, 2 barriers.
_NUMBERS = {
    "forward": 8 * 144 + 4 * 80 + 3 * 16 + 4,
    "backward": 8 * 192 + 10 * 80 + 6 * 16 + 3 * 64 + 2 * 16 + 4,
}
_EXCHANGED = {"forward": 128 + 32, "backward": 192 + 32}  # sums that splits exchange
_DEPTH = 8  # groups prefetched; more would need too many registers
_PARTS = 4  # the number of groups is a multiple of this: slices start at 2 or 4 positions


@dataclass(frozen=True)
class GridTiling:
    """How the weights of a block are divided.

    `first`, `resident` and `second` count groups of 32 columns of h or d(W_h h). The first and
    second groups are loaded in every step; the resident ones stay in shared memory.
    """

    direction: str
    blocks: int  # per recurrence and split
    team: int  # blocks per team
    first: int
    resident: int
    second: int
    rows: int = _ROWS
    half: bool = True  # whether the dtype has 16 bits; weights and passed values always do
    splits: int = 1  # parts of the batch, each with `blocks` blocks

    @property
    def slice(self) -> int:
        """Groups per block."""
        return self.first + self.resident + self.second

    @property
    def group(self) -> int:
        """Bytes of a group of weights."""
        return 64 * _SIDE[self.direction] * self.team

    @property
    def shared(self) -> int:
        """Bytes of shared memory, as the kernels lay it out."""
        weights = (self.first + self.resident) * self.group
        return weights + 4 * (_NUMBERS[self.direction] + self._for_splits)

    @property
    def _for_splits(self) -> int:
        """Elements: 4 barriers, and two buffers for what the other splits send."""
        return 8 + 2 * self.splits * _EXCHANGED[self.direction] if self.splits > 1 else 0

    @property
    def passed(self) -> int:
        """Bytes that the blocks of a split pass to each other per step.

        In float32, backward, each warp of 16 rows also passes a power of two with every 4 pieces.
        """
        pieces = 2 * self.slice * self.team
        scaled = not self.half and self.direction == "backward"
        return pieces * 16 * 2 * self.rows + (pieces * self.rows // 16 if scaled else 0)

    @property
    def spilled(self) -> int:
        """Bytes of the non-resident weights of all blocks."""
        return self.splits * self.blocks * (self.first + self.second) * self.group

    @property
    def handed(self) -> int:
        """Bytes of the sums that a block gets from its team; in float32 with powers of two."""
        powers = 0 if self.half else self.rows // 4  # 4 bytes per warp
        return (self.team - 1) * _SIDE[self.direction] * self.rows * 2 + powers


def grid_tiling(
    direction: str,
    hidden: int,
    team: int,
    limit: int,
    rows: int = _ROWS,
    half: bool = True,
    splits: int = 1,
) -> GridTiling | None:
    """The tiling with the fewest slots that fits into `limit` bytes of shared memory, or None."""
    blocks = -(-hidden // UNITS)
    grid = -(-blocks // team) * team
    groups = -(-blocks * _PASSED[direction] // (2 * team * _PARTS)) * _PARTS
    for slots in range(groups + 1):
        empty = GridTiling(direction, grid, team, slots, 0, slots, rows, half, splits)
        resident = min(groups, (limit - empty.shared) // empty.group)
        if resident < 3:  # the second groups are loaded while resident ones are in use
            return None
        again = groups - resident
        if again <= 2 * slots:
            first = min(slots, again)
            return dataclasses.replace(empty, first=first, resident=resident, second=again - first)
    return None


def _preferred_rows(batch: int, hidden: int) -> int | None:
    for rows, least in PREFERRED.items():
        if batch <= rows:
            return rows if hidden >= least else None
    return None


def preferred(wx: Term) -> bool:
    """Whether these kernels are preferred over `portable`, which would also run (see `choose`)."""
    *_, B, G = wx.shape
    H = G // 4
    if B > _FEW_ROWS:
        wanted = _preferred_rows(B, H) is not None
    else:
        few = PREFERRED_FEW[wx.dtype != torch.float32]
        wanted = any(rows <= B and hidden <= H for rows, hidden in few)
    return wanted and fits(wx)


def fits(wx: Term) -> bool:
    """Whether both kernels support an input term (see `choose`)."""
    return all(choose(d, wx) for d in TEAMS)


def choose(direction: str, wx: Term) -> GridTiling | None:
    """The best tiling for an input term ``[T, B, 4H]`` or ``[R, T, B, 4H]``, or None."""
    *lead, _, B, G = wx.shape
    half = wx.dtype != torch.float32
    if wx.dtype not in TYPES or G % 16:
        return None
    for rows in SPLIT_ROWS if B > UNSPLIT else (_preferred_rows(B, G // 4) or _ROWS,):
        splits = -(-B // rows)
        if splits <= SPLITS:
            sizes = lead[0] if lead else 1, G // 4, rows, half, splits
            if tiling := _choose(direction, *sizes, wx.device.index or 0):
                return tiling
    return None


@functools.lru_cache(maxsize=256)
def _choose(
    direction: str, recurrences: int, hidden: int, rows: int, half: bool, splits: int, device: int
) -> GridTiling | None:
    if torch.cuda.get_device_capability(device) != (9, 0):  # the instructions are Hopper's
        return None
    if nvrtc.version() < nvrtc.FOR_HOPPER:
        return None
    available = torch.cuda.get_device_properties(device).multi_processor_count
    if splits > 1:
        available = clusters(splits, device)
    limit = shared_limit(device)
    results = (
        grid_tiling(direction, hidden, n, limit, rows, half, splits) for n in TEAMS[direction]
    )
    return next(
        (tiling for tiling in results if tiling and recurrences * tiling.blocks <= available), None
    )


def macros(tiling: GridTiling) -> dict[str, int]:
    """The macros of a tiling."""
    named = {
        "MT": tiling.rows // 16,
        "TEAM": tiling.team,
        "FIRST": tiling.first,
        "RESIDENT": tiling.resident,
        "SECOND": tiling.second,
        "DEPTH": _DEPTH,
        "SHARED_BYTES": tiling.shared,
    }
    return named | {"SPLITS": tiling.splits} if tiling.splits > 1 else named


def program(tiling: GridTiling, defines: tuple[Any, ...]) -> Program:
    """What to compile for a tiling."""
    return f"grid_{tiling.direction}", macros(tiling) | dict(defines), "sm_90a"


@functools.lru_cache(maxsize=256)
def kernel(tiling: GridTiling, device: int, defines: tuple[Any, ...]) -> Kernel:
    """Compile and load the kernel for a tiling; `device` must be the current device."""
    wanted = program(tiling, defines)
    cluster = tiling.splits if tiling.splits > 1 else 0
    code = nvrtc.compiled(*wanted)
    return Kernel(code, wanted[0], _THREADS, tiling.shared, cluster, together=True, down=True)


def zeroed(tiling: GridTiling, recurrences: int) -> dict[str, int]:
    """Bytes that must be zero before the kernel runs, by struct member; multiples of 16.

    passed: zeros beyond the last unit, and as d(W_h h) after the last step. barriers: counters.
    handed: sums, whose lowest bit marks the step.
    """
    n = recurrences * tiling.splits
    results = {"passed": 2 * n * tiling.passed, "barriers": n * 128 * tiling.team}
    if tiling.direction == "backward":
        results["handed"] = n * tiling.blocks * tiling.handed
    return results
