"""Launches the LSTM's CUDA C++ kernels, for the shapes and options they cover.

Wide layers and layers with zoneout run the `grid` kernels, small ones the `cluster` kernels, others
the `portable` kernels. Calls that none of them covers run step by step, see `steps`.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from rbn.ops.definition import LSTM, VECTORS, LSTMArguments
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.portable import portable_kernels
from rbn.ops.gpu.lstm.portable.portable_kernels import PortableTiling
from rbn.ops.gpu.lstm.term import Term
from rbn.ops.gpu.runtime import nvrtc
from rbn.ops.gpu.runtime.driver import Kernel, structure
from rbn.ops.gpu.stepwise import zone

log = logging.getLogger("rbn.ops.gpu")

CLUSTER, GRID, PORTABLE = "cluster", "grid", "portable"  # the families of kernels

_COMMON = ("wx", "weight", *VECTORS, *LSTM.moments)
_SAVED = ("cs", "wh")
_GRID = ("passed", "spilled", "barriers")
_FORWARD = (
    *(*_COMMON, "hs", *_SAVED, "c0", "h_n", "c_n", "lengths", "inv_n", "counter", "w"),
    *(*_GRID, "mask_c", "mask_h"),
)
_BACKWARD = (
    *(*_COMMON, *_SAVED, "lengths", "inv_n", "doutput", "dh", "dc", "da", "dwx"),
    *("dbias", "dgamma_x", "dgamma_h", "dgamma_c", "dbeta_c", "counter", "w"),
    *(*_GRID, "handed", "mask_c", "mask_h"),
)
_NUMBERS = ("T", "B", "rows_x", "rows_h", "rows_c"), ("eps", "rate_c", "rate_h")
# The structs of arguments.cuh.
ForwardArguments = structure("Forward", _FORWARD, *_NUMBERS)
BackwardArguments = structure("Backward", _BACKWARD, *_NUMBERS)
_STRUCTS = {"forward": ForwardArguments, "backward": BackwardArguments}


def family(term: Term, a: LSTMArguments) -> str | None:
    """The kernel family of a call, forward and backward; None if the steps of `steps` run."""
    if not term.is_cuda or not nvrtc.supports(term.device.index or 0):
        return None
    if (term.dtype == torch.float32 and not a.tf32) or not supports_options(term, a):
        return None
    return GRID if a.zoned else fastest(term)


def fastest(term: Term) -> str | None:
    """The fastest family that supports this size, ignoring options; None if there is none."""
    if cluster_kernels.choose(term):
        return CLUSTER
    return GRID if fits_grid(term) else PORTABLE if portable_kernels.fits(term) else None


def supports_options(term: Term, a: LSTMArguments) -> bool:
    """Whether the kernels support all options of this call.

    Only the `grid` kernels support zoneout, so they run every such call that fits them.
    """
    if a.joint or a.include or a.pass_normalized_cell:
        return False
    return not a.zoned or grid_kernels.fits(term)


def fits_grid(wx: Term) -> bool:
    """Whether the `grid` kernels, with blocks of 16 units, should run.

    They do if blocks of 8 units do not fit on the GPU, or are slower.
    """
    if portable_kernels.fits(wx):
        return grid_kernels.preferred(wx)
    return grid_kernels.fits(wx)


def tiling_of(direction: str, wx: Term, family: str) -> Any:
    """The tiling for a family: a `PortableTiling`, `ClusterTiling` or `GridTiling`."""
    tiling: Any
    if family == PORTABLE:
        B, G = wx.shape[-2:]
        tiling = portable_kernels.choose(direction, wx.dtype, B, G // 4)
    elif family == CLUSTER:
        tiling = cluster_kernels.choose(wx)
    else:
        tiling = grid_kernels.choose(direction, wx)
    assert tiling is not None
    return tiling


def polls(tiling: Any) -> bool:
    """Whether the blocks wait for data by polling a buffer that starts as EMPTY."""
    return isinstance(tiling, PortableTiling) and not tiling.barrier


def zeroed(tiling: Any, recurrences: int) -> dict[str, int]:
    """Bytes that must be zero before a kernel runs, by struct member; multiples of 16."""
    if isinstance(tiling, grid_kernels.GridTiling):
        return grid_kernels.zeroed(tiling, recurrences)
    counts = isinstance(tiling, PortableTiling) and tiling.barrier
    return {"counter": -(-recurrences // 4) * 16} if counts else {}


def defines(
    a: LSTMArguments, flags: dict[str, int], hidden: int, one_feature: bool, doutput: bool
) -> tuple[Any, ...]:
    """The macros a kernel is compiled with, except those of its tiling.

    flags: the statistics that terms are normalized with. doutput: whether the output has a
    gradient, for the backward kernel.
    """
    return (
        ("TYPE", nvrtc.TYPES[a.input.dtype]),
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


def compile_ahead(plan: Any, backward: bool) -> None:
    """Start compiling the forward kernel of a plan, and the backward kernel, all at once.

    Assumes that the output will have a gradient. Other backward kernels are compiled when needed.
    """
    device, H = plan.term.device.index or 0, plan.sizes[-1]
    for direction in ("forward", "backward") if backward else ("forward",):
        tiling, defines = plan.tilings[direction], plan.defines[direction == "backward"]
        if plan.family == CLUSTER:
            wanted = cluster_kernels.program(direction, tiling, device, defines)
        elif plan.family == GRID:
            wanted = grid_kernels.program(tiling, defines)
        else:
            shared = portable_kernels.shared_bytes(direction, tiling, plan.term.dtype, H)
            wanted = portable_kernels.program(direction, tiling, device, shared, defines)
        nvrtc.compile_ahead(*wanted)


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
    W_h transposed if `plan.transposes`. rows: rows of the statistics of x, h and c. has_doutput:
    whether the output has a gradient. The plan caches the kernel and its grid.
    """
    plan = call.plan
    if log.isEnabledFor(logging.DEBUG):
        log.debug("lstm %s in CUDA, %s: %s", direction, plan.family, plan.tilings[direction])
    cached = plan.launches.get((direction, has_doutput))
    if cached is None:
        cached = plan.launches[direction, has_doutput] = _kernel_and_grid(
            direction, plan, plan.defines[has_doutput]
        )
    if plan.family == GRID:
        _add_spilled(direction, call, at)
    a = call.a
    numbers = call.T, call.B, *rows, a.eps, a.rate_c, a.rate_h
    arguments = _STRUCTS[direction].packed(at, *numbers)
    kernel, grid = cached
    return Launch(kernel, grid, arguments)


