"""The layer-normalized LSTM in one CUDA C++ launch per pass, for the calls that it covers.

A thread-block cluster owns some rows of the batch and keeps all of W_h on the chip. See ``ln.cuh``,
``ln_forward.cu`` and ``ln_backward.cu``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rbn.ops.definition import LSTM, VECTORS, LSTMArguments
from rbn.ops.gpu.ln_lstm.ln_steps import Call, Saved, gradients, input_moments
from rbn.ops.gpu.lstm.kernel_arguments import aligned
from rbn.ops.gpu.lstm.prepare import padded_factors
from rbn.ops.gpu.runtime import nvrtc
from rbn.ops.gpu.runtime.driver import Kernel, device_of, shared_limit, structure
from rbn.ops.gpu.runtime.precision import multiplied_in_tf32
from rbn.ops.gpu.stepwise import weight_gradient
from rbn.ops.input_term import with_term
from rbn.ops.operator import Incoming, Results

log = logging.getLogger("rbn.ops.gpu")

_CLUSTERS = (1, 2, 4, 8, 16)  # blocks
_MOST_UNITS = 128  # per block: four per lane
_UNITS = 24  # the least units per block, with several blocks; smaller blocks were not timed
_MOST_STREAMED = 1024  # units of a layer that reads weights from L2; larger ones were not timed
_WAVES = 3  # the most waves of clusters; more were not timed
_MEMBERS = {
    "forward": (
        *("wx", "weight", *VECTORS, "hs", "cs", "centered", "moments", "h_n", "lengths"),
        "streamed",
    ),
    "backward": (
        *("wx", "weight", "transposed", *VECTORS, "cs", "centered", "moments", "lengths"),
        "doutput",
        *("dh_n", "dc_n", "da", "dpre", "rows", "streamed"),
    ),
}


_STRUCTS = {
    "forward": structure("LNForward", _MEMBERS["forward"], ("T", "B"), ("eps",)),
    "backward": structure("LNBackward", _MEMBERS["backward"], ("T", "B")),
}


def _up(n: int, d: int) -> int:
    return -(-n // d)


@dataclass(frozen=True)
class Tiling:
    """How the work is divided.

    Attributes:
        cluster: blocks that own the same rows of the batch.
        units: hidden units per block, a multiple of 8.
        tiles: tiles of 8 rows that a cluster owns. Each row has a warp.
        split: warps that divide the columns of a forward product.
        registers: registers per thread for weights.
        capacity: bytes of shared memory per block. Weights that do not fit are read from L2 in
            every step.
    """

    cluster: int
    units: int
    tiles: int = 1
    split: int = 1
    registers: int = 0
    capacity: int = 227 * 1024

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * 8 * self.tiles

    def blocks(self, batch: int) -> int:
        """Blocks of a launch."""
        return _up(batch, 8 * self.tiles) * self.cluster

    def _product(self, direction: str) -> tuple[int, int]:
        """A warp's tiles of 16 rows of the weights, and its blocks of 32 columns."""
        warps, units = 8 * self.tiles, self.cluster * self.units
        if direction == "forward":
            return _up(self.units // 4, warps // self.split), _up(_up(units, 32), self.split)
        return _up(_up(units, 16), warps), self.units // 8

    def fragments(self, direction: str, dtype: torch.dtype) -> tuple[int, int, int]:
        """Fragments of a warp's weights in registers, in shared memory, and streamed from L2."""
        tiles, columns = self._product(direction)
        kept = min(2 * tiles * columns, self.registers // 4)
        left = 2 * tiles * columns - kept
        space = self.capacity - self._without_weights(direction, dtype)
        resident = max(0, min(left, space // (8 * self.tiles * 512)))
        return kept, resident, left - resident

    def streamed(self, dtype: torch.dtype) -> int:
        """Bytes of weights that a block reads in every step, at most."""
        return max(self.fragments(d, dtype)[2] for d in _MEMBERS) * 16 * self.threads

    def shared(self, direction: str, dtype: torch.dtype) -> int:
        """Bytes of shared memory, as the kernels lay it out."""
        resident = self.fragments(direction, dtype)[1] * 8 * self.tiles * 512
        return resident + self._without_weights(direction, dtype)

    def _without_weights(self, direction: str, dtype: torch.dtype) -> int:
        rows = 8 * self.tiles
        tiles, columns = self._product(direction)
        common = 4 * rows + 32 * self.units + 16 * rows * self.cluster + 8 * (2 * rows + 1)
        if direction == "forward":
            part = self.split * rows * (rows // self.split * tiles * 16 + 4) * 4
            operands = rows * (_pitch(columns * self.split) + 2 * self.units) + part
        else:
            share = 2 if shares_in_half(dtype) else 4
            operands = rows * (_pitch(self.units // 8) + self.cluster * self.units * share)
        return _up(operands + common, 16) * 16


def _pitch(blocks: int) -> int:
    """Bytes from one row of an operand to the next, for blocks of 32 columns."""
    return 64 * (blocks + (blocks + 1) % 2)


def shares_in_half(dtype: torch.dtype) -> bool:
    """Whether the shares of dh are exchanged in 16 bits, like the operands of their products."""
    return dtype != torch.float32


def tiling(
    dtype: torch.dtype, hidden: int, cluster: int, limit: int, tiles: int = 1
) -> Tiling | None:
    """The tiling for clusters of a size; None if the layer is too large or too small for it.

    limit: bytes of shared memory that a block may use.
    """
    units = _up(_up(hidden, cluster), 8) * 8
    if units > _MOST_UNITS or (cluster > 1 and units * cluster >= 2 * hidden):
        return None
    # A thread has 255 registers, or 128 in blocks of 512 threads.
    registers = 0 if tiles > 1 else 128 if units <= 32 else 64 if units <= 64 else 0
    split = 1
    while units // 4 < 8 * tiles // split and split < 8:
        split *= 2
    return Tiling(cluster, units, tiles, split, registers, limit)


@functools.lru_cache(maxsize=256)
def choose(dtype: torch.dtype, batch: int, hidden: int, device: int) -> Tiling | None:
    """The tiling with the fewest waves on a GPU, or None if none fits.

    Tries large clusters, which have small blocks, first. Weights that do not fit on the chip are
    read from L2, but only by clusters of 16 blocks that all run at once.
    """
    limit = shared_limit(device)
    resident, streamed = [], []
    for tiles in (1, 2):
        for cluster in reversed(_CLUSTERS):
            candidate = tiling(dtype, hidden, cluster, limit, tiles)
            if candidate is None or (cluster > 1 and candidate.units < _UNITS):
                continue
            if not candidate.streamed(dtype):
                resident.append(candidate)
            elif cluster == max(_CLUSTERS) and hidden <= _MOST_STREAMED:
                streamed.append(candidate)
    best, least = None, _WAVES + 1
    for candidate in resident or streamed:
        at_once = clusters_at_once(candidate, dtype, hidden, device)
        waves = _up(candidate.blocks(batch), at_once * candidate.cluster) if at_once else least
        if waves < least:
            best, least = candidate, waves
        if least == 1:
            return best
    return best if resident else None


def clusters_at_once(tiling: Tiling, dtype: torch.dtype, hidden: int, device: int) -> int:
    """How many clusters the GPU runs at once; 0 if it refuses their size."""
    wanted = {d: defines(d, dtype, hidden, lengths=False, option=True) for d in _MEMBERS}
    for direction, own in wanted.items():
        nvrtc.compile_ahead(*program(direction, tiling, dtype, device, own))
    with torch.cuda.device(device):
        kernels = [kernel(d, tiling, dtype, device, own) for d, own in wanted.items()]
    return min(k.at_once for k in kernels) // tiling.cluster


@functools.lru_cache(maxsize=64)
def _capable(device: int) -> bool:
    recent = torch.cuda.get_device_capability(device) >= (9, 0)
    return recent and nvrtc.version() >= nvrtc.FOR_HOPPER and nvrtc.supports(device)


def supports_options(a: LSTMArguments) -> bool:
    """Whether the kernels support all options. In float32 they multiply as precisely as tf32."""
    return not (a.zoned or (a.input.dtype == torch.float32 and not a.tf32))


def tiling_for(a: LSTMArguments) -> Tiling | None:
    """The tiling of a call; None if it must run step by step."""
    x, device = a.input, a.input.device.index or 0
    if not x.is_cuda or not supports_options(a) or not _capable(device):
        return None
    return choose(x.dtype, x.shape[1], a.weight_hh.shape[1], device)


def defines(
    direction: str, dtype: torch.dtype, hidden: int, lengths: bool, option: bool
) -> tuple[tuple[str, int], ...]:
    """The macros that a call determines, besides those of the tiling.

    option: whether tensors are saved (forward), or the output has a gradient (backward).
    """
    own = "SAVE" if direction == "forward" else "DOUTPUT"
    return (
        *(("TYPE", nvrtc.TYPES[dtype]), ("H", hidden), ("LENGTHS", int(lengths))),
        (own, int(option)),
    )


def macros(
    direction: str, tiling: Tiling, dtype: torch.dtype, defines: tuple[Any, ...]
) -> dict[str, int]:
    """All macros that a kernel is compiled with."""
    kept, resident, _ = tiling.fragments(direction, dtype)
    return dict(defines) | {
        "CLUSTER": tiling.cluster,
        "UNITS": tiling.units,
        "TILES": tiling.tiles,
        "SPLIT": tiling.split,
        "KEPT": kept,
        "RESIDENT": resident,
        "SHARES16": int(shares_in_half(dtype)),
        "SHARED_BYTES": tiling.shared(direction, dtype),
    }


def program(
    direction: str, tiling: Tiling, dtype: torch.dtype, device: int, defines: tuple[Any, ...]
) -> nvrtc.Program:
    """What to compile for a tiling."""
    arch = nvrtc.architecture_of(device)
    return f"ln_{direction}", macros(direction, tiling, dtype, defines), arch


@functools.lru_cache(maxsize=256)
def kernel(
    direction: str, tiling: Tiling, dtype: torch.dtype, device: int, defines: tuple[Any, ...]
) -> Kernel:
    """The kernel, compiled if necessary; `device` must be the current device."""
    wanted = program(direction, tiling, dtype, device, defines)
    code, shared = nvrtc.compiled(*wanted), tiling.shared(direction, dtype)
    return Kernel(code, wanted[0], tiling.threads, shared, tiling.cluster)


def forward(given: LSTMArguments, tiling: Tiling, separate: bool) -> Results:
    """Run the recurrence over all steps. separate: whether no two results may share memory."""
    a: LSTMArguments
    a, kept = with_term(LSTM, given, make_factors=padded_factors)
    if separate:  # the factors may be views of one buffer
        kept.update(x=None, w=None)
    call = Call(a)
    T, B, H, wx = call.T, call.B, call.H, aligned(call.wx)
    hs = call.new(T + 1, B, H, dtype=wx.dtype)
    hs[0] = a.h0
    cs = call.new(T + 1 if a.save else 1, B, H)
    cs[0] = a.c0
    centered = call.new(T if a.save else 0, B, 4 * H, dtype=wx.dtype)
    moments = input_moments(call)
    tensors = {"wx": wx, "hs": hs, "cs": cs, "centered": centered, "moments": moments}
    if a.lengths is not None:
        tensors["h_n"] = call.state(a.h0)  # for rows without steps
    _launch("forward", call, tiling, tensors, a.eps)
    output = hs[1:]
    h_n = hs[T].clone() if a.lengths is None else tensors["h_n"].to(wx.dtype)
    saved = Saved()
    if a.save:
        kept |= {"centered": centered, "cs": cs, "moments": moments}
        kept |= {"output": output} if separate else {"states": hs, "vectors": call.joined}
        saved = Saved(**kept)
    return Results(output, (h_n, cs[-1].to(wx.dtype, copy=True)), (None,) * 6, saved, tiling)


def backward(
    given: LSTMArguments, r: Saved, tiling: Tiling, incoming: Incoming
) -> dict[str, Tensor | None]:
    """The gradients of all differentiable tensors, by name."""
    a: LSTMArguments
    a, _ = with_term(LSTM, given, r.wx)
    assert r.centered is not None
    assert r.cs is not None
    assert r.moments is not None
    call = Call(a, r.vectors)
    B, H, wx = call.B, call.H, aligned(call.wx)
    rows = call.new(4, B, H)  # each row's gradients of h0, c0, gamma_c and beta_c
    da, dwx = torch.empty_like(wx), torch.empty_like(wx)
    tensors = {"wx": wx, "cs": r.cs, "centered": r.centered, "moments": r.moments}
    tensors |= {"da": da, "dpre": dwx, "rows": rows}
    for name, state in zip(("dh_n", "dc_n"), incoming.states, strict=True):
        if state is not None:
            tensors[name] = state.to(torch.float32).contiguous()
    if incoming.output is not None:
        tensors["doutput"] = incoming.output.contiguous()
    _launch("backward", call, tiling, tensors)
    tf32 = wx.dtype == torch.float32 and wx.is_cuda
    with multiplied_in_tf32(True) if tf32 else contextlib.nullcontext():
        if r.states is not None:
            dweight = da.view(-1, 4 * H).t().mm(r.states[:-1].view(-1, H))
        else:
            assert r.output is not None
            dweight = weight_gradient(da, a.h0, r.output)
    dweight = dweight.to(a.weight_hh.dtype)
    separate = r.states is None
    return gradients(call, given, r, dwx, rows, dweight, incoming.input, separate)


def _launch(
    direction: str, call: Call, tiling: Tiling, tensors: dict[str, Tensor], *numbers: float
) -> None:
    """Launch the forward or the backward kernel.

    tensors: members of the kernel's struct by name; the kernel does not read absent ones. The
    parameters and lengths are added.
    """
    a, (T, B, H), dtype = call.a, (call.T, call.B, call.H), call.wx.dtype
    if log.isEnabledFor(logging.DEBUG):
        log.debug("ln_lstm %s T=%d B=%d H=%d %s: %s", direction, T, B, H, dtype, tiling)
    weight = aligned(a.weight_hh.to(dtype).contiguous())
    tensors |= dict(zip(VECTORS, call.vectors, strict=True)) | {"weight": weight}
    if direction == "backward":
        tensors["transposed"] = weight.t().contiguous()
    if a.lengths is not None:
        tensors["lengths"] = call.lengths
    streamed = tiling.fragments(direction, dtype)[2] * tiling.blocks(B) * tiling.threads
    if streamed:
        tensors["streamed"] = call.new(streamed, 4)
    option = a.save if direction == "forward" else "doutput" in tensors
    given = defines(direction, dtype, H, a.lengths is not None, option)
    at = {name: value.data_ptr() for name, value in tensors.items()}
    arguments = _STRUCTS[direction].packed(at, T, B, *numbers)
    with device_of(call.wx):
        code = kernel(direction, tiling, dtype, call.wx.device.index or 0, given)
        code.launch((tiling.blocks(B), 1), arguments)
