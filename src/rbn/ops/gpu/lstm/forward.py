"""The LSTM's forward pass on the GPU, from tensors to kernel launches.

R independent recurrences of one shape (the directions of a layer, several models trained together)
run side by side; every tensor carries them as its first dimension. One alone needs none.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu.lstm import cuda_kernels, families
from rbn.ops.gpu.lstm.backward import backward, gradients
from rbn.ops.gpu.lstm.families import plan_for
from rbn.ops.gpu.lstm.input_moments import feature_moments, input_moments
from rbn.ops.gpu.lstm.kernel_arguments import Call, laid_out, rows_of
from rbn.ops.gpu.lstm.persistent.forward_kernel import lstm_forward
from rbn.ops.gpu.lstm.persistent.tiles import power_of_two
from rbn.ops.gpu.lstm.plan import BATCH
from rbn.ops.gpu.lstm.prepare import begin_states
from rbn.ops.gpu.lstm.prepare_kernels import last_states
from rbn.ops.gpu.lstm.signature import MOMENTS, Inputs, Outputs, steps_of, stride_of
from rbn.ops.gpu.lstm.steps import step_launches
from rbn.ops.gpu.lstm.workspace import Room
from rbn.ops.gpu.runtime.launch_cache import launch_kept, launch_known
from rbn.ops.types import valid_steps

__all__ = ["backward", "forward", "forward_of_one_feature", "gradients", "plan_for", "run"]

log = logging.getLogger("rbn.ops.gpu")

_BLOCK = 1024  # numbers that a program of `last_states` takes


def forward(given: Inputs, apart: bool = False) -> Outputs:
    """Run the recurrence over all steps.

    apart: whether no two results may share memory.
    """
    call = Call(given)
    return _complete(call, run(call, apart))


def run(call: Call, apart: bool = False) -> Outputs:
    """The same; None for what there is not, and more than is asked for behind W_h h."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "lstm forward R=%d T=%d B=%d H=%d %s: %s",
            *(call.R, call.T, call.B, call.H, call.flat.dtype, call.path),
        )
    return _in_cuda(call, apart)[0] if call.in_cuda else _in_triton(call, apart)


def _complete(call: Call, found: Outputs) -> Outputs:
    """Results of which each is a tensor, of the size that the operator's have."""
    wh = found.wh
    products = call.facts.saved[1]
    if wh.shape[0] != products:
        wh = wh.narrow(0, 0, products)
    empty = functools.partial(call.flat.new_empty, 0)
    full = {*MOMENTS, "cs"}
    found = found._replace(wh=wh)
    return Outputs._make(
        (empty(dtype=torch.float32) if name in full else empty()) if value is None else value
        for name, value in zip(Outputs._fields, found, strict=True)
    )


def forward_of_one_feature(w: Tensor, given: Inputs) -> tuple[Tensor, ...]:
    """The same for inputs of one feature, see `Call`, through the kernels for small layers.

    Returns one tensor more: the inputs as the kernels take them.
    """
    call = Call(given, w)
    log.debug(
        "lstm forward R=%d T=%d B=%d H=%d %s: one feature",
        *(call.R, call.T, call.B, call.H, call.flat.dtype),
    )
    found, inputs = _in_cuda(call, apart=False)
    assert inputs is not None
    return *_complete(call, found), inputs


def _in_cuda(call: Call, apart: bool) -> tuple[Outputs, Tensor | None]:
    """One launch, and as little as possible before it: the card may be waiting."""
    a, H, wx, facts = call.a, call.H, call.flat, call.facts
    dtype, device, full = wx.dtype, wx.device, torch.float32
    stride = facts.stride
    hs = _room_for_states(call, stride, facts.looks["forward"])
    new = Room(call, apart)
    begin_states(call, hs, new)
    cells, products, beyond = facts.saved
    cs = torch.empty(cells, dtype=full, device=device)
    wh = torch.empty(products + beyond, dtype=dtype, device=device)
    weight = a.weight_hh if a.weight_hh.dtype == dtype else a.weight_hh.to(dtype)
    at = call.addresses(weight.contiguous())
    at |= new.at
    at["hs"], at["cs"], at["wh"] = hs.data_ptr(), cs.data_ptr(), wh.data_ptr()
    at["c0"] = at["c_n"]  # each cell is read and written by one thread
    if facts.clear:
        at |= laid_out(facts.zeroed["forward"], at["clear"])
    if a.lengths is not None:
        h_n = _first_states(call)
        at["h_n"] = h_n.data_ptr()
    rows = new.rows
    if a.population:
        moments = [call.full(p) for p in a.population]
        at |= call.moments_at(moments)
        rows = rows_of(moments)
    inputs: Tensor | None = None
    if call.w is not None:
        inputs = _inputs_of_one_feature(call, new, at["w"])
        at |= call.inputs_at(inputs)
    elif facts.sequence:
        _sequence_moments(call.wx, call.lengths if a.lengths is not None else None, *new.of_input())
    elif call.x == BATCH:
        _input_moments(call, new)
    cuda_kernels.forward(call, at, rows)

    # The kernel runs; all else can wait.
    output = steps_of(hs, H)
    last = _last_states(call, output if a.lengths is None else h_n, new)
    if stride != H:
        output = output.contiguous()
    hidden = hs if a.save and stride == H and not apart else None
    saved = (wh, cs if a.save else None, hidden)
    return Outputs._make((output, *last, *new.moments(), *saved)), inputs


