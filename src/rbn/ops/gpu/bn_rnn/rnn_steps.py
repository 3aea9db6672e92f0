"""The batch-normalized simple RNN on the GPU, from tensors to kernel launches.

Each step is a matrix product and one kernel, in which a program owns a few units for all rows.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rbn.ops.gpu.bn_rnn import rnn_kernels as kernels
from rbn.ops.gpu.runtime import triton_functions
from rbn.ops.gpu.runtime.launch_cache import Repeated
from rbn.ops.gpu.stepwise import Call, factor, power_of_two, products, weight_gradient, zone
from rbn.ops.identical_rows import raise_variances, identical_steps

log = logging.getLogger("rbn.ops.gpu")

_BATCH, _GIVEN = triton_functions.BATCH.value, triton_functions.GIVEN.value


class Inputs(NamedTuple):
    """The arguments of the operator, in its order. See `rbn.ops.bn_rnn` for their meaning."""

    wx: Tensor
    weight_hh: Tensor
    bias: Tensor | None
    gamma_x: Tensor
    gamma_h: Tensor
    h0: Tensor
    lengths: Tensor | None
    population: list[Tensor]  # mean, var of x and h; [] = those of the batch
    mask_h: Tensor | None
    rate_h: float
    eps: float
    input_stats: str
    padding: str
    nonlinearity: str
    save: bool  # keep what the backward pass needs

    @property
    def sequence(self) -> bool:
        """Whether the input term's statistics are those of all steps together."""
        return not self.population and self.input_stats == "sequence"

    @property
    def include(self) -> bool:
        """Whether padded rows count in the statistics."""
        return not self.population and self.lengths is not None and self.padding == "include"


class Outputs(NamedTuple):
    """The results of the operator: two for the user, then statistics, then what is saved."""

    output: Tensor  # [T, B, H]
    h_n: Tensor  # [B, H]
    mean_x: Tensor  # [T, H] float32, or [1, H] for sequencewise statistics; empty where given
    var_x: Tensor
    mean_h: Tensor  # [T, H] float32
    var_h: Tensor
    centered: Tensor  # [T, B, H]: W_h h less its mean
    hidden: Tensor  # [T, B, H], empty where it is the output


class Grads(NamedTuple):
    """The gradients of the operator's differentiable inputs; empty for absent ones."""

    wx: Tensor
    weight_hh: Tensor
    bias: Tensor
    gamma_x: Tensor
    gamma_h: Tensor
    h0: Tensor


