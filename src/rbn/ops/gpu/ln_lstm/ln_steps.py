"""The layer-normalized LSTM on the GPU, from tensors to kernel launches.

Each step is a matrix product and one kernel, in which a program owns a row or a few. What does not
go from step to step is done after the loop for all steps at once: the backward pass of the input
term's normalization, the sums for gamma and bias, the weight gradient.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rbn.ops.gpu.ln_lstm import ln_kernels as kernels
from rbn.ops.gpu.runtime.launch_cache import Repeated
from rbn.ops.gpu.stepwise import Call, factor, power_of_two, products, weight_gradient, zone

log = logging.getLogger("rbn.ops.gpu")

LARGEST = 8192  # hidden units: a program holds a row of all gates in its registers
_KEPT = kernels.KEPT.value
# Elements of a gate that a program works on at least: rows of few units share one.
_TILE, _TILE_INTERPRETED = 128, 4096


class Inputs(NamedTuple):
    """The arguments of the operator, in its order. See `rbn.ops.ln_lstm` for their meaning."""

    wx: Tensor
    weight_hh: Tensor
    bias: Tensor | None
    gamma_x: Tensor
    gamma_h: Tensor
    gamma_c: Tensor
    beta_c: Tensor
    h0: Tensor
    c0: Tensor
    lengths: Tensor | None
    population: list[Tensor]  # none: statistics are each row's own
    mask_c: Tensor | None
    mask_h: Tensor | None
    rate_c: float
    rate_h: float
    eps: float
    save: bool  # keep what the backward pass needs


class Outputs(NamedTuple):
    """The results of the operator: three for the user, then what is saved."""

    output: Tensor  # [T, B, H]
    h_n: Tensor  # [B, H]
    c_n: Tensor  # [B, H]
    centered: Tensor  # [T, B, 4H]: W_h h less its mean
    cs: Tensor  # [T + 1, B, H] float32
    moments: Tensor  # [T, B, 5] float32


class Grads(NamedTuple):
    """The gradients of the operator's differentiable inputs; empty for absent ones."""

    wx: Tensor
    weight_hh: Tensor
    bias: Tensor
    gamma_x: Tensor
    gamma_h: Tensor
    gamma_c: Tensor
    beta_c: Tensor
    h0: Tensor
    c0: Tensor


