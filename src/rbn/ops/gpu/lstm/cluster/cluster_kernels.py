"""The LSTM through the kernels in CUDA C++ for small layers, whose blocks form one cluster.

A block owns 8 units, so that layers of up to 128 units fit into the 16 blocks of a cluster; or 16
units, for layers of up to 256. They hand each other h and dh through distributed shared memory: see
``cluster.cuh``. Clusters know nothing of each other: there may be any number of recurrences, and
they need not run at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from rbn.ops.gpu.lstm.term import Term
from rbn.ops.gpu.runtime import nvrtc
from rbn.ops.gpu.runtime.driver import Kernel, shared_limit

UNITS = 8
_ROWS = 8  # of a tile
_TILES = 2  # of a warp: what is done for each warp is done less often
_LARGEST = 16  # blocks of a cluster, where the card allows more than the 8 that all allow
_WARPS = 16  # with one tile each
_TWICE = 2 * UNITS  # units of a block where the cluster would be too large
_ROW_WARPS = 4  # of such a block for each 8 of its units
# Types in which layers of up to 256 units run with 16 units in a block, not in the kernels whose
# blocks meet in memory.
SIXTEEN: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
# Types in which inputs of one feature go into the kernels as they are (SCALAR), not as the input
# term. In half precision it is as exact and a seventh faster, but three of three runs on MNIST in
# bf16 diverged within 10,000 steps, one of three with the input term.
ONE_FEATURE: tuple[torch.dtype, ...] = (torch.float32,)
# What else the kernels are compiled with: ALL_WAIT, STAGGERED, those that leave stages out.
SWITCHES: dict[str, int] = {}
_OPTIONS = ("MODE_X", "MODE_H", "MODE_C", "SAVE", "BIAS", "BETA", "DOUTPUT")


@dataclass(frozen=True)
class ClusterTiling:
    """The blocks of a cluster that work, the warps of a block with rows, the tiles of each."""

    blocks: int
    warps: int
    tiles: int
    half: bool
    units: int = UNITS  # of a block

    @property
    def row_warps(self) -> int:
        """Those that together have all rows, of 8 units."""
        return self.warps * UNITS // self.units

    @property
    def rows(self) -> int:
        """Of the batch, with those that tiles have beyond it."""
        return _ROWS * self.row_warps * self.tiles

    @property
    def threads(self) -> int:
        """Of a block: one warp more adds up what the others have, three only give registers."""
        return 32 * (self.warps + (1 if self.units == UNITS else 4))

    def shared(self, direction: str) -> int:
        """Bytes of shared memory, as the kernels lay it out."""
        barriers = 2 * 8
        tiles = self.warps * self.tiles
        sheet = (32 if self.half else 80) * tiles  # what is read or written row by row, of one gate
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
    """The division of both kernels, or None where a cluster is too small."""
    blocks, rows = -(-hidden // UNITS), -(-batch // _ROWS)
    tiles = min(_TILES, rows)
    warps = -(-rows // tiles)
    if hidden % 2 or blocks > _LARGEST or warps > _WARPS // tiles:
        return None
    return ClusterTiling(blocks, warps, tiles, dtype != torch.float32)


@functools.lru_cache(maxsize=256)
def cluster_tiling_16(dtype: torch.dtype, batch: int, hidden: int) -> ClusterTiling | None:
    """The same with 16 units in a block, for which the registers of a warp limit the batch."""
    blocks, tiles = -(-hidden // _TWICE), -(-batch // (_ROWS * _ROW_WARPS))
    if hidden % 2 or not 1 < blocks <= _LARGEST or tiles > _TILES:
        return None
    return ClusterTiling(blocks, 2 * _ROW_WARPS, tiles, dtype != torch.float32, _TWICE)


def choose(wx: Term) -> ClusterTiling | None:
    """The division for an input term ``[..., T, B, 4H]``; None where the kernels do not take it."""
    if not wx.is_cuda:
        return None
    B, G = wx.shape[-2:]
    cut = cluster_tiling(wx.dtype, B, G // 4)
    if cut is None and wx.dtype in SIXTEEN:
        cut = cluster_tiling_16(wx.dtype, B, G // 4)
    if cut is None or cluster_of(cut, wx.dtype, G // 4, wx.device.index or 0) is None:
        return None
    return cut


@functools.lru_cache(maxsize=256)
def cluster_of(cut: ClusterTiling, dtype: torch.dtype, hidden: int, device: int) -> int | None:
    """Blocks of the cluster that the card has room for, or None.

    A cluster of more than 8 blocks, or of a number that is no power of two, may be too much for a
    card: then the next power of two is tried, whose last blocks have nothing to do.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0) or (cut.units > UNITS and capability != (9, 0)):
        return None
    if nvrtc.version() < nvrtc.FOR_HOPPER:
        return None
    if max(cut.shared("forward"), cut.shared("backward")) > shared_limit(device):
        return None
    type_ = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[dtype]
    # Every variant takes the same share of a multiprocessor; this is the one of most training runs.
    defines = {"TYPE": type_, "H": hidden, "LENGTHS": 0} | dict.fromkeys(_OPTIONS, 1)
    with torch.cuda.device(device):
        for size in sorted({cut.blocks, 1 << (cut.blocks - 1).bit_length()}):
            kernels = [
                kernel(direction, cut, size, device, tuple(sorted(wanted.items())))
                for direction, wanted in (
                    ("forward", defines | {"DOUTPUT": 0}),
                    ("backward", defines),
                )
            ]
            if all(k.at_once >= size for k in kernels):
                return size
    return None


@functools.lru_cache(maxsize=256)
def kernel(
    direction: str, cut: ClusterTiling, cluster: int, device: int, defines: tuple[Any, ...]
) -> Kernel:
    """The kernel for a division; `device` is the current one."""
    arch = nvrtc.architecture(torch.cuda.get_device_capability(device))
    assert arch is not None  # or nobody would have chosen it
    name = f"cluster_{direction}"
    cuts = {"MW": cut.row_warps, "RT": cut.tiles}
    if cut.units > UNITS:  # warps that give registers to others are of Hopper
        cuts, arch = cuts | {"UNITS": cut.units, "STAGGERED": 1}, arch + "a"
    code = nvrtc.compiled(name, dict(defines) | cuts | SWITCHES, arch)
    return Kernel(code, name, cut.threads, cut.shared(direction), cluster)
