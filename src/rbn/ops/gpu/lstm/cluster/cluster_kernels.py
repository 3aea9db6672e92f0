"""CUDA C++ kernels for small LSTM layers, whose blocks form one cluster.

A block owns 8 units, so that layers of up to 128 units fit into the 16 blocks of a cluster; or 16
units, for layers of up to 256. The blocks exchange h and dh through distributed shared memory: see
``cluster.cuh``. Clusters are independent of each other, so there may be any number of recurrences,
which need not run at the same time.
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
from rbn.ops.gpu.runtime.occupancy import clusters

UNITS = 8
_ROWS = 8  # rows per tile
_TILES = 2  # tiles per warp, at most; two tiles share the per-warp work
_LARGEST = 16  # blocks per cluster, if the GPU allows more than the 8 that every GPU allows
_WARPS = 16  # warps per block with one tile each, at most
_TWICE = 2 * UNITS  # units per block for layers that would otherwise need too large a cluster
_ROW_WARPS = 4  # warps per 8 units in blocks of 16 units
# Dtypes in which layers of up to 256 units run here with 16 units per block, and not in the `grid`
# or `portable` kernels, whose blocks synchronize through global memory.
SIXTEEN: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
# Dtypes in which the kernels read inputs of one feature directly (SCALAR) instead of the input
# term. In half precision that is as exact and a seventh faster, but three of three MNIST runs in
# bf16 diverged within 10,000 steps; with the input term one of three did.
ONE_FEATURE: tuple[torch.dtype, ...] = (torch.float32,)
# Additional macros for tests and benchmarks: ALL_WAIT.
SWITCHES: dict[str, int] = {}


@dataclass(frozen=True)
class ClusterTiling:
    """How a layer is divided among the blocks of a cluster, their warps, and the warps' tiles."""

    blocks: int  # that own units; the cluster may have idle ones
    warps: int  # worker warps per block
    tiles: int  # per warp
    half: bool
    units: int = UNITS  # per block

    @property
    def row_warps(self) -> int:
        """Warps that together cover all rows of 8 units."""
        return self.warps * UNITS // self.units

    @property
    def rows(self) -> int:
        """Rows of the batch, padded to full tiles."""
        return _ROWS * self.row_warps * self.tiles

    @property
    def threads(self) -> int:
        """Threads per block.

        One more warp reduces over the batch. With 16 units, three further warps only release their
        registers.
        """
        return 32 * (self.warps + (1 if self.units == UNITS else 4))

    def shared(self, direction: str) -> int:
        """Bytes of shared memory, as the kernels lay it out."""
        barriers = 2 * 8
        tiles = self.warps * self.tiles
        sheet = (32 if self.half else 80) * tiles  # one gate, read or written row by row
        if direction == "forward":
            sources = -(-self.blocks * self.units // (4 * UNITS)) * 4
            hidden = 2 * 16 * sources * (8 * self.row_warps * self.tiles + 2)
            statistics = (2 * 18 + 8) * self.units
            return hidden + 4 * (80 * self.warps + statistics + 5 * sheet) + barriers
        factors = 0 if self.half else 4 * self.warps
        shares = 2 * 4 * self.blocks * (32 * tiles + factors)
        ahead_and_late = 4 * (32 * (6 + 4 if self.half else 10 + 8) * tiles + 9 * sheet)
        lines = 0 if self.units == UNITS else 128 * tiles + factors // 4
        rest = 112 * self.warps + 3 * 36 * self.units + lines
        return shares + ahead_and_late + 4 * rest + barriers


@functools.lru_cache(maxsize=256)
def cluster_tiling(dtype: torch.dtype, batch: int, hidden: int) -> ClusterTiling | None:
    """The tiling of both kernels, or None if the call does not fit into a cluster."""
    blocks, rows = -(-hidden // UNITS), -(-batch // _ROWS)
    tiles = min(_TILES, rows)
    warps = -(-rows // tiles)
    if hidden % 2 or blocks > _LARGEST or warps > _WARPS // tiles:
        return None
    return ClusterTiling(blocks, warps, tiles, dtype != torch.float32)


@functools.lru_cache(maxsize=256)
def cluster_tiling_16(dtype: torch.dtype, batch: int, hidden: int) -> ClusterTiling | None:
    """Like `cluster_tiling`, with 16 units per block; a warp's registers limit the batch size."""
    blocks, tiles = -(-hidden // _TWICE), -(-batch // (_ROWS * _ROW_WARPS))
    if hidden % 2 or not 1 < blocks <= _LARGEST or tiles > _TILES:
        return None
    return ClusterTiling(blocks, 2 * _ROW_WARPS, tiles, dtype != torch.float32, _TWICE)


def choose(wx: Term) -> ClusterTiling | None:
    """The tiling for an input term ``[..., T, B, 4H]``; None if the kernels do not support it."""
    if not wx.is_cuda:
        return None
    B, G = wx.shape[-2:]
    tiling = cluster_tiling(wx.dtype, B, G // 4)
    if tiling is None and wx.dtype in SIXTEEN:
        tiling = cluster_tiling_16(wx.dtype, B, G // 4)
    if tiling is None or cluster_of(tiling, wx.device.index or 0) is None:
        return None
    return tiling


@functools.lru_cache(maxsize=256)
def cluster_of(tiling: ClusterTiling, device: int) -> int | None:
    """The cluster size in blocks that fits on the GPU, or None.

    A GPU may refuse a cluster of more than 8 blocks, or one whose size is not a power of two. Then
    the next power of two is tried; its last blocks are idle.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0) or (tiling.units > UNITS and capability != (9, 0)):
        return None
    if nvrtc.version() < nvrtc.FOR_HOPPER:
        return None
    if max(tiling.shared("forward"), tiling.shared("backward")) > shared_limit(device):
        return None
    # A multiprocessor can hold a block of any of the kernels, which limit their registers.
    sizes = sorted({tiling.blocks, 1 << (tiling.blocks - 1).bit_length()})
    return next((size for size in sizes if clusters(size, device)), None)


def program(
    direction: str, tiling: ClusterTiling, device: int, defines: tuple[Any, ...]
) -> Program:
    """What to compile for a tiling."""
    arch = nvrtc.architecture_of(device)
    macros = {"MW": tiling.row_warps, "RT": tiling.tiles, "SHARED_BYTES": tiling.shared(direction)}
    if tiling.units > UNITS:  # only Hopper can move registers between warps
        macros, arch = macros | {"UNITS": tiling.units}, arch + "a"
    return f"cluster_{direction}", dict(defines) | macros | SWITCHES, arch


@functools.lru_cache(maxsize=256)
def kernel(
    direction: str, tiling: ClusterTiling, cluster: int, device: int, defines: tuple[Any, ...]
) -> Kernel:
    """Compile and load the kernel for a tiling; `device` must be the current device."""
    wanted = program(direction, tiling, device, defines)
    code = nvrtc.compiled(*wanted)
    return Kernel(code, wanted[0], tiling.threads, tiling.shared(direction), cluster)