class _Call(Call):
    def __init__(self, a: Inputs) -> None:
        super().__init__(a.wx, a.lengths)
        self.a, self.H = a, a.wx.shape[2] // 4
        self.vectors = [self.bias(a.bias)]
        self.vectors += [self.full(v) for v in (a.gamma_x, a.gamma_h, a.gamma_c, a.beta_c)]
        self.masks = [self.mask(a.mask_c), self.mask(a.mask_h)]
        # A kernel's argument that is an integer would be compiled in.
        self.rates = float(a.rate_c), float(a.rate_h)
        units = power_of_two(self.H)
        tile = _TILE if a.wx.is_cuda else _TILE_INTERPRETED
        self.rows = max(1, min(power_of_two(self.B), tile // units))
        self.row: dict[str, Any] = {
            "H": self.H,
            "ROWS": self.rows,
            "UNITS": units,
            "LENGTHS": a.lengths is not None,
            "num_warps": min(32, max(1, units // 128)),
        }
        self.flags = self.row | {
            "ZONE_C": zone(a.mask_c, a.rate_c),
            "ZONE_H": zone(a.mask_h, a.rate_h),
        }

    def grid(self, rows: int) -> tuple[int]:
        """The programs for so many rows."""
        return (-(-rows // self.rows),)


def empty_outputs(a: Inputs) -> Outputs:
    """Tensors of the shapes and types of the results."""
    T, B, G = a.wx.shape
    steps, H = T if a.save else 0, G // 4

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return a.wx.new_empty(shape, dtype=dtype)

    return Outputs(
        output=new(T + 1, B, H, dtype=a.wx.dtype)[1:],
        h_n=new(B, H, dtype=a.wx.dtype),
        c_n=new(B, H, dtype=a.wx.dtype),
        centered=new(steps, B, G, dtype=a.wx.dtype),
        cs=new(T + 1, B, H) if a.save else new(0),
        moments=new(steps, B, _KEPT),
    )


def forward(a: Inputs) -> Outputs:
    """Run the recurrence over all steps."""
    call = _Call(a)
    T, B, H, wx = call.T, call.B, call.H, call.wx
    log.debug("ln_lstm forward T=%d B=%d H=%d %s: a kernel for each step", T, B, H, wx.dtype)
    hs = call.new(T + 1, B, H, dtype=wx.dtype)
    hs[0] = a.h0
    cs = call.new(T + 1 if a.save else 1, B, H)
    cs[0] = a.c0
    centered = call.new(T if a.save else 0, B, 4 * H, dtype=wx.dtype)
    moments = call.new(T if a.save else 0, B, _KEPT)
    h_n = call.state(a.h0) if a.lengths is not None else call.empty
    weight = factor(a.weight_hh, wx).t()
    wh = call.new(B, 4 * H)
    tensors = [wh, wx, *call.vectors, hs, cs, centered, moments, h_n, call.lengths, *call.masks]
    step = Repeated(kernels.ln_lstm_step, call.grid(B), tensors, call.flags | {"SAVE": a.save})
    with torch.cuda.device_of(wx):
        multiply = products(hs, weight, wh)
        for t, h in enumerate(hs[:T].unbind()):
            multiply(h)
            step(t, B, *call.rates, float(a.eps))
    return Outputs(
        output=hs[1:],
        h_n=hs[T].clone() if a.lengths is None else h_n.to(wx.dtype),
        c_n=cs[-1].to(wx.dtype, copy=True),
        centered=centered,
        cs=cs if a.save else call.new(0),
        moments=moments,
    )


def backward(
    a: Inputs, r: Outputs, doutput: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None
) -> Grads:
    """The gradients of all differentiable inputs, from those of the three results."""
    call = _Call(a)
    T, B, H, wx = call.T, call.B, call.H, call.wx
    log.debug("ln_lstm backward T=%d B=%d H=%d %s: a kernel for each step", T, B, H, wx.dtype)
    dh, dc = call.state(dh_n, B, H), call.state(dc_n, B, H)
    through, dgamma_c, dbeta_c = call.zeros(3, B, H)
    da, dwx = torch.empty_like(wx), torch.empty_like(wx)
    weight = factor(a.weight_hh, wx)
    tensors = [wx, *call.vectors, r.cs, r.centered, r.moments, call.lengths, *call.masks]
    tensors += [call.empty if doutput is None else doutput.contiguous()]
    tensors += [through, dh, dc, da, dwx, dgamma_c, dbeta_c]
    flags = call.flags | {"HAS_DOUTPUT": doutput is not None}
    step = Repeated(kernels.ln_lstm_step_backward, call.grid(B), tensors, flags)
    steps = da.unbind()
    with torch.cuda.device_of(wx):
        multiply = products(da, weight, through)
        for t in range(T - 1, -1, -1):
            step(t, B, *call.rates)
            multiply(steps[t])
    dbias, dgamma_x, dgamma_h = _parameter_sums(call, r, dwx)
    _input_backward(call, r, dwx)
    return Grads(
        wx=dwx,
        weight_hh=weight_gradient(da, a.h0, r.output).to(a.weight_hh.dtype),
        bias=call.gradient(dbias, a.bias),
        gamma_x=call.gradient(dgamma_x, a.gamma_x),
        gamma_h=call.gradient(dgamma_h, a.gamma_h),
        gamma_c=call.gradient(dgamma_c.sum(0), a.gamma_c),
        beta_c=call.gradient(dbeta_c.sum(0), a.beta_c),
        h0=(dh + through).to(a.h0.dtype),
        c0=dc.to(a.c0.dtype),
    )


def _parameter_sums(call: _Call, r: Outputs, dpre: Tensor) -> list[Tensor]:
    """The gradients of bias, gamma_x and gamma_h, ``[4H]`` each, the same in every run.

    dpre: the gradient of the gates before their nonlinearities, ``[T, B, 4H]``.
    """
    rows, columns, F = 32, 64, 4 * call.H
    n = call.T * call.B
    programs = min(32, -(-n // (4 * rows)))
    sums = call.new(programs, 3, F)
    with torch.cuda.device_of(dpre):
        kernels.ln_parameter_sums[(-(-F // columns), programs)](
            *(call.wx, r.centered, dpre, r.moments, call.lengths, sums),
            *(call.B, n, -(-n // programs)),
            F=F,
            ROWS=rows,
            COLUMNS=columns,
            LENGTHS=call.a.lengths is not None,
        )
    return [sums[:, k].sum(0) for k in range(3)]  # each in memory of its own


def _input_backward(call: _Call, r: Outputs, dwx: Tensor) -> None:
    """From the gradient of the gates to that of wx ``[T, B, 4H]``, in place."""
    tensors = (call.wx, call.vectors[1], r.moments, call.lengths, dwx)
    n = call.T * call.B
    with torch.cuda.device_of(dwx):
        kernels.ln_input_backward[call.grid(n)](*tensors, call.B, n, **call.row)
