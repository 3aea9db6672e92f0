"""The LSTM's forward pass on the GPU, from tensors to kernel launches.

R independent recurrences of one shape (the directions of a layer) run side by side; every tensor
then has a leading dimension of R. A single recurrence needs no such dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.input_moments import feature_moments
from rbn.ops.gpu.lstm.joined import Saved, join, to_save
from rbn.ops.gpu.lstm.kernel_arguments import LSTMCall, rows_of
from rbn.ops.gpu.lstm.plan import BATCH, plan_for
from rbn.ops.gpu.lstm.prepare import begin_states, fill_constants, write_input_moments
from rbn.ops.gpu.lstm.prepare_kernels import last_states
from rbn.ops.gpu.lstm.steps import step_launches
from rbn.ops.gpu.lstm.workspace import (
    Workspace,
    sizes_to_save,
    states_buffer,
    steps_of,
    stride_of,
)
from rbn.ops.gpu.runtime.device import power_of_two
from rbn.ops.gpu.runtime.driver import device_of
from rbn.ops.gpu.runtime.launch_cache import launch_by_key, launch_cached
from rbn.ops.gpu.sequence_statistics import sequence_moments
from rbn.ops.operator import Results

log = logging.getLogger("rbn.ops.gpu")

_BLOCK = 1024  # elements per program of `last_states`
_NOTHING_SAVED = Saved()


def forward(calls: Sequence[LSTMArguments], separate: bool) -> Results:
    """Run the recurrence over all steps.

    separate: whether no two results may share memory.
    """
    plan = plan_for(calls, separate)
    call = join(calls, plan)
    if log.isEnabledFor(logging.DEBUG):
        path = "one feature" if plan.one_feature else plan.path
        log.debug(
            "lstm forward R=%d T=%d B=%d H=%d %s: %s",
            *(call.R, call.T, call.B, call.H, call.term.dtype, path),
        )
    run = _in_steps if plan.family is None else _in_cuda
    output, states, moments, kept = run(call, separate)
    saved = _NOTHING_SAVED
    if call.a.save:
        kept.update(to_save(call, calls))
        if separate or plan.family is None:  # otherwise they are part of `memory`
            kept.update(zip(LSTM.moments, moments, strict=True))
        if separate:  # the sizes must match `fake`, and no memory may be shared
            kept["wh"] = kept["wh"].narrow(0, 0, plan.saved[1])
            kept["x"] = kept["w"] = kept["memory"] = None
        saved = Saved(**kept)
    return Results(output, states, tuple(moments), saved, plan)


def fake(a: LSTMArguments) -> Results:
    """Empty tensors with the shapes and dtypes of the results of one call."""
    (T, B), H, dtype = a.input.shape[:2], a.weight_hh.shape[1], a.input.dtype

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return a.input.new_empty(shape, dtype=dtype)

    output = new(T, B, H, dtype=dtype)
    buffer = new(T + 1, B, stride_of(H), dtype=dtype)
    if not a.include and stride_of(H) == H:
        output = steps_of(buffer, H)
    shapes = LSTM.statistics_shapes(a)
    moments = [None if shape is None else new(*shape) for shape in shapes for _ in range(2)]
    saved = Saved()
    if a.save:
        saved = _fake_saved(a, moments, buffer)
    states = new(B, H, dtype=dtype), new(B, H, dtype=dtype)
    return Results(output, states, tuple(moments), saved)


def _fake_saved(a: LSTMArguments, moments: list[Tensor | None], buffer: Tensor) -> Saved:
    (T, B), H, dtype = a.input.shape[:2], a.weight_hh.shape[1], a.input.dtype
    new = a.input.new_empty
    cells, products, _ = sizes_to_save((T, B, 4 * H), save=True)
    return Saved(
        term=None if a.weight_ih is None else new(T, B, 4 * H),
        **dict(zip(LSTM.moments, moments, strict=True)),
        wh=new(products, dtype=dtype),
        cs=new(cells, dtype=torch.float32),
        hidden=buffer.narrow(-1, 0, H) if a.include else None,
    )


Run = tuple[Tensor, tuple[Tensor, Tensor], list[Tensor | None], dict[str, Any]]


def _in_cuda(call: LSTMCall, separate: bool) -> Run:
    """Run in one launch, with as little host work as possible before it: the GPU may be idle.

    Returns the output, the last states, the statistics, and the saved tensors by name.
    """
    a, H, plan = call.a, call.H, call.plan
    dtype, device, full = call.term.dtype, call.term.device, torch.float32
    stride = plan.stride
    hs = states_buffer(plan, stride, plan.polls["forward"])
    new = Workspace(plan, separate)
    at = new.at()
    begin_states(call, hs, new, at if call.x == BATCH and call.w is None else None)
    cells, products, beyond = plan.saved
    cs = torch.empty(cells, dtype=full, device=device)
    wh = torch.empty(products + beyond, dtype=dtype, device=device)
    at |= call.addresses(call.weight())
    at["hs"], at["cs"], at["wh"] = hs.data_ptr(), cs.data_ptr(), wh.data_ptr()
    if a.lengths is not None:
        h_n = _first_states(call)
        at["h_n"] = h_n.data_ptr()
    rows = plan.moments.rows
    if a.population:
        given = call.population()
        at |= call.moments_at(given)
        rows = rows_of(given)
    inputs: Tensor | None = None
    if call.w is not None:
        inputs = _inputs_of_one_feature(call, new, at)
        at |= call.inputs_at(inputs)
    elif plan.sequence:
        sequence_moments(call.wx, call.given_lengths, *new.input_moments())
    elif call.x == BATCH and a.exclude:
        fill_constants(*new.input_moments(), call.inv_n, a.eps)
    with device_of(call.term):
        launch = cuda_kernels.launch_for("forward", call, at, rows)
        launch.kernel.launch(launch.grid, launch.arguments)

    # Everything below overlaps with the kernel.
    output = steps_of(hs, H)
    last = _last_states(call, output if a.lengths is None else h_n, new)
    if stride != H:
        output = output.contiguous()
    hidden = hs if stride == H and not separate else None
    saved: dict[str, Any] = {"wh": wh, "cs": cs, "hidden": hidden, "inputs": inputs}
    saved["output"] = output if hidden is None else None
    saved["memory"] = new.memory
    return output, last, new.moments(), saved


def _last_states(call: LSTMCall, h: Tensor, new: Workspace) -> tuple[Tensor, Tensor]:
    """h_n and c_n in the output's dtype, from h ``[..., T, B, H]`` or ``[..., B, H]``."""
    wx, H = call.term, call.H
    h_n = torch.empty((*call.lead, call.B, H), dtype=wx.dtype, device=wx.device)
    c_n = torch.empty_like(h_n)

    def arguments() -> Any:
        strides, size = h.stride(), h_n.numel()
        begin = 0 if h.dim() == h_n.dim() else (call.T - 1) * strides[-3]
        return (
            (-(-size // _BLOCK), 1),
            (h, new.part(0, call.plan.cell), h_n, c_n),
            (begin, strides[0] if call.lead else 0, size, call.B * H),
            {"H": H, "STRIDE": strides[-2], "BLOCK": _BLOCK},
        )

    addresses = (h.data_ptr(), new.first, h_n.data_ptr(), c_n.data_ptr())
    launch_by_key(last_states, (call.plan,), addresses, arguments, wx)
    return h_n, c_n


def _in_steps(call: LSTMCall, separate: bool) -> Run:
    """Run step by step. Returns the same as `_in_cuda`."""
    a, R, T, B, H, wx = call.a, call.R, call.T, call.B, call.H, call.wx
    stride = stride_of(H)
    hs = states_buffer(call.plan, stride)
    _begin(call, hs, stride)
    cells, products, beyond = call.plan.saved
    cs = torch.empty(cells, dtype=torch.float32, device=wx.device)
    wh = wx.new_empty(products + beyond)
    h_n = _first_states(call)
    new = Workspace(call.plan, separate=True)
    if call.plan.sequence:
        sequence_moments(wx, call.given_lengths, *new.input_moments())
    moments = call.population() if a.population else new.moments()
    natural = cs.narrow(0, 0, R * (T + 1 if a.save else 1) * B * H).view(*call.lead, -1, B, H)
    natural.select(-3, 0).copy_(_broadcast(call, a.c0))
    if call.x == BATCH:
        padded = a.lengths is not None and not call.plan.include
        write_input_moments(call.term, call.lengths if padded else None, *new.input_moments())
        if a.exclude:
            fill_constants(*new.input_moments(), call.inv_n, a.eps)
    step_launches.forward(call, moments, hs, natural, wh, h_n)
    return _outputs(call, hs, cs, wh, h_n, natural.select(-3, -1), new.moments(), separate)


def _broadcast(call: LSTMCall, state: Tensor) -> Tensor:
    """View an initial state so that it broadcasts to ``[..., B, H]``."""
    return state.unsqueeze(-2) if call.lead and call.shared(state) else state


def _first_states(call: LSTMCall) -> Tensor:
    """A buffer for each row's last h, float32 ``[..., B, H]``.

    With lengths it is initialized with h0, for rows without steps.
    """
    full: dict[str, Any] = {"dtype": torch.float32, "device": call.term.device}
    states = torch.empty((*call.lead, call.B, call.H), **full)
    return states if call.a.lengths is None else states.copy_(_broadcast(call, call.a.h0))


def _begin(call: LSTMCall, hs: Tensor, stride: int) -> None:
    """Copy h0 into the buffer of states and zero its rows' padding."""
    first, h0 = hs.select(-3, 0), _broadcast(call, call.a.h0)
    if stride == call.H:
        first.copy_(h0)
    else:
        first.narrow(-1, 0, call.H).copy_(h0)
        first.narrow(-1, call.H, stride - call.H).zero_()


def _outputs(
    call: LSTMCall,
    hs: Tensor,
    cs: Tensor,
    wh: Tensor,
    h_n: Tensor,
    c_n: Tensor,
    moments: list[Tensor | None],
    separate: bool,
) -> Run:
    """Build the results from the kernels' buffers."""
    a, dtype, H = call.a, call.wx.dtype, call.H
    output = steps_of(hs, H)
    include = call.plan.include
    if include:
        assert call.valid is not None
        output = torch.where(call.valid[:, :, None], output, 0)
    elif hs.shape[-1] != H:
        output = output.contiguous()
    last = h_n.to(dtype) if a.lengths is not None else output.select(-3, -1).clone()
    # Save `hs` if the output is a masked copy or a view of it. Otherwise save the output instead,
    # so that `hs` is not kept alive for the backward pass alone.
    own = include or (hs.shape[-1] == H and not separate)
    hidden = hs.narrow(-1, 0, H) if own else None
    saved: dict[str, Any] = {"wh": wh, "cs": cs, "hidden": hidden}
    saved["output"] = output if hidden is None else None
    return output, (last, c_n.to(dtype, copy=True)), moments, saved


def _inputs_of_one_feature(call: LSTMCall, new: Workspace, at: dict[str, int]) -> Tensor:
    """The inputs in the kernels' layout, followed by their variances.

    Writes the minibatch statistics of the input term into the workspace `new`. at: addresses by
    name, also that of `call.w` in float32.
    """
    a, R, T, B, G = call.a, call.R, call.T, call.B, 4 * call.H
    x = a.input  # expanded: all columns are the same memory
    S, rows = call.input_rows, call.plan.moments.rows[0] if call.x == BATCH else 0
    size = R * T * S
    memory = torch.empty(size + R * rows, dtype=torch.float32, device=x.device)
    if call.plan.sequence:
        x = _sequence_centered(call, memory.narrow(0, size, R), new)
    batch, padded = call.x == BATCH and not call.plan.sequence, a.lengths is not None
    assert not (batch and padded)  # see `plan`: such calls compute the input term
    addresses = [x.data_ptr(), at["w"], memory.data_ptr()]
    addresses += [at["mean_x"], at["var_x"]] if batch else addresses[2:] * 2
    lengths = call.lengths if padded else memory  # memory: a placeholder, not read
    addresses.append(lengths.data_ptr())

    def tensors() -> list[Tensor]:
        assert call.w is not None
        return [
            x,
            call.full(call.w),
            memory,
            *(new.input_moments() if batch else [memory] * 2),
            lengths,
        ]

    launch_cached(
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
        memory,
    )
    return memory


def _sequence_centered(call: LSTMCall, var: Tensor, new: Workspace) -> Tensor:
    """X ``[R, T, B, 1]`` minus its mean over all unpadded positions. Writes the variance to `var`.

    Also writes the statistics of the input term into the workspace `new`.
    """
    assert call.w is not None
    feature = call.wx.narrow(-1, 0, 1).to(torch.float32)
    mean, result = feature.new_empty(2, call.R, 1)
    sequence_moments(feature, call.given_lengths, mean, result)
    var.copy_(result.view(-1))
    w = call.full(call.w).view(call.R, -1)
    for part, value in zip(new.input_moments(), (mean * w, result * w.square()), strict=True):
        part.copy_(value.view_as(part))
    centered: Tensor = feature - mean[:, None, None]
    return centered
