"""The batch-normalized RNN in one CUDA C++ launch per pass, for the calls that those kernels cover.

A block owns 8 or 16 units for all rows of the batch and keeps its part of W_h on the chip. See
``rnn.cuh``, ``rnn_forward.cu`` and ``rnn_backward.cu``.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rbn.ops.definition import RNNArguments
from rbn.ops.gpu.lstm.input_moments import input_moments
from rbn.ops.gpu.lstm.kernel_arguments import aligned
from rbn.ops.gpu.lstm.persistent.tiles import multiprocessors, power_of_two
from rbn.ops.gpu.lstm.workspace import stride_of
from rbn.ops.gpu.runtime import nvrtc
from rbn.ops.gpu.runtime.driver import Kernel, device_of, shared_limit, structure
from rbn.ops.gpu.runtime.launch_cache import launch_cached
from rbn.ops.gpu.stepwise import StepCall

log = logging.getLogger("rbn.ops.gpu")

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MOST_TILES = 8  # tiles of 16 rows
_POLLED = 8  # blocks of columns, at most, whose data are polled
_COLUMNS = 128  # per program of `input_moments`

_COMMON = ("wx", "weight", "bias", "gamma_x", "gamma_h", "mean_x", "var_x")
_MEMBERS = {
    "forward": ("mean_h", "var_h", "hs", "centered", "h_n", "lengths", "inv_n"),
    "backward": (
        *("var_h", "centered", "lengths", "inv_n", "doutput", "dh", "da", "dwx"),
        *("dbias", "dgamma_x", "dgamma_h"),
    ),
}
_STRUCTS = {
    direction: structure(
        f"RNN{direction.capitalize()}",
        [(name, ctypes.c_void_p) for name in (*_COMMON, *members, "handed", "counters")]
        + [(name, ctypes.c_int) for name in ("T", "B", "rows_x", "rows_h")]
        + [("eps", ctypes.c_float)],
    )
    for direction, members in _MEMBERS.items()
}


@dataclass(frozen=True)
class Tiling:
    """How the work is divided, the same way in both passes.

    Attributes:
        units: hidden units per block, 8 or 16.
        team: blocks that divide the columns of their products among each other.
        tiles: tiles of 16 rows.
        row_warps, column_warps: warps that divide the rows, and the columns of W_h.
        chunk: blocks of columns that a warp loads at once.
        registers: whether the weights stay in registers instead of shared memory.
        barrier: whether the blocks synchronize through a counter. Otherwise they poll the data
            itself, in a buffer that starts as EMPTY.
    """

    units: int
    team: int
    tiles: int
    row_warps: int
    column_warps: int
    chunk: int
    registers: bool
    barrier: bool

    @property
    def warps(self) -> int:
        """Warps per block."""
        return self.row_warps * self.column_warps

    def blocks(self, hidden: int) -> int:
        """Blocks of a launch."""
        return -(-hidden // (self.units * self.team)) * self.team

    def shared(self, dtype: torch.dtype, hidden: int) -> int:
        """Bytes of shared memory, as the backward kernel, which needs more, lays it out."""
        columns = self.team * self.units
        pitch = columns + 8 if columns > 8 else 8
        direct = self.column_warps == self.team == 1 and columns == 8
        direct = direct and self.row_warps == self.tiles
        sums = 0 if direct else self.column_warps * 16 * self.tiles * pitch
        split = self.column_warps * self.team
        per_warp = -(-_column_blocks(dtype, hidden) // split)
        weights = 0 if self.registers else per_warp * self.column_warps * columns * 64
        return 4 * (sums + 8 * self.warps * self.units) + weights


def _column_blocks(dtype: torch.dtype, hidden: int) -> int:
    return -(-stride_of(hidden) // (16 if dtype == torch.float32 else 32))


@functools.lru_cache(maxsize=256)
def choose(
    dtype: torch.dtype, batch: int, hidden: int, processors: int, limit: int
) -> Tiling | None:
    """The tiling for a GPU, or None if no launch can have all its blocks on the GPU at once.

    processors: multiprocessors. limit: bytes of shared memory that a block may use.
    """
    tiles = -(-batch // 16)
    if tiles > _MOST_TILES or hidden % 2:
        return None
    blocks = _column_blocks(dtype, hidden)
    if blocks <= _POLLED and -(-hidden // 8) <= processors:
        tiling = Tiling(8, 1, tiles, tiles, 1, blocks, registers=True, barrier=False)
    elif -(-hidden // 8) <= processors:
        rows = 1 if tiles <= 4 else 2
        tiles = -(-tiles // rows) * rows
        tiling = Tiling(8, 1, tiles, rows, 8 // rows, 2, registers=False, barrier=True)
    else:  # reading all rows in every block would take longer than all the rest
        rows = 4 if tiles > 4 else 2
        tiles = -(-tiles // rows) * rows
        tiling = Tiling(16, 4, tiles, rows, 8 // rows, 2, registers=False, barrier=True)
    if tiling.blocks(hidden) > processors or tiling.shared(dtype, hidden) > limit:
        return None
    return tiling


@functools.lru_cache(maxsize=64)
def _capable(device: int) -> bool:
    capability = torch.cuda.get_device_capability(device)
    return capability >= (8, 0) and nvrtc.works(capability)


def supports_options(a: RNNArguments) -> bool:
    """Whether the kernels support all options of this call. In float32 they multiply in tf32."""
    zoned = a.mask_h is not None or bool(a.rate_h)
    return not (a.include or zoned or (a.input.dtype == torch.float32 and not a.tf32))


def tiling_for(a: RNNArguments) -> Tiling | None:
    """The tiling of a call, whose `input` is the input term; None if it must run step by step."""
    wx, device = a.input, a.input.device.index or 0
    if not wx.is_cuda or not supports_options(a) or not _capable(device):
        return None
    sizes = wx.shape[1:]
    return choose(wx.dtype, *sizes, multiprocessors(device), shared_limit(device))


@functools.lru_cache(maxsize=256)
def kernel(
    direction: str, tiling: Tiling, device: int, shared: int, defines: tuple[Any, ...]
) -> Kernel:
    """The kernel, compiled if necessary."""
    arch = nvrtc.architecture(torch.cuda.get_device_capability(device))
    assert arch is not None  # see `_capable`
    name = f"rnn_{direction}"
    code = nvrtc.compiled(name, macros(tiling, defines), arch)
    return Kernel(code, name, 32 * tiling.warps, shared)


def macros(tiling: Tiling, defines: tuple[Any, ...]) -> dict[str, int]:
    """All macros that a kernel is compiled with."""
    return dict(defines) | {
        "UNITS": tiling.units,
        "TEAM": tiling.team,
        "MT": tiling.tiles,
        "MW": tiling.row_warps,
        "KS": tiling.column_warps,
        "CHUNK": tiling.chunk,
        "REGISTERS": int(tiling.registers),
        "BARRIER": int(tiling.barrier),
        "BIAS": 1,
    }


def exchanged(tiling: Tiling, like: Tensor, steps: int) -> Tensor:
    """A buffer ``[steps, B, stride]`` for what blocks exchange; rows start at 16-byte multiples."""
    _, B, H = like.shape
    shape, device = (steps, B, stride_of(H)), like.device
    if tiling.barrier:
        return torch.empty(shape, dtype=like.dtype, device=device)
    bits = torch.int32 if like.dtype == torch.float32 else torch.int16
    return torch.full(shape, -1, dtype=bits, device=device).view(like.dtype)  # EMPTY


def begin(row: Tensor, h0: Tensor) -> None:
    """Copy h0 ``[B, H]`` into the first step of a buffer from `exchanged`; padding becomes zero."""
    H = h0.shape[1]
    row[:, :H] = h0
    if row.shape[1] != H:
        row[:, H:] = 0


def write_input_moments(call: StepCall, mean: Tensor, var: Tensor) -> None:
    """Mean and var of the input term over the unpadded rows of every step, ``[T, H]``."""
    wx, padded = call.wx, call.valid is not None
    lengths = call.lengths if padded else wx  # wx: a placeholder that the kernel does not read
    tensors = wx, mean, var, lengths
    launch_cached(
        input_moments,
        (call.T, -(-wx.shape[2] // _COLUMNS)),
        tuple(tensor.data_ptr() for tensor in tensors),
        lambda: tensors,
        (call.T, call.B),
        {
            "F": wx.shape[2],
            "ROWS": min(128, max(16, power_of_two(call.B))),
            "COLUMNS": _COLUMNS,
            "LENGTHS": padded,
        },
        (wx.dtype,),
        wx,
    )


def launch(direction: str, call: Any, tiling: Tiling, tensors: dict[str, Tensor]) -> None:
    """Launch the forward or the backward kernel.

    call: the call's sizes, parameters and modes. tensors: the other members of the kernel's struct;
    absent ones are not read.
    """
    wx, a, H, device = call.wx, call.a, call.H, call.wx.device
    log.debug("bn_rnn %s T=%d B=%d H=%d %s: %s", direction, call.T, call.B, H, wx.dtype, tiling)
    blocks = tiling.blocks(H)
    counters = torch.zeros(1 + blocks // tiling.team, dtype=torch.int32, device=device)
    handed = call.empty
    if tiling.team > 1:
        handed = call.new(blocks, tiling.team, 16 * tiling.tiles, tiling.units)
    tensors = tensors | dict(zip(("bias", "gamma_x", "gamma_h"), call.vectors, strict=True))
    tensors |= {"wx": wx, "handed": handed, "counters": counters}
    if call.valid is not None:
        tensors |= {"lengths": call.lengths, "inv_n": call.inv_n}
    tensors = {name: aligned(tensor) for name, tensor in tensors.items()}
    defines = (
        ("TYPE", _TYPES[wx.dtype]),
        ("H", H),
        ("MODE_X", call.flags["X"]),
        ("MODE_H", call.flags["NORM"]),
        ("LENGTHS", int(a.lengths is not None)),
        ("SAVE", int(a.save)),
        ("DOUTPUT", int("doutput" in tensors)),
        ("RELU", int(a.nonlinearity == "relu")),
    )
    at = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    rows = tensors["mean_x"].shape[0], tensors["var_h"].shape[0]
    arguments = _STRUCTS[direction].packed(at, call.T, call.B, *rows, a.eps)
    with device_of(wx):
        code = kernel(direction, tiling, device.index or 0, tiling.shared(wx.dtype, H), defines)
        if blocks > code.at_once:
            raise RuntimeError("the blocks of the recurrence do not fit on the GPU at once")
        code.launch((blocks, 1), arguments)