def _last_states(call: Call, h: Tensor, new: Room) -> tuple[Tensor, Tensor]:
    """h_n and c_n in the output's type, from h ``[..., T, B, H]`` or ``[..., B, H]`` and a room."""
    wx, H = call.flat, call.H
    h_n = torch.empty((*call.lead, call.B, H), dtype=wx.dtype, device=wx.device)
    c_n = torch.empty_like(h_n)

    def ask() -> Any:
        strides, size = h.stride(), h_n.numel()
        begin = 0 if h.dim() == h_n.dim() else (call.T - 1) * strides[-3]
        return (
            (-(-size // _BLOCK), 1),
            (h, new.cell(), h_n, c_n),
            (begin, strides[0] if call.lead else 0, size, call.B * H),
            {"H": H, "STRIDE": strides[-2], "BLOCK": _BLOCK},
        )

    addresses = (h.data_ptr(), new.at["c_n"], h_n.data_ptr(), c_n.data_ptr())
    launch_known(last_states, (call.facts,), addresses, ask, wx)
    return h_n, c_n


def _in_triton(call: Call, apart: bool) -> Outputs:
    """One launch, or one for each step."""
    a, R, T, B, H, wx = call.a, call.R, call.T, call.B, call.H, call.wx
    dtype, device = wx.dtype, wx.device
    stride = stride_of(H)
    hs = _room_for_states(call, stride)
    _begin(call, hs, stride)
    cells, products, beyond = call.facts.saved
    cs = torch.empty(cells, dtype=torch.float32, device=device)
    wh = wx.new_empty(products + beyond)
    h_n = _first_states(call)
    new = Room(call, apart=True)
    if a.sequence:
        _sequence_moments(wx, call.lengths if a.lengths is not None else None, *new.of_input())
    moments = [call.full(p) for p in a.population] or [
        call.empty.narrow(0, 0, 0) if m is None else m for m in new.moments()
    ]
    natural = cs.narrow(0, 0, R * (T + 1 if a.save else 1) * B * H).view(*call.lead, -1, B, H)
    natural.select(-3, 0).copy_(_broadcast(call, a.c0))
    if call.path == families.STEPS:
        if call.x == BATCH:
            _input_moments(call, new)
        step_launches.forward(call, moments, hs, natural, wh, h_n)
        return _outputs(call, hs, cs, wh, h_n, natural.select(-3, -1), new.moments(), apart)
    barrier = torch.zeros(R, dtype=torch.int32, device=device)
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

    return _outputs(call, hs, cs, wh, h_n, natural.select(-3, -1), new.moments(), apart)


def _room_for_states(call: Call, stride: int, empty: bool = False) -> Tensor:
    """``[R, T + 1, B, stride]``; step 1, the output's first, is at a multiple of 16 bytes.

    empty: whether it holds the pattern that kernels know as EMPTY.
    """
    shape = (*call.lead, call.T + 1, call.B, stride)
    dtype = call.flat.dtype
    skip = -call.B * stride % 8
    size = math.prod(shape)
    whole = (skip + size,) if skip else shape
    if empty:
        bits = torch.int16 if dtype != torch.float32 else torch.int32
        room = torch.full(whole, -1, dtype=bits, device=call.flat.device).view(dtype)
    else:
        room = torch.empty(whole, dtype=dtype, device=call.flat.device)
    return room.narrow(0, skip, size).view(shape) if skip else room


def _broadcast(call: Call, state: Tensor) -> Tensor:
    """An initial state such that it can be copied to one with rows."""
    return state.unsqueeze(-2) if call.lead and call.shared(state) else state


def _first_states(call: Call) -> Tensor:
    """Where kernels put the last h of each row: h0 for those that have no step."""
    full: dict[str, Any] = {"dtype": torch.float32, "device": call.flat.device}
    states = torch.empty((*call.lead, call.B, call.H), **full)
    return states if call.a.lengths is None else states.copy_(_broadcast(call, call.a.h0))


def _begin(call: Call, hs: Tensor, stride: int) -> None:
    """h0 into the room of the states."""
    first, h0 = hs.select(-3, 0), _broadcast(call, call.a.h0)
    if stride == call.H:
        first.copy_(h0)
    else:
        first.narrow(-1, 0, call.H).copy_(h0)
        first.narrow(-1, call.H, stride - call.H).zero_()


def _outputs(
    call: Call,
    hs: Tensor,
    cs: Tensor,
    wh: Tensor,
    h_n: Tensor,
    c_n: Tensor,
    new: list[Tensor | None],
    apart: bool,
) -> Outputs:
    """The operator's results from the kernels' buffers."""
    a, dtype, T, H = call.a, call.wx.dtype, call.T, call.H
    output = steps_of(hs, H)
    shares = not a.include and hs.shape[-1] == H
    if a.include:
        valid = valid_steps(call.lengths, T)
        assert valid is not None
        output = torch.where(valid[:, :, None], output, 0)
    elif not shares:
        output = output.contiguous()
    last = h_n.to(dtype) if a.lengths is not None else output.select(-3, -1).clone()
    # What would be kept for this alone is no more than needs to be.
    hidden = hs.narrow(-1, 0, H) if a.save and (a.include or (shares and not apart)) else None
    saved = [wh, cs if a.save else None, hidden]
    return Outputs._make([output, last, c_n.to(dtype, copy=True), *new, *saved])


def _input_moments(call: Call, new: Room) -> None:
    """Mean and var of the input term of every step, into the first two of `new`."""
    wx = call.flat
    padded = call.a.lengths is not None and not call.a.include
    lengths = call.lengths if padded else wx  # not looked at

    def ask() -> Any:
        columns = 128  # of a program: 64 take a fifth longer at 128 rows, and so do 256
        return (
            (call.R * call.T, -(-4 * call.H // columns)),
            [wx, *new.of_input(), lengths],
            (call.T, call.B),
            {
                "F": 4 * call.H,
                "ROWS": min(128, max(16, power_of_two(call.B))),
                "COLUMNS": columns,
                "LENGTHS": padded,
            },
        )

    addresses = (wx.data_ptr(), new.at["mean_x"], new.at["var_x"], lengths.data_ptr())
    launch_known(input_moments, (call.facts,), addresses, ask, wx)


def _inputs_of_one_feature(call: Call, new: Room, w: int) -> Tensor:
    """Inputs as the kernels take them, with their variances behind.

    The minibatch's statistics of the input term go into the first two of `new`. w: the address of
    `call.w` in float32.
    """
    a, R, T, B, G = call.a, call.R, call.T, call.B, 4 * call.H
    x = a.wx  # of which all columns are one
    S, rows = call.input_rows, new.rows[0] if call.x == BATCH else 0
    size = R * T * S
    room = torch.empty(size + R * rows, dtype=torch.float32, device=x.device)
    if a.sequence:
        x = _sequence_centered(call, room.narrow(0, size, R), new)
    batch, padded = call.x == BATCH and not a.sequence, a.lengths is not None
    addresses = [x.data_ptr(), w, room.data_ptr()]
    addresses += [new.at["mean_x"], new.at["var_x"]] if batch else addresses[2:] * 2
    lengths = call.lengths if padded else room  # not looked at
    addresses.append(lengths.data_ptr())

    def tensors() -> list[Tensor]:
        assert call.w is not None
        return [x, call.full(call.w), room, *(new.of_input() if batch else [room] * 2), lengths]

    launch_kept(
        feature_moments,
        (R * T, 1),
        tuple(addresses),
        tensors,
        (T, B, x.stride(0) if call.lead else 0, *x.stride()[-3:-1], size),
        {
            "F": G,
            "S": S,
            "ROWS": power_of_two(S),
            "COLUMNS": power_of_two(G),
            "BATCH": batch,
            "LENGTHS": padded,
        },
        (x.dtype,),
        room,
    )
    return room


def _sequence_centered(call: Call, var: Tensor, new: Room) -> Tensor:
    """X ``[R, T, B, 1]`` less its mean over all unpadded positions; the variance into `var`."""
    assert call.w is not None
    whole = call.wx.narrow(-1, 0, 1).to(torch.float32)
    mean, found = whole.new_empty(2, call.R, 1)
    _sequence_moments(whole, call.lengths if call.a.lengths is not None else None, mean, found)
    var.copy_(found.view(-1))
    w = call.full(call.w).view(call.R, -1)
    for part, value in zip(new.of_input(), (mean * w, found * w.square()), strict=True):
        part.copy_(value.view_as(part))
    centered: Tensor = whole - mean[:, None, None]
    return centered


def _sequence_moments(
    wx: Tensor, lengths: Tensor | None, new_mean: Tensor, new_var: Tensor
) -> None:
    """Mean and var of the input term over all unpadded positions, into the last two."""
    x = wx.to(torch.float32)
    if lengths is None:
        var, mean = torch.var_mean(x, dim=(1, 2), correction=0)
    else:
        valid = valid_steps(lengths, wx.shape[1])
        assert valid is not None
        keep, n = valid[None, :, :, None], valid.sum()
        mean = torch.where(keep, x, 0).sum((1, 2)) / n
        var = torch.where(keep, x - mean[:, None, None], 0).square().sum((1, 2)) / n
    new_mean.copy_(mean.view_as(new_mean))
    new_var.copy_(var.view_as(new_var))
