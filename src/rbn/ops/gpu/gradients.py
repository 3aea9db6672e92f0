"""The LSTM's backward pass on the GPU, from tensors to kernel launches."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu import cuda_lstm, lstm_steps, paths, small_lstm
from rbn.ops.gpu.call import VECTORS, Call, aligned, rows_of
from rbn.ops.gpu.lstm_backward import lstm_backward
from rbn.ops.gpu.plan import tf32_allowed
from rbn.ops.gpu.raised import raised_variances
from rbn.ops.gpu.signature import Grads, Inputs, Outputs
from rbn.ops.types import valid_steps

log = logging.getLogger("rbn.ops.gpu")


def room_for_gradients(a: Inputs) -> int:
    """Numbers beyond those of W_h h that let d(W_h h) take the same room, see `_consumed`."""
    B, G = a.wx.shape[-2:]
    return B * G + 8 if a.save and math.prod(a.lead) == 1 else 0


def _consumed(call: Call, wh: Tensor) -> Tensor | None:
    """Room for d(W_h h) ``[T, B, 4H]`` inside that of W_h h, where the forward pass left enough.

    The backward pass reads W_h h of step t, then writes d(W_h h) of step t, last step first. The
    latter lies at the end of the room, so that step t's covers only what was kept of the steps
    after t: every block has read that before any block can have what it needs for step t.
    """
    numbers = wh.untyped_storage().nbytes() // wh.element_size()
    size = call.wx.numel()
    begin = (numbers - size) // 8 * 8  # a multiple of 16 bytes
    if call.R > 1 or wh.storage_offset() or begin < wh.numel() + call.B * 4 * call.H - size:
        return None
    return wh.as_strided(call.wx.shape, call.wx.stride(), begin)


def _sums(call: Call) -> tuple[Tensor, list[Tensor]]:
    """Room for the gradients of `VECTORS`, float32, in one piece and as its parts.

    A part begins at a multiple of 16 bytes, which the kernels ask for.
    """
    n = call.R * call.H
    padded = -(-n // 4) * 4
    new = torch.empty if call.in_cuda else torch.zeros
    whole = new(12 * n + 2 * padded, dtype=torch.float32, device=call.wx.device)
    parts = whole.split([4 * n] * 3 + [padded] * 2)
    return whole, list(parts)


def _vector_gradients(call: Call, whole: Tensor, parts: list[Tensor]) -> dict[str, Tensor]:
    """The parts in the types and shapes of the parameters; empty where there is none."""
    given: list[Tensor | None] = [getattr(call.given, name) for name in VECTORS]
    types = {v.dtype for v in given if v is not None}
    if len(types) == 1 and types != {torch.float32}:  # rounded all at once
        parts = list(whole.to(next(iter(types))).split([len(p) for p in parts]))
    found = {}
    for name, parameter, part in zip(VECTORS, given, parts, strict=True):
        if parameter is None:
            found[name] = call.empty.new_empty(0)
            continue
        if part.numel() != parameter.numel():
            part = part.narrow(0, 0, parameter.numel())
        if part.dtype != parameter.dtype:
            part = part.to(parameter.dtype)
        found[name] = part.view(parameter.shape) if call.lead else part
    return found


def backward(
    given: Inputs,
    r: Outputs,
    doutput: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    consume: bool = False,
) -> Grads:
    """The gradients of all differentiable inputs, from those of the three results.

    consume: whether what the forward pass saved may be overwritten, as nobody will need it again.
    """
    call = Call(given)
    a, R, T, B, H, wx = call.a, call.R, call.T, call.B, call.H, call.wx
    dtype, device = wx.dtype, wx.device
    log.debug("lstm backward R=%d T=%d B=%d H=%d %s: %s", R, T, B, H, dtype, call.path)

    if dh_n is None and dc_n is None:
        dh, dc = torch.zeros(2, *call.lead, B, H, dtype=torch.float32, device=device).unbind()
    else:
        dh, dc = (_copied(call, grad) for grad in (dh_n, dc_n))
    polled = call.in_cuda and not cuda_lstm.meets_at_counter("backward", wx)
    room = _consumed(call, r.wh) if consume and not polled else None
    da = torch.empty_like(wx) if room is None else room
    shared = a.norm == "none" or a.joint  # the gradient of both terms is one
    dwx = da if shared else torch.empty_like(wx)
    whole, sums = _sums(call)
    moments = [call.full(p) for p in a.population] if a.population else list(r[3:9])
    if a.norm == "batch" and not a.population:
        var_x, var_c = (m if m.numel() else None for m in (moments[1], moments[5]))
        states = (a.h0, a.c0)
        moments[3], raised_c = raised_variances(states, given.wx, var_x, moments[3], var_c, a.eps)
        if raised_c is not None:
            moments[5] = raised_c
    barrier = torch.zeros(R, dtype=torch.int32, device=device)
    weight = aligned(a.weight_hh.to(dtype))
    dy = call.empty if doutput is None else doutput.contiguous()
    if call.in_cuda:
        if polled:  # it begins empty, so it has a room of its own
            da.view(torch.int16 if dtype != torch.float32 else torch.int32).fill_(-1)
        names = ("dbias", "dgamma_x", "dgamma_h", "dgamma_c", "dbeta_c")
        tensors = call.named(weight, moments) | dict(zip(names, sums, strict=True))
        tensors |= {"cs": r.cs, "wh": r.wh, "doutput": dy, "dh": dh, "dc": dc, "da": da, "dwx": dwx}
        tensors["counter"] = barrier
        cuda_lstm.backward(call, tensors, rows_of(moments), doutput is not None)
    elif call.path == paths.STEPS:
        given_dy = None if doutput is None else dy
        lstm_steps.backward(call, moments, r.cs, r.wh, given_dy, dh, dc, da, dwx, sums)
    else:
        plan, transposed = call.plan, weight.transpose(-2, -1).contiguous()
        flags = {"K": plan.k_backward, "HAS_DOUTPUT": doutput is not None}
        vectors, masks = call.vectors(), call.masks()
        pieces = [(T - 1, T)] if plan.persistent else [(t, 1) for t in range(T - 1, -1, -1)]
        for last, steps in pieces:
            arguments = [
                wx,
                transposed,
                *vectors,
                *(m if m.numel() else call.empty for m in (*moments[:2], *moments[3:])),
                r.cs,
                r.wh,
                call.lengths,
                call.inv_n,
                *masks,
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
                *rows_of(moments),
                a.rate_c,
                a.rate_h,
                a.eps,
            ]
            call.launch(lstm_backward, arguments, flags, plan.warps_backward, plan.stages_backward)

    if a.sequence:
        _sequence_backward(call, r, dwx, *sums[:2])
    if not call.lead:
        da, dwx = da[0], dwx[0]
    hidden = r.hidden if r.hidden.numel() else r.output
    apart = shared or not (call.in_cuda and small_lstm.choose(wx))
    with _multiplied_as_by_kernels(wx):
        dweight, dh0 = _through_weight(call, da, weight, hidden, apart)
    if a.lengths is not None or call.zoned:  # else every row goes through every product
        dh0 = dh + dh0.to(torch.float32)
    return Grads(
        wx=dwx,
        weight_hh=dweight.to(a.weight_hh.dtype),
        h0=dh0.to(a.h0.dtype),
        c0=dc.to(a.c0.dtype),
        **_vector_gradients(call, whole, sums),
    )


def _copied(call: Call, grad: Tensor | None) -> Tensor:
    """The gradient of a last state in float32, to be written to."""
    full: dict[str, Any] = {"dtype": torch.float32, "device": call.wx.device}
    if grad is None:
        return torch.zeros(*call.lead, call.B, call.H, **full)
    return grad.to(copy=True, memory_format=torch.contiguous_format, **full)


def _multiplied_as_by_kernels(wx: Tensor) -> contextlib.AbstractContextManager[None]:
    """Products of float32 are in tf32 where the kernels' were; else as PyTorch's switch says."""
    if wx.is_cuda and wx.dtype == torch.float32 and tf32_allowed():
        return lstm_steps.multiplied_as_by_cudnn()
    return contextlib.nullcontext()


def _through_weight(
    call: Call, da: Tensor, weight: Tensor, hidden: Tensor, apart: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of W_h and, as far as it goes through the product, of h0.

    apart: whether the columns of da are gate by gate, as the rows of W_h are, or unit by unit.
    """
    first = da.select(-3, 0)
    dweight = torch.matmul(first.transpose(-2, -1), aligned(call.a.h0.to(da.dtype)))
    if call.T > 1:
        rest = da.narrow(-3, 1, call.T - 1).flatten(-3, -2).transpose(-2, -1)
        before = hidden.narrow(-3, 0, call.T - 1).flatten(-3, -2)
        add = torch.baddbmm if call.lead else torch.addmm
        dweight = add(dweight, rest, before)
    if not apart:
        dweight = dweight.unflatten(-2, (call.H, 4)).transpose(-3, -2).flatten(-3, -2)
        first = first.unflatten(-1, (call.H, 4)).transpose(-2, -1).flatten(-2)
    return dweight, torch.matmul(first, weight)


def _sequence_backward(
    call: Call, r: Outputs, dwx: Tensor, dbias: Tensor, dgamma_x: Tensor
) -> None:
    """What sequencewise statistics add to the gradient of the input term, in place."""
    a, wide = call.a, (call.R, 1, 1, 4 * call.H)
    rstd = torch.rsqrt(r.var_x.view(wide) + a.eps)
    x_hat = (call.wx - r.mean_x.view(wide)) * rstd
    n: Tensor | int = call.T * call.B
    spread = dbias.view(wide) + x_hat * dgamma_x.view(wide)
    if a.lengths is not None:
        valid = valid_steps(call.lengths, call.T)
        assert valid is not None
        n = valid.sum()
        spread = torch.where(valid[None, :, :, None], spread, 0)
    gamma_x = call.full(a.gamma_x).view(wide)
    dwx -= (spread * (rstd * gamma_x) / n).to(dwx.dtype)
