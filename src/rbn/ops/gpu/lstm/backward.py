"""The LSTM's backward pass on the GPU, from tensors to kernel launches."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.definition import VECTORS, LSTMArguments
from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.constant_terms import raised_variances
from rbn.ops.gpu.lstm.joined import Saved, factors_of, join
from rbn.ops.gpu.lstm.kernel_arguments import LSTMCall, aligned, rows_of
from rbn.ops.gpu.lstm.plan import Plan, plan_for
from rbn.ops.gpu.lstm.prepare import begin_backward
from rbn.ops.gpu.lstm.prepare_kernels import finish
from rbn.ops.gpu.lstm.steps import step_launches
from rbn.ops.gpu.lstm.workspace import Scratch, vector_size
from rbn.ops.gpu.runtime.device import power_of_two
from rbn.ops.gpu.runtime.driver import device_of
from rbn.ops.gpu.runtime.launch_cache import launch_by_key
from rbn.ops.gpu.runtime.precision import multiplied_in_tf32
from rbn.ops.gpu.sequence_statistics import sequence_backward
from rbn.ops.input_term import without_padding
from rbn.ops.operator import Incoming

log = logging.getLogger("rbn.ops.gpu")

_AS_BEFORE = contextlib.nullcontext()
_BLOCK, _UNITS = 512, 32  # sums, and columns of states, per program of `finish`
_ROWS = 512  # programs of `finish` that order the rows of the gradient of W_h, at most
# The gradients of a joined call, in the order of `_gradients`.
_NAMES = ("weight_hh", "bias", "gamma_x", "gamma_h", "gamma_c", "beta_c", "h0", "c0")


def backward(
    calls: Sequence[LSTMArguments], saved: Saved, plan: Plan | None, incoming: Incoming
) -> list[dict[str, Tensor | None]]:
    """The gradients of all differentiable tensors, by name, for each call."""
    plan = plan_for(calls, separate=True) if plan is None else plan
    call = join(calls, plan, saved)
    n = len(calls)
    d_input, *others = (
        (value,) * n if n == 1 or value is None else value.unbind()
        for value in _gradients(call, saved, incoming)
    )
    gradients = [
        dict.fromkeys(("input", "weight_ih")) | dict(zip(_NAMES, own, strict=True))
        for own in zip(*others, strict=True)
    ]
    if calls[0].weight_ih is None or plan.one_feature:
        name = "weight_ih" if plan.one_feature else "input"
        for k, own in enumerate(gradients):
            own[name] = d_input[k]
        return gradients
    factors = factors_of(calls, saved)
    for k, (own, a, (x, w)) in enumerate(zip(gradients, calls, factors, strict=True)):
        d, columns = d_input[k], a.input.shape[-1]
        if incoming.input:
            own["input"] = without_padding(torch.matmul(d, w), columns)
        dw = torch.mm(columns_of(d, 0, call.T), x.reshape(-1, x.shape[-1]))
        own["weight_ih"] = without_padding(dw, columns)
    return gradients


def _consumed(call: LSTMCall, wh: Tensor) -> Tensor | None:
    """Memory for d(W_h h) ``[T, B, 4H]`` inside that of W_h h, or None if that is not possible.

    The backward pass reads W_h h of step t, then writes d(W_h h) of step t, last step first. The
    gradients lie at the end of the memory, so that those of step t overwrite only saved values of
    later steps, which every block has read before any block can start step t. This requires that
    all blocks wait for each other; see `Plan.lockstep`.
    """
    size, kept, numbers = call.term.numel(), call.plan.saved[1], wh.numel()
    if numbers == kept:  # a view from the custom operator; its storage may be larger
        numbers = wh.untyped_storage().nbytes() // wh.element_size()
    begin = (numbers - size) // 8 * 8  # a multiple of 16 bytes
    ordered = call.R == 1 and call.plan.lockstep
    if not ordered or wh.storage_offset() or begin < kept + call.B * 4 * call.H - size:
        return None
    strides = (size, call.B * 4 * call.H, 4 * call.H, 1)
    return wh.as_strided(call.term.shape, strides[-call.term.dim() :], begin)


class _Sums:
    """The gradients of `VECTORS` (and of w with one feature) in one float32 buffer."""

    def __init__(self, call: LSTMCall, scratch: Scratch | None) -> None:
        """scratch: holds the buffer, for the CUDA C++ kernels."""
        self._call, self._scratch = call, scratch
        n = 4 * call.R * call.H
        padded = vector_size(call.R * call.H)
        self.sizes = [n] * 3 + [padded] * 2 + ([] if call.w is None else [n])

    @functools.cached_property
    def memory(self) -> Tensor:
        """The buffer."""
        size = sum(self.sizes)
        if self._scratch is None:
            return torch.zeros(size, dtype=torch.float32, device=self._call.term.device)
        return self._scratch.part("dbias", size)

    def parts(self) -> list[Tensor]:
        return list(self.memory.split(self.sizes))

    def gradients(self) -> list[Tensor | None]:
        """The parts in the dtypes and shapes of the parameters; None for absent parameters."""
        memory, types = self.memory, {v.dtype for v in self._parameters() if v is not None}
        if len(types) == 1 and memory.dtype not in types:  # one conversion for all
            memory = memory.to(next(iter(types)))
        return self._like_parameters(memory.split_with_sizes(self.sizes))

    def with_states(
        self, dweight: Tensor, dh0: Tensor, dh: Tensor | None, dc: Tensor
    ) -> tuple[Tensor, list[Tensor | None]] | None:
        """Convert all gradients except that of the input term, in one launch.

        Returns the gradient of W_h with its rows ordered gate by gate, and `gradients` followed by
        those of the initial states, which all rows share. Returns None if the launch does not cover
        the call: with Triton kernels, mixed dtypes, or initial states that differ between rows.

        Args:
            dweight: the gradient of W_h as in `_through_weight`.
            dh0: the part of h0's gradient that flows through W_h.
            dh: the part that bypasses W_h, in float32, or None.
            dc: the gradient of c0, in float32.
        """
        call, scratch = self._call, self._scratch
        a, plan = call.a, call.plan
        if scratch is None or plan.finish is None:
            return None
        count, units, order = sum(self.sizes), call.R * call.H, plan.by_unit
        out = torch.empty(count + 2 * units, dtype=plan.finish, device=dc.device)
        ordered = torch.empty_like(dweight) if order else dweight

        def arguments() -> Any:
            return (
                (max(-(-count // _BLOCK), -(-units // _UNITS), order * min(4 * units, _ROWS)), 1),
                (self.memory, dh0, dc if dh is None else dh, dc, out, dweight, ordered),
                (count, units, call.B, call.H),
                {
                    "MORE": dh is not None,
                    "ROWS": min(128, power_of_two(call.B)),
                    "UNITS": _UNITS,
                    "BLOCK": _BLOCK,
                    "ORDER": order,
                },
            )

        tensors = (dh0, dc if dh is None else dh, dc, out, dweight, ordered)
        addresses = (scratch.at["dbias"], *[tensor.data_ptr() for tensor in tensors])
        launch_by_key(finish, (plan, dh is None, dh0.dtype), addresses, arguments, out)
        *parts, of_h, of_c = out.split_with_sizes([*self.sizes, units, units])
        states = (of_h, of_c) if not call.lead else (of_h.view(a.h0.shape), of_c.view(a.c0.shape))
        return ordered, [*self._like_parameters(parts), *states]

    def _parameters(self) -> list[Tensor | None]:
        given = [*self._call.given_vectors()]
        return given if self._call.w is None else [*given, self._call.w]

    def _like_parameters(self, parts: Sequence[Tensor]) -> list[Tensor | None]:
        """The parts in the shapes and dtypes of the parameters; None for absent parameters."""
        results: list[Tensor | None] = []
        for parameter, part in zip(self._parameters(), parts, strict=True):
            if parameter is None:
                results.append(None)
                continue
            if part.shape != parameter.shape:
                if part.numel() != parameter.numel():  # padded
                    part = part.narrow(0, 0, parameter.numel())
                if parameter.dim() > 1:
                    part = part.view(parameter.shape)
            results.append(part if part.dtype == parameter.dtype else part.to(parameter.dtype))
        return results


def _gradients(call: LSTMCall, r: Saved, incoming: Incoming) -> list[Any]:
    """Gradients of the input term (of W_x with one feature), then of `_NAMES`; None if absent."""
    a, wx, w, plan = call.a, call.term, call.w, call.plan
    assert r.wh is not None
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "lstm backward R=%d T=%d B=%d H=%d %s: %s",
            *(call.R, call.T, call.B, call.H, wx.dtype, plan.path),
        )
    da = _consumed(call, r.wh) if incoming.consume else None
    if da is None:
        da = wx.new_empty(wx.shape)
    same = a.norm == "none" or plan.joint  # both terms have the same gradient
    dwx = None if w is not None else da if same else torch.empty_like(wx)
    weight = aligned(call.weight())
    scratch = None if plan.family is None else Scratch(plan)
    sums = _Sums(call, scratch)
    if scratch is not None:
        dh, dc = _in_cuda(call, r, weight, incoming, da, dwx, scratch)
    else:
        assert dwx is not None
        dh, dc = _in_steps(call, r, incoming, da, dwx, sums)

    if plan.sequence and dwx is not None:
        mean, var, *_ = _moments(call, r)
        assert mean is not None
        assert var is not None
        known = call.wx, call.given_lengths, (mean, var), call.full(a.gamma_x), a.eps
        sequence_backward(*known, dwx.view(call.wx.shape), *sums.parts()[:2])
    with _multiplied_as_by_kernels(call):
        dweight, dh0 = _through_weight(call, da, weight, r)
    converted = sums.with_states(dweight, dh0, dh, dc)
    if converted is not None:
        dweight, result = converted
        if dweight.dtype != a.weight_hh.dtype:
            dweight = dweight.to(a.weight_hh.dtype)
        first = dwx if w is None else result.pop(len(result) - 3)
        return [first, dweight, *result]
    if plan.by_unit:
        dweight = by_gate(dweight, call.H)
    if dweight.dtype != a.weight_hh.dtype:
        dweight = dweight.to(a.weight_hh.dtype)
    result = sums.gradients()
    if dh is not None:
        dh0 = dh + dh0.to(torch.float32)
    states = [_of_state(call, d, state) for d, state in ((dh0, a.h0), (dc, a.c0))]
    first = result.pop() if dwx is None else dwx
    return [first, dweight, *result, *states]


def _of_state(call: LSTMCall, gradient: Tensor, state: Tensor) -> Tensor:
    """The gradient in the dtype of an initial state, summed over the rows if they share it."""
    if gradient.dtype != state.dtype:
        gradient = gradient.to(state.dtype)
    return gradient.sum(-2) if call.shared(state) else gradient


def _moments(call: LSTMCall, r: Saved) -> list[Tensor | None]:
    """The statistics that the forward kernels normalized with."""
    if call.a.population:
        return call.population()
    if r.memory is None:
        return [r.mean_x, r.var_x, r.mean_h, r.var_h, r.mean_c, r.var_c]
    view = r.memory.as_strided
    return [view(*part) if part else None for part in call.plan.moments.parts]


def _raised(call: LSTMCall, moments: list[Tensor | None]) -> list[Tensor | None]:
    """The statistics that the backward kernels normalize with."""
    a = call.a
    if a.batch_stats:
        var_x, var_h, var_c = moments[1::2]
        assert var_h is not None
        h0, c0 = [None if call.shared(s) else s for s in (a.h0, a.c0)]
        masked = a.mask_c is not None or a.mask_h is not None
        lengths, include = call.given_lengths, call.plan.include
        moments[3], moments[5] = raised_variances(
            (h0, c0), a.input, var_x, var_h, var_c, a.eps, masked, lengths, include
        )
    return moments


def _addresses(call: LSTMCall, r: Saved) -> tuple[dict[str, int], list[int]]:
    """The addresses of parameters and statistics, and the numbers of rows of the statistics."""
    plan, at, rows = call.plan, {}, call.plan.moments.rows
    if r.memory is not None:
        first = r.memory.data_ptr()
        at = {name: first + begin for name, begin in plan.kept}
    else:
        named = zip(VECTORS, call.vectors(), call.given_vectors(), strict=True)
        at = {name: call.address(full) for name, full, given in named if given is not None}
    if r.memory is None or call.a.population or (call.a.batch_stats and not plan.raises):
        moments = _moments(call, r)
        at |= call.moments_at(moments if plan.raises else _raised(call, moments))
        rows = rows_of(moments)
    return at, rows


def _in_cuda(
    call: LSTMCall,
    r: Saved,
    weight: Tensor,
    incoming: Incoming,
    da: Tensor,
    dwx: Tensor | None,
    scratch: Scratch,
) -> tuple[Tensor | None, Tensor]:
    """Run in one launch. Returns the parts of the gradients of h0 and c0 that bypass W_h.

    The former is None if no gradient bypasses W_h: without lengths and zoneout.
    """
    plan, doutput, last = call.plan, incoming.output, incoming.states
    kept, rows = _addresses(call, r)
    at = scratch.at | kept | call.addresses(weight)
    zero_states = last[0] is None and last[1] is None
    if zero_states:
        dh, dc = (scratch.part(name, *call.lead, call.B, call.H) for name in ("dh", "dc"))
    else:
        dh, dc = (_copied(call, grad) for grad in last)
        at["dh"], at["dc"] = dh.data_ptr(), dc.data_ptr()
    assert r.cs is not None
    assert r.wh is not None
    at["cs"], at["wh"], at["da"] = r.cs.data_ptr(), r.wh.data_ptr(), da.data_ptr()
    if dwx is not None:
        at["dwx"] = dwx.data_ptr()
    if doutput is not None:
        at["doutput"] = call.address(doutput.contiguous())
    with device_of(call.term):
        begin_backward(call, weight, at, scratch, zero_states, lambda: _moments(call, r))
        if r.inputs is not None:  # replaces var_x by the variance of the feature
            at |= call.inputs_at(r.inputs)
        if plan.raises:
            at["var_h"], at["var_c"] = scratch.at["var_h"], scratch.at["var_c"]
        if plan.transposes:
            at["weight"] = scratch.at["weight"]
        launch = cuda_kernels.launch_for("backward", call, at, rows, doutput is not None)
        launch.kernel.launch(launch.grid, launch.arguments)
    through = call.a.lengths is None and not plan.zoned
    return None if through else dh, dc


def _in_steps(
    call: LSTMCall,
    r: Saved,
    incoming: Incoming,
    da: Tensor,
    dwx: Tensor,
    sums: _Sums,
) -> tuple[Tensor | None, Tensor]:
    """Like `_in_cuda`, step by step."""
    wx, doutput = call.wx, incoming.output
    moments = _raised(call, _moments(call, r))
    da, dwx = da.view(wx.shape), dwx.view(wx.shape)
    dh, dc = (_copied(call, grad) for grad in incoming.states)
    dy = None if doutput is None else doutput.contiguous()
    assert r.cs is not None
    assert r.wh is not None
    step_launches.backward(call, moments, r.cs, r.wh, dy, dh, dc, da, dwx, sums.parts())
    through = call.a.lengths is None and not call.plan.zoned
    return None if through else dh, dc


def _copied(call: LSTMCall, grad: Tensor | None) -> Tensor:
    """A writable float32 copy of the gradient of a last state; zeros if it is None."""
    full: dict[str, Any] = {"dtype": torch.float32, "device": call.term.device}
    if grad is None:
        return torch.zeros(*call.lead, call.B, call.H, **full)
    return grad.to(copy=True, memory_format=torch.contiguous_format, **full)


def _multiplied_as_by_kernels(call: LSTMCall) -> contextlib.AbstractContextManager[None]:
    """Use tf32 for float32 products if the kernels did; otherwise keep PyTorch's setting."""
    if call.term.is_cuda and call.term.dtype == torch.float32 and call.a.tf32:
        return multiplied_in_tf32(True)
    return _AS_BEFORE


