"""Step by step: the batch-normalized GRU, and the simple RNN if `rnn_single` does not cover it.

Each step is a matrix product and one kernel, in which a program owns a few units for all rows.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.definition import RNN, RNNArguments
from rbn.ops.gpu.bn_rnn import rnn_kernels as kernels
from rbn.ops.gpu.lstm.prepare import padded_factors
from rbn.ops.gpu.runtime import triton_functions
from rbn.ops.gpu.runtime.device import power_of_two
from rbn.ops.gpu.runtime.launch_cache import RepeatedLaunch
from rbn.ops.gpu.sequence_statistics import sequence_backward, sequence_moments
from rbn.ops.gpu.stepwise import StepCall, factor, products, weight_gradient, zone
from rbn.ops.identical_rows import identical_steps, raise_variances
from rbn.ops.input_term import through_term, with_term
from rbn.ops.operator import Incoming, Results

log = logging.getLogger("rbn.ops.gpu")

_BATCH, _GIVEN = triton_functions.BATCH.value, triton_functions.GIVEN.value


class Saved(NamedTuple):
    """The tensors that the backward pass needs; None if absent, or if nothing is saved.

    Shapes are those of the simple RNN. The terms of the GRU and their statistics have 3H columns.
    """

    wx: Tensor | None = None  # the input term and its factors, if the call computed them
    x: Tensor | None = None
    w: Tensor | None = None
    output: Tensor | None = None
    mean_x: Tensor | None = None  # [T, H] float32, or [1, H] for sequencewise statistics
    var_x: Tensor | None = None
    mean_h: Tensor | None = None  # [T, H] float32
    var_h: Tensor | None = None
    centered: Tensor | None = None  # [T, B, H]: W_h h minus its mean
    hidden: Tensor | None = None  # [T, B, H], if it is not the output
    states: Tensor | None = None  # [T + 1, B, H]: h0 and h after each step, if the output is a view


class RNNCall(StepCall):
    """Sizes, modes and tensors, in the form that the kernels take."""

    def __init__(self, a: RNNArguments) -> None:
        super().__init__(a.input, a.lengths, a.fewest)
        self.a, (self.G, self.H) = a, a.weight_hh.shape
        beta = self.empty
        if a.gated:
            beta_n = self.zeros(self.H) if a.beta_n is None else self.full(a.beta_n)
            beta = F.pad(beta_n, (2 * self.H, 0))
        self.vectors = [self.bias(a.bias), self.full(a.gamma_x), self.full(a.gamma_h), beta]
        self.mask_h = self.mask(a.mask_h)
        # Triton would specialize the kernel for integers.
        self.numbers = float(a.rate_h), float(a.eps)
        units = min(4 if a.gated else 16, power_of_two(self.H))
        self.grid = (-(-self.H // units),)
        self.flags: dict[str, Any] = {
            "H": self.H,
            "ROWS": min(64, power_of_two(self.B)),
            "UNITS": units,
            "X": _GIVEN if a.population or a.sequence else _BATCH,
            "NORM": _GIVEN if a.population else _BATCH,
            "RELU": a.nonlinearity == "relu",
            "GATED": a.gated,
            "LENGTHS": a.lengths is not None,
            "INCLUDE": a.include,
            "ZONE_H": zone(a.mask_h, a.rate_h),
        }

    def moments(self, own: list[Tensor]) -> list[Tensor]:
        """Mean and var of x and h: those given, or the minibatch's own."""
        a = self.a
        given = [v for v in (a.mean_x, a.var_x, a.mean_h, a.var_h) if v is not None]
        return [self.full(value) for value in given] or own


def _rows(moments: list[Tensor], t: int) -> list[int]:
    """Which rows of the statistics of x and of h step t uses."""
    return [min(t, m.shape[0] - 1) for m in moments[0::2]]


def fake(a: RNNArguments) -> Results:
    """Empty tensors with the shapes and dtypes of the results of one call."""
    (T, B), (G, H), dtype = a.input.shape[:2], a.weight_hh.shape, a.input.dtype

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return a.input.new_empty(shape, dtype=dtype)

    hidden = new(T + 1, B, H)[1:]
    shapes = a.definition.statistics_shapes(a)
    moments = [
        None if shape is None else new(*shape, dtype=torch.float32)
        for shape in shapes
        for _ in range(2)
    ]
    saved = Saved()
    if a.save:
        saved = Saved(
            wx=None if a.weight_ih is None else new(T, B, G),
            **dict(zip(RNN.moments, moments, strict=True)),
            centered=new(T, B, G),
            hidden=hidden if a.include else None,
        )
    output = new(T, B, H) if a.include else hidden
    return Results(output, (new(B, H),), tuple(moments), saved)


