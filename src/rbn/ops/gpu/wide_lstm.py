"""The LSTM through the kernels in CUDA C++ for wide layers, whose blocks share work in clusters.

A block owns 16 units, so that layers of up to 16 units for each multiprocessor fit on the card. See
``cuda/wide.cuh`` for how the blocks of a cluster divide the product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu import nvrtc
from rbn.ops.gpu.driver import Kernel, shared_limit

UNITS = 16
_THREADS = 256
_ROWS = 128
_PROBE = 'extern "C" __global__ void probe() {}'

# Blocks of a cluster, and whether they hand their sums to each other through L2, which takes no
# hardware's clusters; the best first. With more blocks the reads from L2 fall, the sums grow.
CLUSTERS = {"forward": ((2, False), (1, False)), "backward": ((8, False), (8, True))}
_SIDE = {"forward": 64, "backward": 16}  # columns of the product for each block
_PASSED = {"forward": 1, "backward": 4}  # pieces of 16 columns that a block passes on in a step
_SUMS = {"forward": 32, "backward": 48}  # numbers summed over the batch at once
_GIVEN = {"forward": 288, "backward": 224}  # statistics of a step
_DEPTH = 8


@dataclass(frozen=True)
class WideCut:
    """How the weights of a block are divided: `first` and `second` are read again in each step.

    They are counted in groups of 32 columns of what is multiplied.
    """

    direction: str
    blocks: int  # of a recurrence
    cluster: int
    first: int
    resident: int
    second: int
    through_l2: bool = False

    @property
    def hardware(self) -> int:
        """Blocks of a cluster as the card knows it."""
        return 1 if self.through_l2 else self.cluster

    @property
    def slice(self) -> int:
        """Groups that a block multiplies."""
        return self.first + self.resident + self.second

    @property
    def group(self) -> int:
        """Bytes of a group of weights."""
        return 64 * _SIDE[self.direction] * self.cluster

    @property
    def shared(self) -> int:
        """Bytes of shared memory, as the kernels lay it out."""
        return _slots(self) + self.resident * self.group + _rest(self.direction)

    @property
    def passed(self) -> int:
        """Bytes that the blocks pass to each other in a step."""
        return 2 * self.slice * self.cluster * 16 * _THREADS

    @property
    def spilled(self) -> int:
        """Bytes of weights of all blocks that are not resident."""
        return self.blocks * (self.first + self.second) * self.group

    @property
    def handed(self) -> int:
        """Bytes of sums that a block gets from the others of its cluster."""
        return (self.cluster - 1) * _SIDE[self.direction] * _ROWS * 4


def _slots(cut: WideCut) -> int:
    """Bytes for weights that are read again, and for the sums that come from the cluster."""
    weights = max(cut.first, cut.second) * cut.group
    return weights if cut.through_l2 else max(cut.handed, weights)


def _rest(direction: str) -> int:
    warps, sums = _THREADS // 32, 4 * _SUMS[direction]
    return 4 * (sums * (warps | 1) + sums + 12 * UNITS + _GIVEN[direction])


def cut_wide(
    direction: str, hidden: int, cluster: int, limit: int, through_l2: bool = False
) -> WideCut | None:
    """The division with the fewest slots that fits into `limit` bytes, or None."""
    blocks = -(-hidden // UNITS)
    grid = -(-blocks // cluster) * cluster
    groups = -(-blocks * _PASSED[direction] // (2 * cluster))
    for slots in range(groups + 1):
        empty = WideCut(direction, grid, cluster, slots, 0, slots, through_l2)
        resident = min(groups, (limit - empty.shared) // empty.group)
        if resident < 0:
            return None
        again = groups - resident
        if again <= 2 * slots:
            first = min(slots, again)
            second = again - first
            return WideCut(direction, grid, cluster, first, resident, second, through_l2)
    return None


@functools.lru_cache(maxsize=64)
def max_clusters(device: int, cluster: int) -> int:
    """Clusters that the card holds at once, of blocks that take a multiprocessor each."""
    torch.empty(1, device=f"cuda:{device}")  # that there is a context
    code = nvrtc.compile_source(_PROBE, "probe", {}, "sm_90a")
    with torch.cuda.device(device):
        kernel = Kernel(code, "probe", _THREADS, shared_limit(device), cluster)
    return kernel.at_once // cluster


def choose(direction: str, wx: Tensor) -> WideCut | None:
    """The division for an input term ``[R, T, B, 4H]``; None where the kernels do not take it."""
    R, _, B, G = wx.shape
    if wx.dtype == torch.float32 or G % 16 or B > _ROWS:
        return None
    return _choose(direction, R, G // 4, wx.device.index or 0)


@functools.lru_cache(maxsize=256)
def _choose(direction: str, recurrences: int, hidden: int, device: int) -> WideCut | None:
    if torch.cuda.get_device_capability(device) != (9, 0):  # the instructions are Hopper's
        return None
    for cluster, through_l2 in CLUSTERS[direction]:
        cut = cut_wide(direction, hidden, cluster, shared_limit(device), through_l2)
        if cut and recurrences * cut.blocks <= cut.hardware * max_clusters(device, cut.hardware):
            return cut
    return None


@functools.lru_cache(maxsize=256)
def kernel(cut: WideCut, device: int, defines: tuple[Any, ...]) -> Kernel:
    """The kernel for a division; `device` is the current one."""
    named = dict(defines) | {
        "CLUSTER": cut.cluster,
        "THROUGH_L2": cut.through_l2,
        "FIRST": cut.first,
        "RESIDENT": cut.resident,
        "SECOND": cut.second,
        "DEPTH": _DEPTH,
    }
    name = f"wide_{cut.direction}"
    return Kernel(nvrtc.compiled(name, named, "sm_90a"), name, _THREADS, cut.shared, cut.hardware)


def rooms(cut: WideCut, wx: Tensor) -> dict[str, Tensor]:
    """Memory that the kernel works with, by the names of its struct."""
    R = wx.shape[0]
    raw = functools.partial(wx.new_empty, dtype=torch.uint8)
    # Pieces beyond the last unit are multiplied, too, with zero.
    return {
        "passed": raw(R * 2 * cut.passed).zero_(),
        "spilled": raw(max(1, R * cut.spilled)),
        "handed": raw(R * cut.blocks * cut.handed if cut.through_l2 else 1),
        "meetings": raw(R * cut.blocks * 4).zero_(),
    }