def _through_weight(call: LSTMCall, da: Tensor, weight: Tensor, r: Saved) -> tuple[Tensor, Tensor]:
    """The gradient of W_h, and the part of h0's gradient that flows through W_h.

    The rows of the former are ordered unit by unit if the columns of da are, see `Plan.by_unit`.
    """
    first = _rows_of(da, 1)
    if r.hidden is not None:
        before = _rows_of(r.hidden, call.T)
        dweight = _product(call, columns_of(da, 0, call.T), before)
    else:
        h0 = call.in_rows(call.a.h0)
        h0 = aligned(h0 if h0.dtype == da.dtype else h0.to(da.dtype))
        dweight = _product(call, first.transpose(-2, -1), h0)
        if call.T > 1:
            assert r.output is not None
            before = _rows_of(r.output, call.T - 1)
            add = torch.baddbmm if call.lead else torch.addmm
            dweight = add(dweight, columns_of(da, 1, call.T - 1), before)
    if call.plan.by_unit:
        first = first.unflatten(-1, (call.H, 4)).transpose(-2, -1).flatten(-2)
    return dweight, _product(call, first, weight)


def by_gate(dweight: Tensor, hidden: int) -> Tensor:
    """Reorder rows ``[..., 4H, H]`` from unit by unit to gate by gate."""
    result: Tensor = dweight.unflatten(-2, (hidden, 4)).transpose(-3, -2).flatten(-3, -2)
    return result


def _product(call: LSTMCall, a: Tensor, b: Tensor) -> Tensor:
    """``a b``, batched over the recurrences if there are several; cheaper to call than `matmul`."""
    return torch.bmm(a, b) if call.lead else torch.mm(a, b)


def _rows_of(x: Tensor, count: int) -> Tensor:
    """The first `count` steps of x ``[..., T, B, F]``, contiguous, as rows ``[..., T' * B, F]``."""
    *lead, _, B, F = x.shape
    *strides, _, row, one = x.stride()
    return x.as_strided((*lead, count * B, F), (*strides, row, one), x.storage_offset())


def columns_of(x: Tensor, first: int, count: int) -> Tensor:
    """`count` steps of x ``[..., T, B, F]``, contiguous, as columns ``[..., F, T' * B]``."""
    *lead, _, B, F = x.shape
    *strides, rows, _, _ = x.stride()
    begin = x.storage_offset() + first * rows
    return x.as_strided((*lead, F, count * B), (*strides, 1, F), begin)
