"""The LSTM on the GPU, from tensors to kernel launches.

R independent recurrences of one shape (the directions of a layer, several models trained together)
run side by side; every tensor carries them as its first dimension.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from rbn.ops.alike import raised, steps_alike
from rbn.ops.gpu import cuda_lstm, device
from rbn.ops.gpu.input_moments import input_moments
from rbn.ops.gpu.lstm_backward import lstm_backward
from rbn.ops.gpu.lstm_forward import lstm_forward
from rbn.ops.gpu.plan import Plan, make_plan, multiprocessors
from rbn.ops.gpu.signature import (
    Grads,
    Inputs,
    Outputs,
    saved_cells,
    saved_products,
    statistics_shapes,
    stride_of,
)
from rbn.ops.types import valid_steps

log = logging.getLogger("rbn.ops.gpu")

_VECTORS = ("bias", "gamma_x", "gamma_h", "gamma_c", "beta_c")
_MOMENTS = ("mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c")
_NONE, _BATCH, _GIVEN = device.NONE.value, device.BATCH.value, device.GIVEN.value


def plan_for(wx: Tensor) -> Plan | None:
    """How to run over an input term ``[R, T, B, 4H]``."""
    R, _, B, G = wx.shape
    processors = multiprocessors(wx.device.index or 0) if wx.is_cuda else None
    return make_plan(R, B, G // 4, processors)


class _Call:
    """What forward and backward have in common."""

    def __init__(self, a: Inputs) -> None:
        plan = plan_for(a.wx)
        assert plan is not None
        self.plan: Plan = plan
        self.R, self.T, self.B, G = a.wx.shape
        self.H = G // 4
        self.a = a
        self.wx = a.wx.contiguous()
        self.in_cuda = cuda_lstm.covers(a)
        self.empty = a.wx.new_empty(1, dtype=torch.float32)
        given = _GIVEN if a.population else _BATCH
        normalized = a.norm == "batch"
        self.x = _NONE if not normalized or a.joint else _GIVEN if a.sequence else given
        self.flags: dict[str, Any] = {
            "X": self.x,
            "NORM": given if normalized else _NONE,
            "CELL": given if normalized and a.gamma_c is not None else _NONE,
            "JOINT": a.joint,
            "PASS": a.pass_normalized_cell,
            "HAS_BIAS": a.bias is not None,
            "HAS_BETA": a.beta_c is not None,
            "LENGTHS": a.lengths is not None,
            "INCLUDE": a.include,
            "ZONE_C": _zone(a.mask_c, a.rate_c),
            "ZONE_H": _zone(a.mask_h, a.rate_h),
            "PERSIST": plan.persistent,
            "FUSED": a.wx.is_cuda,
            "PRECISION": "tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
            "WIDEN": not _has_product(a.wx),
            "H": self.H,
            "ROWS": plan.rows,
            "UNITS": plan.units,
            "PROGRAMS": plan.programs,
        }
        self.lengths = self.inv_n = self.empty
        if a.lengths is not None:
            self.lengths = a.lengths.to(device=a.wx.device, dtype=torch.int32)
            valid = valid_steps(self.lengths, self.T)
            assert valid is not None
            n = valid.sum(1)
            self.inv_n = torch.where(n > 0, 1.0 / n.clamp(min=1), 0.0).to(torch.float32)

    def full(self, value: Tensor | None) -> Tensor:
        """In float32 and contiguous; anything where it is absent."""
        if value is None:
            return self.empty
        if value.dtype == torch.float32 and value.is_contiguous():
            return value
        return value.to(torch.float32).contiguous()

    def vectors(self) -> list[Tensor]:
        a = self.a
        return [self.full(v) for v in (a.bias, a.gamma_x, a.gamma_h, a.gamma_c, a.beta_c)]

    def masks(self) -> list[Tensor]:
        """Zoneout masks as bytes."""
        return [
            self.empty if m is None else m.contiguous().view(torch.uint8)
            for m in (self.a.mask_c, self.a.mask_h)
        ]

    def named(self, weight: Tensor, moments: list[Tensor]) -> dict[str, Tensor]:
        """What both kernels in CUDA C++ take, by the names they use."""
        present = [m if m.numel() else self.empty for m in moments]
        return {
            "wx": self.wx,
            "weight": weight,
            **dict(zip(_VECTORS, self.vectors(), strict=True)),
            **dict(zip(_MOMENTS, present, strict=True)),
            "lengths": self.lengths,
            "inv_n": self.inv_n,
        }

    def launch(self, kernel: Any, arguments: list[Any], flags: dict[str, Any], warps: int) -> None:
        """Launch a kernel once."""
        options: dict[str, Any] = {"num_warps": warps}
        if self.plan.persistent:
            options["launch_cooperative_grid"] = True
        grid = (self.plan.programs, self.R)
        with torch.cuda.device_of(self.wx):
            kernel[grid](*arguments, **self.flags, **flags, **options)


def _has_product(wx: Tensor) -> bool:
    """Whether products are made in the type of wx."""
    if not wx.is_cuda:
        return False  # the interpreter
    return wx.dtype != torch.bfloat16 or torch.cuda.get_device_capability(wx.device) >= (8, 0)


def _zone(mask: Tensor | None, rate: float) -> int:
    if mask is not None:
        return int(device.MASK.value)
    return int(device.RATE.value) if rate else 0


def _rows(moments: list[Tensor]) -> list[int]:
    """The number of rows of the terms x, h and c."""
    return [m.shape[1] if m.dim() == 3 else 0 for m in moments[0::2]]


def forward(a: Inputs) -> Outputs:
    """Run the recurrence over all steps."""
    return _forward(a.stacked()).unstacked() if a.alone else _forward(a)


def backward(
    a: Inputs, r: Outputs, doutput: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None
) -> Grads:
    """The gradients of all differentiable inputs, from those of the three results."""
    if not a.alone:
        return _backward(a, r, doutput, dh_n, dc_n)
    dresults = (None if d is None else d[None] for d in (doutput, dh_n, dc_n))
    return _backward(a.stacked(), r.stacked(), *dresults).unstacked()


def _forward(a: Inputs) -> Outputs:
    call = _Call(a)
    R, T, B, H, wx, plan = call.R, call.T, call.B, call.H, call.wx, call.plan
    dtype = wx.dtype
    stride = stride_of(H)
    hs = wx.new_empty(R, T + 1, B, stride)
    hs[:, 0, :, :H] = a.h0
    if stride != H:
        hs[:, 0, :, H:] = 0
    cs = torch.empty(saved_cells(a), dtype=torch.float32, device=wx.device)
    wh = wx.new_empty(saved_products(a))
    h_n, c_n = torch.empty(2, R, B, H, dtype=torch.float32, device=wx.device)
    new = [
        torch.empty(shape, dtype=torch.float32, device=wx.device)
        for shape in statistics_shapes(a)
        for _ in range(2)
    ]
    if a.sequence:
        _sequence_moments(wx, call.lengths if a.lengths is not None else None, new)
    moments = [call.full(p) for p in a.population] if a.population else new
    barrier = torch.zeros(R, dtype=torch.int32, device=wx.device)
    weight = a.weight_hh.to(dtype).contiguous()
    flags = {
        "HS": stride,
        "K": plan.k_forward,
        "SAVE": a.save,
    }
    if call.in_cuda:
        if not cuda_lstm.meets_at_counter("forward", wx):
            hs[:, 1:].view(torch.int16 if dtype != torch.float32 else torch.int32).fill_(-1)
        if call.x == _BATCH:
            _input_moments(call, new)
        tensors = call.named(weight, moments) | {"hs": hs, "cs": cs, "wh": wh, "h_n": h_n}
        tensors |= {"c_n": c_n, "c0": call.full(a.c0), "counter": barrier}
        cuda_lstm.forward(call, tensors, _rows(moments))
        return _outputs(call, hs, cs, wh, h_n, c_n, new)
    natural = cs.narrow(0, 0, R * (T + 1 if a.save else 1) * B * H).view(R, -1, B, H)
    natural[:, 0] = a.c0
    path = "one persistent kernel" if plan.persistent else "one kernel for each step"
    log.debug("lstm forward R=%d T=%d B=%d H=%d %s: %s", R, T, B, H, dtype, path)
    pieces = [(0, T)] if plan.persistent else [(t, 1) for t in range(T)]
    for first, steps in pieces:
        arguments = [
            wx,
            weight,
            *call.vectors(),
            *(m if m.numel() else call.empty for m in moments),
            hs,
            cs,
            wh,
            h_n,
            call.lengths,
            call.inv_n,
            *call.masks(),
            barrier,
            first,
            steps,
            T,
            B,
            *_rows(moments),
            B * H if a.save else 0,
            a.rate_c,
            a.rate_h,
            a.eps,
        ]
        call.launch(lstm_forward, arguments, flags, plan.warps_forward)

    return _outputs(call, hs, cs, wh, h_n, natural[:, -1], new)


def _outputs(
    call: _Call,
    hs: Tensor,
    cs: Tensor,
    wh: Tensor,
    h_n: Tensor,
    c_n: Tensor,
    new: list[Tensor],
) -> Outputs:
    """The operator's results from the kernels' buffers."""
    a, wx, dtype, T, H = call.a, call.wx, call.wx.dtype, call.T, call.H
    hidden = hs[:, 1:, :, :H]
    output = hidden
    if a.include:
        valid = valid_steps(call.lengths, T)
        assert valid is not None
        output = torch.where(valid[:, :, None], hidden, 0)
    elif hs.shape[3] != H:
        output = hidden.contiguous()
    last = h_n.to(dtype) if a.lengths is not None else output[:, -1].clone()
    saved = [
        wh,
        cs if a.save else cs.new_empty(0),
        hidden if a.include and a.save else wx.new_empty(0),
    ]
    return Outputs._make([output, last, c_n.to(dtype, copy=True), *new, *saved])


def _input_moments(call: _Call, new: list[Tensor]) -> None:
    """Mean and var of the input term of every step, into new[0] and new[1]."""
    columns = 64
    grid = (call.R * call.T, -(-4 * call.H // columns))
    flags = {"F": 4 * call.H, "ROWS": call.plan.rows, "COLUMNS": columns}
    with torch.cuda.device_of(call.wx):
        input_moments[grid](
            call.wx,
            *new[:2],
            call.lengths,
            call.inv_n,
            call.T,
            call.B,
            **flags,
            LENGTHS=call.a.lengths is not None,
        )


def _sequence_moments(wx: Tensor, lengths: Tensor | None, new: list[Tensor]) -> None:
    """Mean and var of the input term over all unpadded positions, into new[0] and new[1]."""
    x = wx.to(torch.float32)
    if lengths is None:
        var, mean = torch.var_mean(x, dim=(1, 2), correction=0)
    else:
        valid = valid_steps(lengths, wx.shape[1])
        assert valid is not None
        keep, n = valid[None, :, :, None], valid.sum()
        mean = torch.where(keep, x, 0).sum((1, 2)) / n
        var = torch.where(keep, x - mean[:, None, None], 0).square().sum((1, 2)) / n
    new[0][:, 0] = mean
    new[1][:, 0] = var


def _backward(
    a: Inputs, r: Outputs, doutput: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None
) -> Grads:
    call = _Call(a)
    R, T, B, H, wx, plan = call.R, call.T, call.B, call.H, call.wx, call.plan
    dtype = wx.dtype

    full: dict[str, Any] = {"dtype": torch.float32, "device": wx.device}
    dh, dc = (
        torch.zeros(R, B, H, **full) if grad is None else grad.to(copy=True, **full).contiguous()
        for grad in (dh_n, dc_n)
    )
    da = torch.empty_like(wx)
    shared = a.norm == "none" or a.joint  # the gradient of both terms is one
    dwx = da if shared else torch.empty_like(wx)
    new = torch.empty if call.in_cuda else torch.zeros
    sums = [new(R, n, **full) for n in [4 * H] * 3 + [H] * 2]
    moments = [call.full(p) for p in a.population] if a.population else list(r[3:9])
    if a.norm == "batch" and not a.population:
        var_x, var_c = (m if m.numel() else None for m in (moments[1], moments[5]))
        before, after = steps_alike((a.h0, a.c0), wx, var_x, moments[3], var_c, a.eps)
        moments[3] = raised(moments[3], before, a.eps)
        if var_c is not None:
            moments[5] = raised(var_c, after, a.eps)
    barrier = torch.zeros(R, dtype=torch.int32, device=wx.device)
    weight = a.weight_hh.to(dtype)
    transposed = weight.transpose(1, 2).contiguous()
    dy = call.empty if doutput is None else doutput.contiguous()
    flags = {
        "K": plan.k_backward,
        "HAS_DOUTPUT": doutput is not None,
    }
    pieces = [(T - 1, T)] if plan.persistent else [(t, 1) for t in range(T - 1, -1, -1)]
    if call.in_cuda:
        if not cuda_lstm.meets_at_counter("backward", wx):
            da.view(torch.int16 if dtype != torch.float32 else torch.int32).fill_(-1)
        names = ("dbias", "dgamma_x", "dgamma_h", "dgamma_c", "dbeta_c")
        tensors = call.named(transposed, moments) | dict(zip(names, sums, strict=True))
        tensors |= {"cs": r.cs, "wh": r.wh, "doutput": dy, "dh": dh, "dc": dc, "da": da, "dwx": dwx}
        tensors["counter"] = barrier
        cuda_lstm.backward(call, tensors, _rows(moments), doutput is not None)
        pieces = []
    for last, steps in pieces:
        arguments = [
            wx,
            transposed,
            *call.vectors(),
            *(m if m.numel() else call.empty for m in (*moments[:2], *moments[3:])),
            r.cs,
            r.wh,
            call.lengths,
            call.inv_n,
            *call.masks(),
            dy,
            dh,
            dc,
            da,
            dwx,
            *sums,
            barrier,
            last,
            steps,
            T,
            B,
            *_rows(moments),
            a.rate_c,
            a.rate_h,
            a.eps,
        ]
        call.launch(lstm_backward, arguments, flags, plan.warps_backward)

    dbias, dgamma_x, dgamma_h, dgamma_c, dbeta_c = sums
    if a.sequence:
        _sequence_backward(call, r, dwx, dbias, dgamma_x)
    hidden = r.hidden if r.hidden.numel() else r.output
    h0 = a.h0.to(dtype)
    dweight = torch.bmm(da[:, 0].transpose(1, 2), h0)
    if T > 1:
        rest = da[:, 1:].reshape(R, -1, 4 * H).transpose(1, 2)
        dweight = torch.baddbmm(dweight, rest, hidden[:, :-1].reshape(R, -1, H))
    dh0 = dh + torch.bmm(da[:, 0], weight).to(torch.float32)
    found = {"bias": dbias, "gamma_x": dgamma_x, "gamma_h": dgamma_h}
    found |= {"gamma_c": dgamma_c, "beta_c": dbeta_c}
    vectors = {}
    for name, grad in found.items():
        parameter = getattr(a, name)
        vectors[name] = call.empty.new_empty(0) if parameter is None else grad.to(parameter.dtype)
    return Grads(
        wx=dwx,
        weight_hh=dweight.to(a.weight_hh.dtype),
        h0=dh0.to(a.h0.dtype),
        c0=dc.to(a.c0.dtype),
        **vectors,
    )


def _sequence_backward(
    call: _Call, r: Outputs, dwx: Tensor, dbias: Tensor, dgamma_x: Tensor
) -> None:
    """What sequencewise statistics add to the gradient of the input term, in place."""
    a = call.a
    rstd = torch.rsqrt(r.var_x + a.eps)[:, None]
    x_hat = (call.wx - r.mean_x[:, None]) * rstd
    n: Tensor | int = call.T * call.B
    spread = dbias[:, None, None] + x_hat * dgamma_x[:, None, None]
    if a.lengths is not None:
        valid = valid_steps(call.lengths, call.T)
        assert valid is not None
        n = valid.sum()
        spread = torch.where(valid[None, :, :, None], spread, 0)
    gamma_x = call.full(a.gamma_x)[:, None, None]
    dwx -= (spread * (rstd * gamma_x) / n).to(dwx.dtype)
