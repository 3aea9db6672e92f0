"""Launches the LSTM's CUDA C++ kernels, for the shapes and options they cover.

Wide layers and layers with zoneout run the `grid` kernels, small ones the `cluster` kernels, others
the `portable` kernels. Calls that none of them covers run the Triton kernels of `persistent` or
`steps`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rbn.ops.definition import LSTMArguments
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.term import Term
from rbn.ops.gpu.runtime import nvrtc
from rbn.ops.gpu.runtime.driver import Kernel, shared_limit, structure
from rbn.ops.gpu.stepwise import zone

log = logging.getLogger("rbn.ops.gpu")

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_UNITS = 8
_SHARED = 227 * 1024
_TILES = 8  # tiles of 16 rows, at most
CLUSTER, GRID, PORTABLE = "cluster", "grid", "portable"  # the families of kernels

_VECTORS = ("bias", "gamma_x", "gamma_h", "gamma_c", "beta_c")
_MOMENTS = ("mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c")
_COMMON = ("wx", "weight", *_VECTORS, *_MOMENTS)
_SIZES = ("T", "B", "rows_x", "rows_h", "rows_c")
_FORWARD = (*_COMMON, "hs", "cs", "wh", "c0", "h_n", "c_n", "lengths", "inv_n", "counter")
_BACKWARD = (
    *(*_COMMON, "cs", "wh", "lengths", "inv_n", "doutput", "dh", "dc", "da", "dwx"),
    *("dbias", "dgamma_x", "dgamma_h", "dgamma_c", "dbeta_c", "counter"),
)


def _members(pointers: tuple[str, ...]) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in pointers] + [
        (name, ctypes.c_int) for name in _SIZES
    ]


OneFeatureForwardArguments = structure(
    "OneFeatureForward", [*_members((*_FORWARD, "w")), ("eps", ctypes.c_float)]
)
OneFeatureBackwardArguments = structure(
    "OneFeatureBackward", [*_members((*_BACKWARD, "w")), ("eps", ctypes.c_float)]
)
_GRID_ONLY = ("passed", "spilled", "meetings")
_ZONEOUT = (
    *((name, ctypes.c_float) for name in ("rate_c", "rate_h")),
    *((name, ctypes.c_void_p) for name in ("mask_c", "mask_h")),
)
ForwardArguments = structure("Forward", [*_members(_FORWARD), ("eps", ctypes.c_float)])
BackwardArguments = structure("Backward", [*_members(_BACKWARD), ("eps", ctypes.c_float)])
GridForwardArguments = structure(
    "GridForward", [*_members((*_FORWARD, *_GRID_ONLY)), ("eps", ctypes.c_float), *_ZONEOUT]
)
GridBackwardArguments = structure(
    "GridBackward",
    [*_members((*_BACKWARD, *_GRID_ONLY, "handed")), ("eps", ctypes.c_float), *_ZONEOUT],
)


_STRUCTS = {"forward": ForwardArguments, "backward": BackwardArguments}
_GRID_STRUCTS = {"forward": GridForwardArguments, "backward": GridBackwardArguments}
_ONE_FEATURE = {"forward": OneFeatureForwardArguments, "backward": OneFeatureBackwardArguments}


@dataclass(frozen=True)
class PortableTiling:
    """How the product of one kernel is divided among the warps of a block."""

    tiles: int  # tiles of 16 rows
    row_warps: int
    column_warps: int
    chunk: int
    registers: bool
    barrier: bool = False

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.row_warps * self.column_warps

    def shared(self, blocks: int, columns: int, pitch: int, sums: int) -> int:
        """Bytes of shared memory, as the kernels lay it out."""
        warps = self.row_warps * self.column_warps
        floats = self.column_warps * 16 * self.tiles * pitch + sums * (warps | 1) + sums + 96 + 144
        per_warp = -(-blocks // self.column_warps)
        weights = 0 if self.registers else per_warp * self.column_warps * columns * 32 * 16
        return 4 * floats + weights


def _column_warps(tiles: int) -> int:
    """Column warps such that a block has 4 to 8 warps."""
    return 1 if tiles > 4 else 2 if tiles > 1 else 4


@functools.lru_cache(maxsize=256)
def portable_forward(
    dtype: torch.dtype, batch: int, hidden: int, limit: int = _SHARED
) -> PortableTiling | None:
    """The tiling of the forward kernel; None if it needs more than `limit` bytes of shared memory.

    Also None if the batch has too many rows.
    """
    tiles = -(-batch // 16)
    if tiles > _TILES:
        return None
    half = dtype != torch.float32
    blocks = -(-hidden // (32 if half else 16))
    if blocks <= 8 * (2 - half):  # a warp's share of the weights is small: wait for data
        columns = _column_warps(tiles)
        per_warp = -(-blocks // columns)
        cut = PortableTiling(tiles, tiles, columns, min(4, per_warp), half and per_warp <= 4)
    else:
        cut = _cut_large(tiles)
    return cut if cut.shared(blocks, 4, 40, 64) <= limit else None


@functools.lru_cache(maxsize=256)
def portable_backward(
    dtype: torch.dtype, batch: int, hidden: int, limit: int = _SHARED
) -> PortableTiling | None:
    """Like `portable_forward`, for the backward kernel."""
    tiles = -(-batch // 16)
    if tiles > _TILES:
        return None
    blocks = -(-4 * hidden // (16 if dtype == torch.float32 else 32))
    small = PortableTiling(tiles, tiles, _column_warps(tiles), 4, False, barrier=True)
    cut = small if blocks <= 64 else _cut_large(tiles)
    return cut if cut.shared(blocks, 1, 8, 96) <= limit else None


def _cut_large(tiles: int) -> PortableTiling:
    rows = 1 if tiles <= 4 else 2
    return PortableTiling(-(-tiles // rows) * rows, rows, 8 // rows, 2, False, barrier=True)


@functools.lru_cache(maxsize=256)
def _kernel(
    name: str, cut: PortableTiling, device: int, shared: int, defines: tuple[Any, ...]
) -> Kernel:
    arch = nvrtc.architecture(torch.cuda.get_device_capability(device))
    assert arch is not None  # see `_capable`
    named = dict(defines) | {
        "MT": cut.tiles,
        "MW": cut.row_warps,
        "KS": cut.column_warps,
        "CHUNK": cut.chunk,
        "REGISTERS": cut.registers,
        "BARRIER": cut.barrier,
    }
    code = nvrtc.compiled(name, named, arch)
    return Kernel(code, name, cut.threads, shared)


@functools.lru_cache(maxsize=64)
def _capable(device: int) -> bool:
    capability = torch.cuda.get_device_capability(device)
    return capability >= (8, 0) and nvrtc.works(capability)


def covers(term: Term, a: LSTMArguments) -> bool:
    """Whether the CUDA C++ kernels cover this call, forward and backward."""
    if not term.is_cuda or not _capable(term.device.index or 0):
        return False
    if term.dtype == torch.float32 and not a.tf32:
        return False
    if not takes_options(term, a):
        return False
    return bool(a.zoned or _fits(term) or cluster_kernels.choose(term) or fits_grid(term))


def takes_options(term: Term, a: LSTMArguments) -> bool:
    """Whether the kernels support all options of this call.

    Only the `grid` kernels support zoneout, so they run every such call that fits them.
    """
    if a.joint or a.include or a.pass_normalized_cell:
        return False
    return not a.zoned or grid_kernels.takes(term)


def _fits(wx: Term) -> bool:
    """Whether all blocks of 8 units fit on the GPU at once, for the `portable` kernels."""
    *lead, _, B, G = wx.shape
    return _has_room(wx.dtype, lead[0] if lead else 1, B, G // 4, wx.device.index or 0)


@functools.lru_cache(maxsize=256)
def _has_room(dtype: torch.dtype, recurrences: int, batch: int, hidden: int, device: int) -> bool:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    limit = shared_limit(device)
    return bool(
        hidden % 2 == 0
        and processors >= recurrences * -(-hidden // _UNITS)
        and portable_forward(dtype, batch, hidden, limit) is not None
        and portable_backward(dtype, batch, hidden, limit) is not None
    )


def fits_grid(wx: Term) -> bool:
    """Whether the `grid` kernels, with blocks of 16 units, should run.

    They do if blocks of 8 units do not fit on the GPU, or are slower.
    """
    if _fits(wx):
        return grid_kernels.preferred(wx)
    return grid_kernels.takes(wx)


def kind(wx: Term, tf32: bool) -> str | None:
    """The kernel family for a layer of this size and dtype, ignoring options; None if none."""
    if not _capable(wx.device.index or 0):
        return None
    if wx.dtype == torch.float32 and not tf32:
        return None
    if cluster_kernels.choose(wx):
        return CLUSTER
    return GRID if fits_grid(wx) else PORTABLE if _fits(wx) else None


def family(wx: Term, zoned: bool = False) -> str:
    """The family of kernels for a call that `covers` accepts."""
    if zoned:
        return GRID
    return CLUSTER if cluster_kernels.choose(wx) else GRID if fits_grid(wx) else PORTABLE


def tiling_of(direction: str, wx: Term, family: str) -> Any:
    """The tiling for a family: a `PortableTiling`, `ClusterTiling` or `GridTiling`."""
    B, G = wx.shape[-2:]
    if family == PORTABLE:
        cut: Any = (portable_forward if direction == "forward" else portable_backward)(
            wx.dtype, B, G // 4
        )
    else:
        cut = (
            cluster_kernels.choose(wx) if family == CLUSTER else grid_kernels.choose(direction, wx)
        )
    assert cut is not None
    return cut


def meeting(cut: Any) -> tuple[bool, bool]:
    """How the blocks synchronize: through `counter`, and through a buffer that starts as EMPTY.

    Returns two bools; only `portable` kernels use either.
    """
    return (cut.barrier, not cut.barrier) if isinstance(cut, PortableTiling) else (False, False)


def zeroed(cut: Any, recurrences: int) -> dict[str, int]:
    """Bytes that must be zero before a kernel runs, by struct member; multiples of 16."""
    if isinstance(cut, grid_kernels.GridTiling):
        return grid_kernels.zeroed(cut, recurrences)
    return {"counter": -(-recurrences // 4) * 16} if meeting(cut)[0] else {}


def defines(
    a: LSTMArguments, flags: dict[str, int], hidden: int, one_feature: bool, doutput: bool
) -> tuple[Any, ...]:
    """The macros a kernel is compiled with, except those of its tiling.

    flags: the statistics that terms are normalized with. doutput: whether the output has a
    gradient, for the backward kernel.
    """
    return (
        ("TYPE", _TYPES[a.input.dtype]),
        ("H", hidden),
        ("MODE_X", flags["X"]),
        ("MODE_H", flags["NORM"]),
        ("MODE_C", flags["CELL"]),
        ("LENGTHS", int(a.lengths is not None)),
        ("BIAS", int(a.bias is not None)),
        ("BETA", int(a.beta_c is not None)),
        ("SAVE", int(a.save)),
        ("DOUTPUT", int(doutput)),
        *([("SCALAR", 1)] if one_feature else []),
        *([("ZONE_C", zone(a.mask_c, a.rate_c))] if a.zoned else []),
        *([("ZONE_H", zone(a.mask_h, a.rate_h))] if a.zoned else []),
    )


class Launch(NamedTuple):
    """A kernel ready to launch: ``kernel.launch(grid, arguments)``."""

    kernel: Kernel
    grid: tuple[int, int]
    arguments: bytes


def launch_for(
    direction: str, call: Any, at: dict[str, int], rows: list[int], has_doutput: bool = False
) -> Launch:
    """Prepare the launch of the forward or the backward kernel on the current device.

    at: addresses by struct member; the kernel does not read missing ones. The backward kernel takes
    W_h as returned by `backward_weight`. rows: rows of the statistics of x, h and c. has_doutput:
    whether the output has a gradient.
    """
    defines = call.plan.defines[has_doutput]
    if call.family == CLUSTER:
        return _cluster_launch(direction, call, at, rows, defines)
    if call.family == GRID:
        return _grid_launch(direction, call, at, rows, defines)
    return _portable_launch(direction, call, at, rows, defines)


def _cluster_launch(
    direction: str, call: Any, at: dict[str, int], rows: list[int], defines: tuple[Any, ...]
) -> Launch:
    tiling, device = call.plan.tilings[direction], call.term.device.index or 0
    cluster = cluster_kernels.cluster_of(tiling, call.term.dtype, call.H, device)
    assert cluster is not None
    log.debug("lstm %s in CUDA, cluster: %s, clusters of %d", direction, tiling, cluster)
    kernel = cluster_kernels.kernel(direction, tiling, cluster, device, defines)
    struct = (_ONE_FEATURE if call.plan.one_feature else _STRUCTS)[direction]
    return _launch(kernel, cluster, call, struct, at, rows)


def _grid_launch(
    direction: str, call: Any, at: dict[str, int], rows: list[int], defines: tuple[Any, ...]
) -> Launch:
    tiling = call.plan.tilings[direction]
    log.debug("lstm %s in CUDA, grid: %s", direction, tiling)
    kernel = grid_kernels.kernel(tiling, call.term.device.index or 0, defines)
    spilled = call.R * tiling.spilled
    if spilled:
        spill = torch.empty(spilled, dtype=torch.uint8, device=call.term.device)
        call.kept.append(spill)
        at = at | {"spilled": spill.data_ptr()}
    masks = (at.get(name, 0) for name in ("mask_c", "mask_h"))
    more = (call.a.rate_c, call.a.rate_h, *masks)
    struct = _GRID_STRUCTS[direction]
    return _launch(kernel, tiling.blocks, call, struct, at, rows, *more, splits=tiling.splits)


def _portable_launch(
    direction: str, call: Any, at: dict[str, int], rows: list[int], defines: tuple[Any, ...]
) -> Launch:
    tiling, numbers = call.plan.tilings[direction], 16 if call.term.dtype == torch.float32 else 32
    log.debug("lstm %s in CUDA, portable: %s", direction, tiling)
    if direction == "forward":
        shared = tiling.shared(-(-call.H // numbers), 4, 40, 64)
    else:
        shared = tiling.shared(-(-4 * call.H // numbers), 1, 8, 96)
    device = call.term.device.index or 0
    kernel = _kernel(f"portable_{direction}", tiling, device, shared, defines)
    return _launch(kernel, -(-call.H // _UNITS), call, _STRUCTS[direction], at, rows)


def _launch(
    kernel: Kernel,
    blocks: int,
    call: Any,
    struct: Any,
    at: dict[str, int],
    rows: list[int],
    *more: float,
    splits: int = 1,
) -> Launch:
    # Clusters that do not synchronize with each other need not run at the same time.
    if blocks * (call.R * splits if kernel.together else 1) > kernel.at_once:
        raise RuntimeError("the card has no room for all blocks of the recurrence at once")
    packed = struct.packed(at, call.T, call.B, *rows, call.a.eps, *more)
    return Launch(kernel, (blocks, call.R * splits), packed)


def backward_weight(call: Any, weight: Tensor) -> Tensor:
    """W_h in the backward kernel's layout: transposed, except for the `grid` kernels."""
    if call.family == GRID:
        return weight.contiguous()
    return weight.transpose(-2, -1).contiguous()
