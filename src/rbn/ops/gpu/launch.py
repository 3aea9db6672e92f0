"""The LSTM's forward pass on the GPU, from tensors to kernel launches.

R independent recurrences of one shape (the directions of a layer, several models trained together)
run side by side; every tensor carries them as its first dimension. One alone needs none.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from rbn.ops.gpu import cuda_lstm, lstm_steps, paths, small_lstm
from rbn.ops.gpu.call import BATCH, Call, rows_of
from rbn.ops.gpu.gradients import backward, room_for_gradients
from rbn.ops.gpu.input_moments import input_moments
from rbn.ops.gpu.lstm_forward import lstm_forward
from rbn.ops.gpu.paths import plan_for
from rbn.ops.gpu.plan import power_of_two
from rbn.ops.gpu.signature import (
    Inputs,
    Outputs,
    saved_cells,
    saved_products,
    statistics_shapes,
    steps_of,
    stride_of,
)
from rbn.ops.types import valid_steps

__all__ = ["backward", "forward", "plan_for"]

log = logging.getLogger("rbn.ops.gpu")


def forward(given: Inputs) -> Outputs:
    """Run the recurrence over all steps."""
    call = Call(given)
    a, R, T, B, H, wx = call.a, call.R, call.T, call.B, call.H, call.wx
    dtype, device = wx.dtype, wx.device
    stride = _stride(call)
    log.debug("lstm forward R=%d T=%d B=%d H=%d %s: %s", R, T, B, H, dtype, call.path)
    hs = _room_for_states(call, stride)
    first = hs.select(-3, 0)
    if stride == H:
        first.copy_(a.h0)
    else:
        first.narrow(-1, 0, H).copy_(a.h0)
        first.narrow(-1, H, stride - H).zero_()
    cs = torch.empty(saved_cells(a), dtype=torch.float32, device=device)
    wh = wx.new_empty(saved_products(a) + room_for_gradients(a)).narrow(0, 0, saved_products(a))
    h_n, c_n = (torch.empty(*call.lead, B, H, dtype=torch.float32, device=device) for _ in range(2))
    new = [
        torch.empty(shape, dtype=torch.float32, device=device)
        for shape in statistics_shapes(given)
        for _ in range(2)
    ]
    if a.sequence:
        _sequence_moments(wx, call.lengths if a.lengths is not None else None, new)
    moments = [call.full(p) for p in a.population] if a.population else new
    barrier = torch.zeros(R, dtype=torch.int32, device=device)
    if call.in_cuda:
        if not cuda_lstm.meets_at_counter("forward", wx):
            exchanged = hs.narrow(-3, 1, T)
            exchanged.view(torch.int16 if dtype != torch.float32 else torch.int32).fill_(-1)
        if call.x == BATCH:
            _input_moments(call, new)
        weight = a.weight_hh.to(dtype).contiguous()
        tensors = call.named(weight, moments) | {"hs": hs, "cs": cs, "wh": wh, "h_n": h_n}
        tensors |= {"c_n": c_n, "c0": call.full(a.c0), "counter": barrier}
        cuda_lstm.forward(call, tensors, rows_of(moments))
        return _outputs(call, hs, cs, wh, h_n, c_n, new)
    natural = cs.narrow(0, 0, R * (T + 1 if a.save else 1) * B * H).view(*call.lead, -1, B, H)
    natural.select(-3, 0).copy_(a.c0)
    if call.path == paths.STEPS:
        if call.x == BATCH:
            _input_moments(call, new)
        lstm_steps.forward(call, moments, hs, natural, wh, h_n)
        return _outputs(call, hs, cs, wh, h_n, natural.select(-3, -1), new)
    plan, weight = call.plan, a.weight_hh.to(dtype).contiguous()
    flags = {"HS": stride, "K": plan.k_forward, "SAVE": a.save}
    vectors, masks = call.vectors(), call.masks()
    pieces = [(0, T)] if plan.persistent else [(t, 1) for t in range(T)]
    for begin, steps in pieces:
        arguments = [
            wx,
            weight,
            *vectors,
            *(m if m.numel() else call.empty for m in moments),
            hs,
            cs,
            wh,
            h_n,
            call.lengths,
            call.inv_n,
            *masks,
            barrier,
            begin,
            steps,
            T,
            B,
            *rows_of(moments),
            B * H if a.save else 0,
            a.rate_c,
            a.rate_h,
            a.eps,
        ]
        call.launch(lstm_forward, arguments, flags, plan.warps_forward, plan.stages_forward)

    return _outputs(call, hs, cs, wh, h_n, natural.select(-3, -1), new)


def _stride(call: Call) -> int:
    """Elements from one row of h to the next; rows that kernels read begin at 16 bytes."""
    small = call.in_cuda and small_lstm.choose(call.wx) is not None
    return call.H if small else stride_of(call.H)


def _room_for_states(call: Call, stride: int) -> Tensor:
    """``[R, T + 1, B, stride]``; step 1, the output's first, is at a multiple of 16 bytes."""
    shape = (*call.lead, call.T + 1, call.B, stride)
    skip = -call.B * stride % 8
    if not skip:
        return call.wx.new_empty(shape)
    size = math.prod(shape)
    return call.wx.new_empty(skip + size).narrow(0, skip, size).view(shape)


def _outputs(
    call: Call,
    hs: Tensor,
    cs: Tensor,
    wh: Tensor,
    h_n: Tensor,
    c_n: Tensor,
    new: list[Tensor],
) -> Outputs:
    """The operator's results from the kernels' buffers."""
    a, wx, dtype, T, H = call.a, call.wx, call.wx.dtype, call.T, call.H
    hidden = steps_of(hs, H)
    output = hidden
    if a.include:
        valid = valid_steps(call.lengths, T)
        assert valid is not None
        output = torch.where(valid[:, :, None], hidden, 0)
    elif hs.shape[-1] != H:
        output = hidden.contiguous()
    last = h_n.to(dtype) if a.lengths is not None else output.select(-3, -1).clone()
    saved = [
        wh,
        cs if a.save else cs.new_empty(0),
        hidden if a.include and a.save else wx.new_empty(0),
    ]
    return Outputs._make([output, last, c_n.to(dtype, copy=True), *new, *saved])


def _input_moments(call: Call, new: list[Tensor]) -> None:
    """Mean and var of the input term of every step, into new[0] and new[1]."""
    columns = 128  # of a program: 64 take a fifth longer at 128 rows, and so do 256
    grid = (call.R * call.T, -(-4 * call.H // columns))
    rows = min(128, max(16, power_of_two(call.B)))
    flags = {"F": 4 * call.H, "ROWS": rows, "COLUMNS": columns}
    with torch.cuda.device_of(call.wx):
        input_moments[grid](
            call.wx,
            *new[:2],
            call.lengths,
            call.T,
            call.B,
            **flags,
            LENGTHS=call.a.lengths is not None and not call.a.include,
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
    new[0].copy_(mean.view_as(new[0]))
    new[1].copy_(var.view_as(new[1]))
