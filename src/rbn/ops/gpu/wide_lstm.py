"""The LSTM through the kernels in CUDA C++ for wide layers, whose blocks share work in teams.

A block owns 16 units, so that layers of up to 16 units for each multiprocessor fit on the card. See
``cuda/wide.cuh`` for how the blocks of a team divide the product.
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

# Blocks of a team, the best first: with more of them the reads from L2 fall, the sums that they
# hand to each other grow. CLUSTERS are teams that hand them over through distributed shared memory,
# where the card has room for so many: an H200 has it for 66 clusters of 2, 30 of 4, 15 of 8.
CLUSTERS: dict[str, tuple[int, ...]] = {"forward": (2,), "backward": ()}
TEAMS: dict[str, tuple[int, ...]] = {"forward": (1,), "backward": (8, 4)}
# Names for the compiler, such as SEEN and TAGGED: how the blocks wait for each other. See
# cuda/wide.cuh. None has been measured yet.
WAYS: dict[str, dict[str, int]] = {"forward": {}, "backward": {}}
_SIDE = {"forward": 64, "backward": 16}  # columns of the product for each block
_PASSED = {"forward": 1, "backward": 4}  # pieces of 16 columns that a block passes on in a step
# float32 numbers beside the weights: sums of each warp, tables of a number for each column (80) or
# unit (16), parameters, 11 barriers.
_NUMBERS = {
    "forward": 8 * 144 + 4 * 80 + 2 * 16 + 22,
    "backward": 8 * 192 + 10 * 80 + 6 * 16 + 3 * 64 + 16 + 22,
}
_DEPTH = {"forward": 8, "backward": 6}  # groups asked for ahead; registers are scarce


@dataclass(frozen=True)
class WideCut:
    """How the weights of a block are divided: `first` and `second` are read again in each step.

    They are counted in groups of 32 columns of what is multiplied.
    """

    direction: str
    blocks: int  # of a recurrence
    team: int
    first: int
    resident: int
    second: int
    cluster: bool = False

    @property
    def slice(self) -> int:
        """Groups that a block multiplies."""
        return self.first + self.resident + self.second

    @property
    def group(self) -> int:
        """Bytes of a group of weights."""
        return 64 * _SIDE[self.direction] * self.team

    @property
    def shared(self) -> int:
        """Bytes of shared memory, as the kernels lay it out."""
        slots = max(self.first * self.group, self.handed if self.cluster else 0)
        return slots + self.resident * self.group + 4 * _NUMBERS[self.direction]

    @property
    def passed(self) -> int:
        """Bytes that the blocks pass to each other in a step."""
        return 2 * self.slice * self.team * 16 * _THREADS

    @property
    def spilled(self) -> int:
        """Bytes of weights of all blocks that are not resident."""
        return self.blocks * (self.first + self.second) * self.group

    @property
    def handed(self) -> int:
        """Bytes of sums that a block gets from the others of its team."""
        return (self.team - 1) * _SIDE[self.direction] * _ROWS * 4


def cut_wide(
    direction: str, hidden: int, team: int, limit: int, cluster: bool = False
) -> WideCut | None:
    """The division with the fewest slots that fits into `limit` bytes, or None."""
    blocks = -(-hidden // UNITS)
    grid = -(-blocks // team) * team
    groups = -(-blocks * _PASSED[direction] // (2 * team))
    for slots in range(groups + 1):
        empty = WideCut(direction, grid, team, slots, 0, slots, cluster)
        resident = min(groups, (limit - empty.shared) // empty.group)
        # The second groups are asked for while a resident one is used; sums come into the slots
        # while another one is.
        if resident < 1 + cluster:
            return None
        again = groups - resident
        if again <= 2 * slots:
            first = min(slots, again)
            return WideCut(direction, grid, team, first, resident, again - first, cluster)
    return None


def cuts(direction: str, wx: Tensor) -> tuple[WideCut, ...]:
    """The divisions for an input term ``[R, T, B, 4H]``, the best first; none if there is none.

    The last needs no clusters: whether the card has room for those of a kernel is known only when
    it is compiled.
    """
    R, _, B, G = wx.shape
    if wx.dtype == torch.float32 or G % 16 or B > _ROWS:
        return ()
    return _cuts(direction, R, G // 4, wx.device.index or 0)


@functools.lru_cache(maxsize=256)
def _cuts(direction: str, recurrences: int, hidden: int, device: int) -> tuple[WideCut, ...]:
    if torch.cuda.get_device_capability(device) != (9, 0):  # the instructions are Hopper's
        return ()
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def fitting(teams: tuple[int, ...], cluster: bool) -> list[WideCut]:
        found = (cut_wide(direction, hidden, n, shared_limit(device), cluster) for n in teams)
        return [cut for cut in found if cut and recurrences * cut.blocks <= processors]

    plain = fitting(TEAMS[direction], False)[:1]
    return (*fitting(CLUSTERS[direction], True), *plain) if plain else ()


@functools.lru_cache(maxsize=256)
def kernel(cut: WideCut, device: int, defines: tuple[Any, ...]) -> Kernel:
    """The kernel for a division; `device` is the current one."""
    named = {
        "TEAM": cut.team,
        "FIRST": cut.first,
        "RESIDENT": cut.resident,
        "SECOND": cut.second,
        "DEPTH": _DEPTH[cut.direction],
        "CLUSTER": cut.cluster,
    } | dict(defines)
    name = f"wide_{cut.direction}"
    code = nvrtc.compiled(name, named, "sm_90a")
    cluster = cut.team if cut.cluster else 0
    return Kernel(code, name, _THREADS, cut.shared, cluster, together=True)


def rooms(cut: WideCut, wx: Tensor) -> dict[str, Tensor]:
    """Memory that the kernel works with, by the names of its struct."""
    R, hidden = wx.shape[0], wx.shape[3] // 4
    raw = functools.partial(wx.new_empty, dtype=torch.uint8)
    ways = WAYS[cut.direction]
    seen, tagged = ways.get("SEEN", 0), ways.get("SEEN", 0) or ways.get("TAGGED", 0)
    # Pieces beyond the last unit are multiplied, too, with zero.
    passed = raw(R, 4 if seen else 2, cut.passed).zero_()
    if seen:  # those that were not written yet; after the last step d(W_h h) is zero
        owned = -(-hidden // UNITS) * _PASSED[cut.direction] * 16 * _THREADS
        passed[:, int(cut.direction == "backward") :, :owned] = 0xFF
    handed = raw(1 if cut.cluster else max(1, (1 + seen) * R * cut.blocks * cut.handed))
    return {
        "passed": passed,
        "spilled": raw(max(1, R * cut.spilled)),
        "handed": handed.zero_() if tagged else handed,
        "meetings": raw(R * (8 * cut.blocks + 128 * cut.team)).zero_(),
    }