Cached = tuple[Kernel, tuple[int, int]]


def _kernel_and_grid(direction: str, plan: Any, defines: tuple[Any, ...]) -> Cached:
    """Compile the kernel if necessary. Raises if blocks that synchronize do not fit on the GPU."""
    tiling, device = plan.tilings[direction], plan.term.device.index or 0
    _, R, _, _, H = plan.sizes
    dtype, splits = plan.term.dtype, 1
    if plan.family == CLUSTER:
        cluster = cluster_kernels.cluster_of(tiling, device)
        assert cluster is not None
        blocks = cluster
        kernel = cluster_kernels.kernel(direction, tiling, cluster, device, defines)
    elif plan.family == GRID:
        blocks, splits = tiling.blocks, tiling.splits
        kernel = grid_kernels.kernel(tiling, device, defines)
    else:
        blocks = -(-H // portable_kernels.UNITS)
        shared = portable_kernels.shared_bytes(direction, tiling, dtype, H)
        kernel = portable_kernels.kernel(direction, tiling, device, shared, defines)
    # Independent clusters need not run at the same time.
    if blocks * (R * splits if kernel.together else 1) > kernel.at_once:
        raise RuntimeError("the blocks of the recurrence do not fit on the GPU at once")
    return kernel, (blocks, R * splits)


def _add_spilled(direction: str, call: Any, at: dict[str, int]) -> None:
    """Allocate memory for weights that are not resident."""
    spilled = call.R * call.plan.tilings[direction].spilled
    if spilled:
        spill = torch.empty(spilled, dtype=torch.uint8, device=call.term.device)
        call.kept.append(spill)
        at["spilled"] = spill.data_ptr()