def forward(given: RNNArguments, separate: bool) -> Results:
    """Run the recurrence over all steps. separate: whether no two results may share memory."""
    a: RNNArguments
    a, kept = with_term(given.definition, given, make_factors=padded_factors)
    if separate:  # the factors may be views of one buffer
        kept.update(x=None, w=None)
    call = RNNCall(a)
    T, B, H, wx = call.T, call.B, call.H, call.wx
    sizes = a.definition.name, T, B, H, wx.dtype
    log.debug("bn_%s forward T=%d B=%d H=%d %s: a kernel for each step", *sizes)
    hs = call.new(T + 1, B, H, dtype=wx.dtype)
    hs[0] = a.h0
    centered = call.new(T if a.save else 0, B, call.G, dtype=wx.dtype)
    shapes = [shape for shape in a.definition.statistics_shapes(a) if shape is not None]
    own = [call.new(*shape) for shape in shapes for _ in range(2)]
    if a.sequence:
        sequence_moments(wx, call.given_lengths, *own[:2])
    moments = call.moments(own)
    h_n = call.state(a.h0) if a.lengths is not None else call.empty
    weight = factor(a.weight_hh, wx).t()
    wh = call.new(B, call.G)
    tensors = [wh, wx, *call.vectors, *moments, hs, centered]
    tensors += [h_n, call.lengths, call.inv_n, call.mask_h]
    step = RepeatedLaunch(kernels.bn_rnn_step, call.grid, tensors, call.flags | {"SAVE": a.save})
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
    statistics = tuple(own) if own else (None,) * 4
    saved = Saved()
    if a.save:
        kept |= dict(zip(RNN.moments, statistics, strict=True)) | {"centered": centered}
        saved = Saved(**kept, output=None if a.include else output)
        if a.include:
            saved = saved._replace(hidden=hidden)
    return Results(output, (last,), statistics, saved)


def backward(given: RNNArguments, r: Saved, incoming: Incoming) -> dict[str, Tensor | None]:
    """The gradients of all differentiable tensors, by name."""
    a: RNNArguments
    a, _ = with_term(given.definition, given, r.wx)
    doutput, (dh_n,) = incoming.output, incoming.states
    assert r.centered is not None
    call = RNNCall(a)
    T, B, H, wx = call.T, call.B, call.H, call.wx
    sizes = a.definition.name, T, B, H, wx.dtype
    log.debug("bn_%s backward T=%d B=%d H=%d %s: a kernel for each step", *sizes)
    own = (r.mean_x, r.var_x, r.mean_h, r.var_h)
    moments = call.moments([m for m in own if m is not None])
    if not a.population:
        masked = a.mask_h is not None
        assert r.var_h is not None
        variances = r.var_x, r.var_h, None
        lengths = call.given_lengths
        before, _ = identical_steps((a.h0,), wx, *variances, a.eps, masked, lengths, a.include)
        moments[3] = raise_variances(r.var_h, before, a.eps)
    dh, through = call.state(dh_n, B, H), call.zeros(B, H)
    da, dwx = torch.empty_like(wx), torch.empty_like(wx)
    hidden = r.output if r.hidden is None else r.hidden
    assert hidden is not None
    previous = torch.cat([a.h0[None].to(wx.dtype), hidden[:-1]]) if a.gated else call.empty
    terms = 2 if a.gated else 1  # number of terms with different gradients
    sums = call.new(2 + terms, T, call.G)
    weight = factor(a.weight_hh, wx)
    tensors = [wx, *call.vectors, *moments[:2], moments[3], r.centered, previous]
    tensors += [call.lengths, call.inv_n, call.mask_h]
    tensors += [call.empty if doutput is None else doutput.contiguous()]
    tensors += [through, dh, call.new(terms, B, call.G), da, dwx, sums]
    flags = call.flags | {"HAS_DOUTPUT": doutput is not None}
    step = RepeatedLaunch(kernels.bn_rnn_step_backward, call.grid, tensors, flags)
    steps = da.unbind()
    with torch.cuda.device_of(wx):
        multiply = products(da, weight, through)
        for t in range(T - 1, -1, -1):
            step(t, B, T, *_rows(moments, t), *call.numbers)
            multiply(steps[t])
    # Summed one by one, so that each gradient has its own memory.
    dbias, dgamma_x, dgamma_h, *dbeta = (s.sum(0) for s in sums)
    if a.sequence:
        assert r.mean_x is not None
        assert r.var_x is not None
        known = wx, call.given_lengths, (r.mean_x, r.var_x), call.vectors[1], a.eps
        sequence_backward(*known, dwx, dbias, dgamma_x)
    gradients = {
        "input": dwx,
        "weight_hh": weight_gradient(da, a.h0, hidden).to(a.weight_hh.dtype),
        "bias": call.gradient(dbias, a.bias),
        "gamma_x": call.gradient(dgamma_x, a.gamma_x),
        "gamma_h": call.gradient(dgamma_h, a.gamma_h),
        "h0": (dh + through).to(a.h0.dtype),
        "beta_n": call.gradient(dbeta[0][-H:].clone(), a.beta_n) if dbeta else None,
    }
    return through_term(given, gradients, incoming.input, r.x, r.w)
