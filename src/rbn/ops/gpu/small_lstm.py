"""The LSTM through the kernels in CUDA C++ for small layers, whose blocks form one cluster.

A block owns 8 units, so that layers of up to 128 units fit into the 16 blocks of a cluster. They
hand each other h and dh through distributed shared memory: see ``cuda/small.cuh``. Clusters know
nothing of each other: there may be any number of recurrences, and they need not run at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu import nvrtc
from rbn.ops.gpu.driver import Kernel, shared_limit

UNITS = 8
_ROWS = 8  # of a tile
_TILES = 2  # of a warp: what is done for each warp is done less often
_LARGEST = 16  # blocks of a cluster, where the card allows more than the 8 that all allow
_WARPS = 16  # with one tile each
_OPTIONS = ("MODE_X", "MODE_H", "MODE_C", "SAVE", "BIAS", "BETA", "DOUTPUT")


@dataclass(frozen=True)
class SmallCut:
    """The blocks of a cluster that work, the warps of a block with rows, the tiles of each."""

    blocks: int
    warps: int
    tiles: int
    half: bool

    @property
    def threads(self) -> int:
        """Of a block: one warp more adds up what the others have."""
        return 32 * (self.warps + 1)

    def shared(self, direction: str) -> int:
        """Bytes of shared memory, as the kernels lay it out."""
        barriers = 2 * 8
        tiles = self.warps * self.tiles
        sheet = (32 if self.half else 80) * tiles  # what is read or written row by row, of one gate
        if direction == "forward":
            sources = -(-self.blocks // 4) * 4
            hidden = 2 * 16 * sources * (8 * tiles + 2)
            return hidden + 4 * (80 * self.warps + 2 * 144 + 64 + 5 * sheet) + barriers
        factors = 0 if self.half else 4 * self.warps
        shares = 2 * 4 * self.blocks * (32 * tiles + factors)
        ahead_and_late = 4 * (32 * (6 + 4 if self.half else 10 + 8) * tiles + 9 * sheet)
        rest = 112 * self.warps + 2 * 288 + 288
        return shares + ahead_and_late + 4 * rest + barriers


@functools.lru_cache(maxsize=256)
def cut_small(dtype: torch.dtype, batch: int, hidden: int) -> SmallCut | None:
    """The division of both kernels, or None where a cluster is too small."""
    blocks, rows = -(-hidden // UNITS), -(-batch // _ROWS)
    tiles = min(_TILES, rows)
    warps = -(-rows // tiles)
    if hidden % 2 or blocks > _LARGEST or warps > _WARPS // tiles:
        return None
    return SmallCut(blocks, warps, tiles, dtype != torch.float32)


def choose(wx: Tensor) -> SmallCut | None:
    """The division for an input term ``[..., T, B, 4H]``; None where the kernels do not take it."""
    if not wx.is_cuda:
        return None
    B, G = wx.shape[-2:]
    cut = cut_small(wx.dtype, B, G // 4)
    if cut is None or cluster_of(cut, wx.dtype, G // 4, wx.device.index or 0) is None:
        return None
    return cut


@functools.lru_cache(maxsize=256)
def cluster_of(cut: SmallCut, dtype: torch.dtype, hidden: int, device: int) -> int | None:
    """Blocks of the cluster that the card has room for, or None.

    A cluster of more than 8 blocks, or of a number that is no power of two, may be too much for a
    card: then the next power of two is tried, whose last blocks have nothing to do.
    """
    if torch.cuda.get_device_capability(device) < (9, 0):
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
    direction: str, cut: SmallCut, cluster: int, device: int, defines: tuple[Any, ...]
) -> Kernel:
    """The kernel for a division; `device` is the current one."""
    major, minor = torch.cuda.get_device_capability(device)
    name = f"small_{direction}"
    cuts = {"MW": cut.warps, "RT": cut.tiles}
    code = nvrtc.compiled(name, dict(defines) | cuts, f"sm_{major}{minor}")
    return Kernel(code, name, cut.threads, cut.shared(direction), cluster)
