"""The batch-normalized RNN in one CUDA C++ launch per pass, for the calls that these kernels cover.

A block owns 8 or 16 units for all rows of the batch and keeps its part of W_h on the chip. See
``rnn.cuh``, ``rnn_forward.cu`` and ``rnn_backward.cu``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.definition import RNN, RNNArguments
from rbn.ops.gpu.bn_rnn.rnn_steps import Saved
from rbn.ops.gpu.lstm.constant_terms import raised_variances
from rbn.ops.gpu.lstm.kernel_arguments import aligned
from rbn.ops.gpu.lstm.portable import portable_kernels
from rbn.ops.gpu.lstm.portable.portable_kernels import PortableTiling
from rbn.ops.gpu.lstm.prepare import fill_constants, padded_factors, write_input_moments
from rbn.ops.gpu.lstm.workspace import stride_of
from rbn.ops.gpu.row_counts import row_counts
from rbn.ops.gpu.runtime import nvrtc
from rbn.ops.gpu.runtime.device import multiprocessors
from rbn.ops.gpu.runtime.driver import Kernel, device_of, shared_limit, structure
from rbn.ops.gpu.runtime.precision import multiplied_in_tf32
from rbn.ops.gpu.sequence_statistics import sequence_backward, sequence_moments
from rbn.ops.identical_rows import identical_steps, raise_variances
from rbn.ops.input_term import through_term
from rbn.ops.operator import Incoming, Results

log = logging.getLogger("rbn.ops.gpu")

_BATCH, _GIVEN = 1, 2  # the statistics that a term is normalized with
_MOST_TILES = 8  # tiles of 16 rows
_POLLED = 8  # up to this many column blocks, the blocks poll the data

_VECTORS = ("bias", "gamma_x", "gamma_h")
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
        ("wx", "weight", *_VECTORS, "mean_x", "var_x", *members, "handed", "counters"),
        ("T", "B", "rows_x", "rows_h"),
        ("eps",),
    )
    for direction, members in _MEMBERS.items()
}


@dataclass(frozen=True)
class Tiling(PortableTiling):
    """How the work is divided, the same for both passes.

    Attributes:
        units: hidden units per block, 8 or 16.
        team: blocks that divide the columns of their products among each other.
    """

    units: int = portable_kernels.UNITS
    team: int = 1

    def blocks(self, hidden: int) -> int:
        """Blocks of a launch."""
        return -(-hidden // (self.units * self.team)) * self.team

    def shared(self, direction: str, dtype: torch.dtype, hidden: int) -> int:
        """Bytes of shared memory, as the kernels lay it out; the backward kernel needs more."""
        columns = self.team * self.units
        pitch = columns + 8 if columns > 8 else 8
        direct = self.column_warps == self.team == 1 and columns == 8
        direct = direct and self.row_warps == self.tiles
        sums = 0 if direct else self.column_warps * 16 * self.tiles * pitch
        split = self.column_warps * self.team
        per_warp = -(-_column_blocks(dtype, hidden) // split)
        weights = 0 if self.registers else per_warp * self.column_warps * columns * 64
        sums += (8 if direction == "backward" else 4) * self.threads // 32 * self.units
        return 4 * sums + weights


def _column_blocks(dtype: torch.dtype, hidden: int) -> int:
    return -(-stride_of(hidden) // (16 if dtype == torch.float32 else 32))


@functools.lru_cache(maxsize=256)
def choose(
    dtype: torch.dtype, batch: int, hidden: int, processors: int, limit: int
) -> Tiling | None:
    """The tiling for a GPU, or None if the blocks of a launch would not all fit at once.

    processors: multiprocessors. limit: bytes of shared memory that a block may use.
    """
    tiles = -(-batch // 16)
    if tiles > _MOST_TILES or hidden % 2:
        return None
    blocks = _column_blocks(dtype, hidden)
    if blocks <= _POLLED and -(-hidden // 8) <= processors:
        tiling = Tiling(tiles, tiles, 1, blocks, registers=True)
    elif -(-hidden // 8) <= processors:
        rows = 1 if tiles <= 4 else 2
        tiles = -(-tiles // rows) * rows
        tiling = Tiling(tiles, rows, 8 // rows, 2, registers=False, barrier=True)
    else:  # teams, because reading all rows in every block would dominate the time
        rows = 4 if tiles > 4 else 2
        tiles = -(-tiles // rows) * rows
        tiling = Tiling(tiles, rows, 8 // rows, 2, registers=False, barrier=True, units=16, team=4)
    if tiling.blocks(hidden) > processors or tiling.shared("backward", dtype, hidden) > limit:
        return None
    return tiling


def supports_options(a: RNNArguments) -> bool:
    """Whether the kernels support all options of this call. In float32 they multiply in tf32."""
    zoned = a.mask_h is not None or bool(a.rate_h)
    return not (a.include or zoned or (a.input.dtype == torch.float32 and not a.tf32))


def tiling_for(a: RNNArguments) -> Tiling | None:
    """The tiling of a call; None if it must run step by step."""
    x, device = a.input, a.input.device.index or 0
    if a.gated or not x.is_cuda or not supports_options(a) or not nvrtc.supports(device):
        return None
    sizes = x.shape[1], a.weight_hh.shape[1]
    return choose(x.dtype, *sizes, multiprocessors(device), shared_limit(device))


@functools.lru_cache(maxsize=256)
def kernel(
    direction: str, tiling: Tiling, device: int, shared: int, defines: tuple[Any, ...]
) -> Kernel:
    """The kernel, compiled if necessary."""
    name = f"rnn_{direction}"
    code = nvrtc.compiled(name, macros(tiling, shared, defines), nvrtc.architecture_of(device))
    return Kernel(code, name, tiling.threads, shared)


def macros(tiling: Tiling, shared: int, defines: tuple[Any, ...]) -> dict[str, int]:
    """All macros that a kernel is compiled with."""
    own = {"UNITS": tiling.units, "TEAM": tiling.team, "BIAS": 1, "FEW": 0}
    return portable_kernels.macros(tiling, shared, defines) | own


def exchanged(tiling: Tiling, steps: int, like: Tensor) -> Tensor:
    """A buffer ``[steps, B, stride]`` for what blocks exchange; rows start at 16-byte multiples."""
    _, B, H = like.shape
    shape, device = (steps, B, stride_of(H)), like.device
    if tiling.barrier:
        return torch.empty(shape, dtype=like.dtype, device=device)
    bits = torch.int32 if like.dtype == torch.float32 else torch.int16
    return torch.full(shape, -1, dtype=bits, device=device).view(like.dtype)  # EMPTY


def forward(a: RNNArguments, tiling: Tiling, separate: bool) -> Results:
    """Run the recurrence over all steps. separate: whether no two results may share memory."""
    kept: dict[str, Tensor | None] = {}
    wx = a.input
    if a.weight_ih is not None:
        x, w = padded_factors(a.input, a.weight_ih)
        wx = kept["wx"] = F.linear(x, w)
        if not separate:  # the factors may be views of one buffer
            kept |= {"x": None if x is a.input else x, "w": None if w is a.weight_ih else w}
    wx = aligned(wx.contiguous())
    (T, B, H), dtype, device = wx.shape, wx.dtype, wx.device
    lengths = _lengths(a)
    moments = own = _new_moments(a, wx, separate)
    if a.population:
        moments = [aligned(_given(getattr(a, name))) for name in RNN.moments]
    elif a.sequence:
        sequence_moments(wx, lengths.get("lengths"), *moments[:2])
    else:
        write_input_moments(wx, lengths.get("lengths"), *moments[:2])
        if a.exclude:
            fill_constants(moments[0], moments[1], lengths["inv_n"], a.eps)
    hs = exchanged(tiling, T + 1, wx)
    hs[0, :, :H] = a.h0
    if hs.shape[2] != H:
        hs[0, :, H:] = 0
    centered = torch.empty((T if a.save else 0, B, H), dtype=dtype, device=device)
    vectors = _vectors(a)
    tensors = lengths | vectors | dict(zip(RNN.moments, moments, strict=True))
    tensors |= {"wx": wx, "weight": _weight(a), "hs": hs, "centered": centered}
    if a.lengths is not None:
        tensors["h_n"] = a.h0.to(torch.float32).expand(B, H).clone()  # for rows without steps
    _launch("forward", a, tiling, tensors)
    output = hs[1:] if hs.shape[2] == H else hs[1:, :, :H].contiguous()
    h_n = output[-1].clone() if a.lengths is None else tensors["h_n"].to(dtype)
    statistics = tuple(own) or (None,) * 4
    saved = Saved()
    if a.save:
        kept |= dict(zip(RNN.moments, statistics, strict=True)) | {"centered": centered}
        # Save `hs` only if the output may share its memory; otherwise it would be kept in addition.
        is_view = hs.shape[2] == H and not separate
        saved = Saved(**kept, output=None if is_view else output, states=hs if is_view else None)
    return Results(output, (h_n,), statistics, saved, tiling)


def backward(
    a: RNNArguments, r: Saved, tiling: Tiling, incoming: Incoming
) -> dict[str, Tensor | None]:
    """The gradients of all differentiable tensors, by name."""
    assert r.centered is not None
    doutput, (dh_n,) = incoming.output, incoming.states
    wx = a.input if r.wx is None else r.wx
    wx = aligned(wx.contiguous())
    (T, B, H), dtype, device = wx.shape, wx.dtype, wx.device
    tensors = _lengths(a)
    if a.population:
        moments = {name: aligned(_given(getattr(a, name))) for name in RNN.moments}
    else:
        moments = {name: value for name in RNN.moments if (value := getattr(r, name)) is not None}
        moments["var_h"] = _raised_variance(a, wx, moments, tensors.get("lengths"))
    tensors |= moments | {"wx": wx, "centered": r.centered}
    if doutput is not None:
        tensors["doutput"] = aligned(doutput.contiguous())
    dh = _copied(dh_n, wx)
    da, dwx, weight = exchanged(tiling, T, wx), torch.empty_like(wx), _weight(a)
    tensors |= _vectors(a) | {"weight": weight.t().contiguous(), "dh": dh, "da": da, "dwx": dwx}
    sums = {name: torch.empty(H, dtype=torch.float32, device=device) for name in _VECTORS}
    _launch("backward", a, tiling, tensors | {f"d{name}": sums[name] for name in _VECTORS})
    if a.sequence:
        own = moments["mean_x"], moments["var_x"]
        known = wx, tensors.get("lengths"), own, tensors["gamma_x"], a.eps
        sequence_backward(*known, dwx, sums["bias"], sums["gamma_x"])

    rows = da.view(T * B, -1)[:, :H].t()
    tf32 = dtype == torch.float32 and wx.is_cuda
    with multiplied_in_tf32(True) if tf32 else contextlib.nullcontext():
        if r.states is not None:
            dweight = rows.mm(r.states.view(-1, H)[: T * B])
        else:
            assert r.output is not None
            dweight = rows[:, :B].mm(a.h0.to(dtype).expand(B, H))
            if T > 1:
                dweight = dweight.addmm(rows[:, B:], r.output[:-1].reshape(-1, H))
        dh0 = da[0, :, :H].mm(weight)
    if a.lengths is not None:  # for rows that have ended, the gradient bypasses W_h
        dh0 = dh0 + dh
    gradients: dict[str, Tensor | None] = {"input": dwx, "beta_n": None}
    gradients["weight_hh"] = dweight.to(a.weight_hh.dtype)
    gradients = through_term(a, gradients, incoming.input, r.x, r.w)
    gradients["h0"] = (dh0.sum(0) if a.h0.dim() == 1 else dh0).to(a.h0.dtype)
    for name in _VECTORS:
        parameter: Tensor | None = getattr(a, name)
        gradients[name] = None if parameter is None else sums[name].to(parameter.dtype)
    return gradients


def _given(value: Tensor) -> Tensor:
    return value.to(torch.float32).contiguous()


def _weight(a: RNNArguments) -> Tensor:
    return a.weight_hh.to(a.input.dtype).contiguous()


def _vectors(a: RNNArguments) -> dict[str, Tensor]:
    """The parameters `_VECTORS` in float32; zeros for an absent bias."""
    values = [getattr(a, name) for name in _VECTORS]
    if values[0] is None:
        values[0] = torch.zeros_like(values[1])
    return {name: aligned(_given(value)) for name, value in zip(_VECTORS, values, strict=True)}


def _copied(dh_n: Tensor | None, wx: Tensor) -> Tensor:
    """A writable float32 copy ``[B, H]`` of the gradient of h_n; zeros if it is None."""
    if dh_n is None:
        return torch.zeros(wx.shape[1:], dtype=torch.float32, device=wx.device)
    return dh_n.to(torch.float32, copy=True).contiguous()


def _new_moments(a: RNNArguments, wx: Tensor, separate: bool) -> list[Tensor]:
    """Memory for mean and var of x and h; empty if they are given."""
    if a.population:
        return []
    full: Mapping[str, Any] = {"dtype": torch.float32, "device": wx.device}
    if not separate and not a.sequence and wx.shape[2] % 4 == 0:  # aligned to 16 bytes
        return list(torch.empty((4, wx.shape[0], wx.shape[2]), **full).unbind())
    shapes = RNN.statistics_shapes(a)
    return [torch.empty(shape, **full) for shape in shapes if shape is not None for _ in range(2)]


def _lengths(a: RNNArguments) -> dict[str, Tensor]:
    """The lengths, and 1 / unpadded rows of each step; empty without lengths."""
    if a.lengths is None:
        return {}
    counts = row_counts(a.lengths, len(a.input), a.input, a.fewest)
    return dict(zip(("lengths", "inv_n"), counts, strict=True))


def _raised_variance(
    a: RNNArguments, wx: Tensor, moments: dict[str, Tensor], lengths: Tensor | None
) -> Tensor:
    """The variance of W_h h that the backward kernel normalizes with."""
    variances = moments["var_x"], moments["var_h"], None
    shared = a.h0.dim() == 1 or a.h0.stride(0) == 0
    if shared and wx.shape[2] % 4 == 0:  # in one launch
        return raised_variances((None, None), wx, *variances, a.eps, lengths=lengths)[0]
    h0 = a.h0.expand(wx.shape[1], wx.shape[2])
    before, _ = identical_steps((h0,), wx, *variances, a.eps, lengths=lengths)
    return raise_variances(moments["var_h"], before, a.eps)


def _launch(direction: str, a: RNNArguments, tiling: Tiling, tensors: dict[str, Tensor]) -> None:
    """Launch the forward or the backward kernel.

    tensors: members of the kernel's struct by name; the kernel does not read absent ones.
    """
    wx = tensors["wx"]
    (T, B, H), dtype, device = wx.shape, wx.dtype, wx.device
    if log.isEnabledFor(logging.DEBUG):
        log.debug("bn_rnn %s T=%d B=%d H=%d %s: %s", direction, T, B, H, dtype, tiling)
    blocks = tiling.blocks(H)
    counters = torch.zeros(1 + blocks // tiling.team, dtype=torch.int32, device=device)
    tensors["counters"] = counters
    if tiling.team > 1:
        sizes = blocks, tiling.team, 16 * tiling.tiles, tiling.units
        tensors["handed"] = torch.empty(sizes, dtype=torch.float32, device=device)
    defines = (
        ("TYPE", nvrtc.TYPES[dtype]),
        ("H", H),
        ("MODE_X", _GIVEN if a.population or a.sequence else _BATCH),
        ("MODE_H", _GIVEN if a.population else _BATCH),
        ("LENGTHS", int(a.lengths is not None)),
        ("SAVE", int(a.save)),
        ("DOUTPUT", int("doutput" in tensors)),
        ("RELU", int(a.nonlinearity == "relu")),
    )
    at = {name: value.data_ptr() for name, value in tensors.items()}
    rows = tensors["mean_x"].shape[0], tensors["var_h"].shape[0]
    arguments = _STRUCTS[direction].packed(at, T, B, *rows, a.eps)
    with device_of(wx):
        shared = tiling.shared(direction, dtype, H)
        code = kernel(direction, tiling, device.index or 0, shared, defines)
        if blocks > code.at_once:
            raise RuntimeError("the blocks of the recurrence do not fit on the GPU at once")
        code.launch((blocks, 1), arguments)