class _Call(Call):
    def __init__(self, a: Inputs) -> None:
        super().__init__(a.wx, a.lengths)
        self.a, self.H = a, a.wx.shape[2]
        self.vectors = [self.bias(a.bias), self.full(a.gamma_x), self.full(a.gamma_h)]
        self.mask_h = self.mask(a.mask_h)
        self.inv_n = self.empty
        if self.valid is not None:
            n = self.valid.sum(1)
            self.inv_n = torch.where(n > 0, 1.0 / n.clamp(min=1), 0.0).to(torch.float32)
        # A kernel's argument that is an integer would be compiled in.
        self.numbers = float(a.rate_h), float(a.eps)
        units = min(16, power_of_two(self.H))
        self.grid = (-(-self.H // units),)
        self.flags: dict[str, Any] = {
            "H": self.H,
            "ROWS": min(64, power_of_two(self.B)),
            "UNITS": units,
            "X": _GIVEN if a.population or a.sequence else _BATCH,
            "NORM": _GIVEN if a.population else _BATCH,
            "RELU": a.nonlinearity == "relu",
            "LENGTHS": a.lengths is not None,
            "INCLUDE": a.include,
            "ZONE_H": zone(a.mask_h, a.rate_h),
        }

    def moments(self, own: list[Tensor]) -> list[Tensor]:
        """Mean and var of x and h: those given, or the minibatch's own."""
        return [self.full(p) for p in self.a.population[:4]] if self.a.population else own


def statistics_shapes(a: Inputs) -> list[tuple[int, ...]]:
    """The shapes of mean and var of x, and of h, that a call gives."""
    T, _, H = a.wx.shape
    return [(0,)] * 2 if a.population else [(1 if a.sequence else T, H), (T, H)]


def _rows(moments: list[Tensor], t: int) -> list[int]:
    """Which rows of the statistics of x and of h step t uses."""
    return [min(t, m.shape[0] - 1) for m in moments[0::2]]


def empty_outputs(a: Inputs) -> Outputs:
    """Tensors of the shapes and types of the results."""
    T, B, H = a.wx.shape

    def new(*shape: int, dtype: torch.dtype = a.wx.dtype) -> Tensor:
        return a.wx.new_empty(shape, dtype=dtype)

    hidden = new(T + 1, B, H)[1:]
    moments = [new(*shape, dtype=torch.float32) for shape in statistics_shapes(a) for _ in range(2)]
    saved = [new(T if a.save else 0, B, H), hidden if a.include and a.save else new(0)]
    return Outputs._make([new(T, B, H) if a.include else hidden, new(B, H), *moments, *saved])


def forward(a: Inputs) -> Outputs:
    """Run the recurrence over all steps."""
    call = _Call(a)
    T, B, H, wx = call.T, call.B, call.H, call.wx
    log.debug("bn_rnn forward T=%d B=%d H=%d %s: a kernel for each step", T, B, H, wx.dtype)
    hs = call.new(T + 1, B, H, dtype=wx.dtype)
    hs[0] = a.h0
    centered = call.new(T if a.save else 0, B, H, dtype=wx.dtype)
    own = [call.new(*shape) for shape in statistics_shapes(a) for _ in range(2)]
    if a.sequence:
        _sequence_moments(call, own)
    moments = call.moments(own)
    h_n = call.state(a.h0) if a.lengths is not None else call.empty
    weight = factor(a.weight_hh, wx).t()
    wh = call.new(B, H)
    tensors = [wh, wx, *call.vectors, *moments, hs, centered]
    tensors += [h_n, call.lengths, call.inv_n, call.mask_h]
    step = Repeated(kernels.bn_rnn_step, call.grid, tensors, call.flags | {"SAVE": a.save})
    with torch.cuda.device_of(wx):
        multiply = products(hs, weight, wh)
        for t, h in enumerate(hs[:T].unbind()):
            multiply(h)
            step(t, B, *_rows(moments, t), *call.numbers)
    output = hidden = hs[1:]
    if a.include:
        assert call.valid is not None
        output = torch.where(call.valid[:, :, None], hidden, 0)
    last = hs[T].clone() if a.lengths is None else h_n.to(wx.dtype)
    own_hidden = hidden if a.include and a.save else call.new(0, dtype=wx.dtype)
    return Outputs._make([output, last, *own, centered, own_hidden])


def backward(a: Inputs, r: Outputs, doutput: Tensor | None, dh_n: Tensor | None) -> Grads:
    """The gradients of all differentiable inputs, from those of the two results."""
    call = _Call(a)
    T, B, H, wx = call.T, call.B, call.H, call.wx
    log.debug("bn_rnn backward T=%d B=%d H=%d %s: a kernel for each step", T, B, H, wx.dtype)
    moments = call.moments([r.mean_x, r.var_x, r.mean_h, r.var_h])
    if not a.population:
        masked = a.mask_h is not None
        variances = r.var_x, r.var_h, None
        lengths = None if a.lengths is None else call.lengths
        before, _ = identical_steps((a.h0,), wx, *variances, a.eps, masked, lengths, a.include)
        moments[3] = raise_variances(r.var_h, before, a.eps)
    dh, through = call.state(dh_n, B, H), call.zeros(B, H)
    da, dwx = torch.empty_like(wx), torch.empty_like(wx)
    sums = call.new(3, T, H)
    weight = factor(a.weight_hh, wx)
    tensors = [wx, *call.vectors, *moments[:2], moments[3], r.centered]
    tensors += [call.lengths, call.inv_n, call.mask_h]
    tensors += [call.empty if doutput is None else doutput.contiguous()]
    tensors += [through, dh, call.new(B, H), da, dwx, sums]
    flags = call.flags | {"HAS_DOUTPUT": doutput is not None}
    step = Repeated(kernels.bn_rnn_step_backward, call.grid, tensors, flags)
    steps = da.unbind()
    with torch.cuda.device_of(wx):
        multiply = products(da, weight, through)
        for t in range(T - 1, -1, -1):
            step(t, B, T, *_rows(moments, t), *call.numbers)
            multiply(steps[t])
    dbias, dgamma_x, dgamma_h = (s.sum(0) for s in sums)  # each in memory of its own
    if a.sequence:
        _sequence_backward(call, r, dwx, dbias, dgamma_x)
    hidden = r.hidden if r.hidden.numel() else r.output
    return Grads(
        wx=dwx,
        weight_hh=weight_gradient(da, a.h0, hidden).to(a.weight_hh.dtype),
        bias=call.gradient(dbias, a.bias),
        gamma_x=call.gradient(dgamma_x, a.gamma_x),
        gamma_h=call.gradient(dgamma_h, a.gamma_h),
        h0=(dh + through).to(a.h0.dtype),
    )


def _sequence_moments(call: _Call, own: list[Tensor]) -> None:
    """Mean and var of the input term over all unpadded positions, into own[0] and own[1]."""
    x = call.wx.to(torch.float32)
    if call.valid is None:
        own[1][0], own[0][0] = torch.var_mean(x, dim=(0, 1), correction=0)
        return
    keep, n = call.valid[:, :, None], call.valid.sum().clamp(min=1)
    own[0][0] = torch.where(keep, x, 0).sum((0, 1)) / n
    own[1][0] = torch.where(keep, x - own[0], 0).square().sum((0, 1)) / n


def _sequence_backward(
    call: _Call, r: Outputs, dwx: Tensor, dbias: Tensor, dgamma_x: Tensor
) -> None:
    """What sequencewise statistics add to the gradient of the input term, in place."""
    rstd = torch.rsqrt(r.var_x + call.a.eps)
    spread = dbias + (call.wx - r.mean_x) * rstd * dgamma_x
    n: Tensor | int = call.T * call.B
    if call.valid is not None:
        n = call.valid.sum().clamp(min=1)
        spread = torch.where(call.valid[:, :, None], spread, 0)
    dwx -= (spread * (rstd * call.vectors[1]) / n).to(dwx.dtype)
