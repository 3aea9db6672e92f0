"""The LSTM's backward pass on the GPU, from tensors to kernel launches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.definition import LSTMArguments
from rbn.ops.gpu.lstm import cuda_kernels, families
from rbn.ops.gpu.lstm.constant_terms import raised_variances
from rbn.ops.gpu.lstm.joined import Saved, factors_of, join
from rbn.ops.gpu.lstm.kernel_arguments import FAR, LSTMCall, aligned, laid_out, rows_of
from rbn.ops.gpu.lstm.persistent.backward_kernel import lstm_backward
from rbn.ops.gpu.lstm.persistent.tiles import power_of_two
from rbn.ops.gpu.lstm.plan import Plan, plan_for
from rbn.ops.gpu.lstm.prepare_kernels import finish
from rbn.ops.gpu.lstm.steps import step_launches
from rbn.ops.gpu.runtime.driver import device_of
from rbn.ops.gpu.runtime.launch_cache import launch_by_key
from rbn.ops.gpu.runtime.precision import multiplied_in_tf32
from rbn.ops.input_term import without_padding
from rbn.ops.operator import Incoming
from rbn.ops.types import valid_steps

log = logging.getLogger("rbn.ops.gpu")

_AS_BEFORE = contextlib.nullcontext()
_BLOCK, _UNITS = 512, 32  # sums, and columns of states, per program of `finish`
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
    gradients lie at the end of the memory, so that those of step t overwrite only the saved values
    of later steps. Every block has read those before any block can start step t. That does not hold
    if the blocks do not all wait for each other; see `Plan.lockstep`.
    """
    size, kept, numbers = call.term.numel(), call.plan.saved[1], wh.numel()
    if numbers == kept:  # a view from the custom operator; its storage may be larger
        numbers = wh.untyped_storage().nbytes() // wh.element_size()
    begin = (numbers - size) // 8 * 8  # a multiple of 16 bytes
    alone = call.R == 1 and call.plan.lockstep
    if not alone or wh.storage_offset() or begin < kept + call.B * 4 * call.H - size:
        return None
    strides = (size, call.B * 4 * call.H, 4 * call.H, 1)
    return wh.as_strided(call.term.shape, strides[-call.term.dim() :], begin)


class _Sums:
    """One float32 buffer for the gradients of `VECTORS`, and of w if there is one.

    Each part starts at a multiple of 16 bytes, as the kernels require.
    """

    def __init__(self, call: LSTMCall) -> None:
        n = call.R * call.H
        padded = -(-n // 4) * 4
        self.sizes = [4 * n] * 3 + [padded] * 2
        if call.w is not None:
            self.sizes.append(4 * n)
        new = torch.empty if call.in_cuda else torch.zeros
        self.memory = new(sum(self.sizes), dtype=torch.float32, device=call.term.device)

    def parts(self) -> list[Tensor]:
        return list(self.memory.split(self.sizes))

    def at(self) -> dict[str, int]:
        """The addresses of the parts, by their names in the kernels."""
        begin, n, padded = self.memory.data_ptr(), 4 * self.sizes[0], 4 * self.sizes[3]
        results = {
            "dbias": begin,
            "dgamma_x": begin + n,
            "dgamma_h": begin + 2 * n,
            "dgamma_c": begin + 3 * n,
            "dbeta_c": begin + 3 * n + padded,
        }
        if len(self.sizes) > len(results):
            results["dwx"] = begin + 3 * n + 2 * padded
        return results

    def gradients(self, call: LSTMCall) -> list[Tensor | None]:
        """The parts in the dtypes and shapes of the parameters; None for absent parameters."""
        memory, types = self.memory, {v.dtype for v in self._parameters(call) if v is not None}
        if len(types) == 1 and memory.dtype not in types:  # round all of them at once
            memory = memory.to(next(iter(types)))
        return self._fitted(call, memory.split_with_sizes(self.sizes))

    def with_states(
        self, call: LSTMCall, dh0: Tensor, dh: Tensor | None, dc: Tensor
    ) -> list[Tensor | None] | None:
        """`gradients`, then those of the initial states that all rows share, in one launch.

        Returns None if the launch does not cover the call: for Triton kernels, mixed dtypes, or
        initial states that differ between rows. dh0: the part of h0's gradient that goes through
        W_h. dh: the part that does not, in float32, if any. dc: the gradient of c0, in float32.
        """
        a = call.a
        types = {v.dtype for v in (*self._parameters(call), a.h0, a.c0) if v is not None}
        if not call.in_cuda or len(types) > 1 or not (call.shared(a.h0) and call.shared(a.c0)):
            return None
        count, units = self.memory.numel(), call.R * call.H
        out = torch.empty(count + 2 * units, dtype=next(iter(types)), device=dc.device)
        tensors = (self.memory, dh0, dc if dh is None else dh, dc, out)

        def arguments() -> Any:
            return (
                (max(-(-count // _BLOCK), -(-units // _UNITS)), 1),
                tensors,
                (count, units, call.B, call.H),
                {
                    "MORE": dh is not None,
                    "ROWS": min(128, power_of_two(call.B)),
                    "UNITS": _UNITS,
                    "BLOCK": _BLOCK,
                },
            )

        known = (count, units, call.B, call.H, dh is None, dh0.dtype, out.dtype)
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        launch_by_key(finish, known, addresses, arguments, out)
        *parts, of_h, of_c = out.split_with_sizes([*self.sizes, units, units])
        states = (of_h, of_c) if not call.lead else (of_h.view(a.h0.shape), of_c.view(a.c0.shape))
        return [*self._fitted(call, parts), *states]

    def _parameters(self, call: LSTMCall) -> list[Tensor | None]:
        a = call.a
        given = [a.bias, a.gamma_x, a.gamma_h, a.gamma_c, a.beta_c]
        return given if call.w is None else [*given, call.w]

    def _fitted(self, call: LSTMCall, parts: Sequence[Tensor]) -> list[Tensor | None]:
        results: list[Tensor | None] = []
        given = self._parameters(call)
        for parameter, part, size in zip(given, parts, self.sizes, strict=True):
            if parameter is None:
                results.append(None)
                continue
            if size != parameter.numel():
                part = part.narrow(0, 0, parameter.numel())
            if part.dtype != parameter.dtype:
                part = part.to(parameter.dtype)
            results.append(part.view(parameter.shape) if parameter.dim() > 1 else part)
        return results


def _gradients(call: LSTMCall, r: Saved, incoming: Incoming) -> list[Any]:
    """Gradients of the input term (of W_x with one feature), then of `_NAMES`; None if absent."""
    a, wx, w = call.a, call.term, call.w
    doutput, last = incoming.output, incoming.states
    assert r.wh is not None
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "lstm backward R=%d T=%d B=%d H=%d %s: %s",
            *(call.R, call.T, call.B, call.H, wx.dtype, call.path),
        )
    polls = call.in_cuda and call.plan.polls["backward"]
    da = _consumed(call, r.wh) if incoming.consume and not polls else None
    if polls:  # it must start as EMPTY, so it needs memory of its own
        bits = torch.int16 if wx.dtype != torch.float32 else torch.int32
        da = torch.full(wx.shape, -1, dtype=bits, device=wx.device).view(wx.dtype)
    elif da is None:
        da = wx.new_empty(wx.shape)
    shared = a.norm == "none" or call.plan.joint  # both terms have the same gradient
    dwx = None if w is not None else da if shared else torch.empty_like(wx)
    sums = _Sums(call)
    moments = _moments(call, r)
    weight = a.weight_hh if a.weight_hh.dtype == wx.dtype else a.weight_hh.to(wx.dtype)
    weight = aligned(weight)
    if call.in_cuda:
        dh, dc = _in_cuda(call, r, moments, weight, doutput, last, da, dwx, sums)
    else:
        assert dwx is not None
        dh, dc = _in_triton(call, r, moments, weight, doutput, last, da, dwx, sums)

    if call.plan.sequence and dwx is not None:
        _sequence_backward(call, r, dwx.view(call.wx.shape), *sums.parts()[:2])
    apart = shared or not (call.in_cuda and call.family == cuda_kernels.CLUSTER)
    with _multiplied_as_by_kernels(call):
        dweight, dh0 = _through_weight(call, da, weight, r, apart)
    if dweight.dtype != a.weight_hh.dtype:
        dweight = dweight.to(a.weight_hh.dtype)
    result = sums.with_states(call, dh0, dh, dc)
    if result is None:
        result = sums.gradients(call)
        if dh is not None:
            dh0 = dh + dh0.to(torch.float32)
        states = [_of_state(call, d, state) for d, state in ((dh0, a.h0), (dc, a.c0))]
        first = result.pop() if dwx is None else dwx
        return [first, dweight, *result, *states]
    first = dwx if w is None else result.pop(len(result) - 3)
    return [first, dweight, *result]


def _of_state(call: LSTMCall, gradient: Tensor, state: Tensor) -> Tensor:
    """The gradient in the dtype of an initial state, summed over the rows if they share it."""
    if gradient.dtype != state.dtype:
        gradient = gradient.to(state.dtype)
    return gradient.sum(-2) if call.shared(state) else gradient


def _moments(call: LSTMCall, r: Saved) -> list[Tensor | None]:
    """The statistics that the backward kernels normalize with."""
    a = call.a
    own = [r.mean_x, r.var_x, r.mean_h, r.var_h, r.mean_c, r.var_c]
    moments = call.population() if a.population else own
    if a.batch_stats:
        var_x, var_h, var_c = moments[1::2]
        assert var_h is not None
        h0, c0 = [None if call.shared(s) else s for s in (a.h0, a.c0)]
        masked = a.mask_c is not None or a.mask_h is not None
        lengths = None if a.lengths is None else call.lengths
        moments[3], moments[5] = raised_variances(
            (h0, c0), a.input, var_x, var_h, var_c, a.eps, masked, lengths, call.plan.include
        )
    return moments


def _in_cuda(
    call: LSTMCall,
    r: Saved,
    moments: list[Tensor | None],
    weight: Tensor,
    doutput: Tensor | None,
    last: tuple[Tensor | None, ...],
    da: Tensor,
    dwx: Tensor | None,
    sums: _Sums,
) -> tuple[Tensor | None, Tensor]:
    """Run in one launch. Returns the parts of the gradients of h0 and c0 that bypass W_h.

    The former is None if every row goes through every product.
    """
    wx = call.term
    at = call.addresses(cuda_kernels.backward_weight(call, weight))
    at |= call.moments_at(moments)
    at |= sums.at()
    n, alone = call.R * call.B * call.H, last[0] is None and last[1] is None
    own = -(-n // 4) * 16  # bytes of the gradient of a last state
    zeroed = call.plan.zeroed["backward"]
    if alone:
        zeroed = {"dh": own, "dc": own, "": 4 * FAR} | zeroed
    zeros = torch.zeros(sum(zeroed.values()) // 4, dtype=torch.float32, device=wx.device)
    at |= laid_out(zeroed, zeros.data_ptr())
    if not alone:
        dh, dc = (_copied(call, grad) for grad in last)
        at["dh"], at["dc"] = dh.data_ptr(), dc.data_ptr()
    assert r.cs is not None
    assert r.wh is not None
    at["cs"], at["wh"] = r.cs.data_ptr(), r.wh.data_ptr()
    at["da"] = da.data_ptr()
    if dwx is not None:
        at["dwx"] = dwx.data_ptr()
    if r.inputs is not None:
        at |= call.inputs_at(r.inputs)
    if doutput is not None:
        at["doutput"] = call.address(doutput.contiguous())
    rows, has_doutput = rows_of(moments), doutput is not None
    with device_of(call.term):
        launch = cuda_kernels.launch_for("backward", call, at, rows, has_doutput)
        launch.kernel.launch(launch.grid, launch.arguments)
    through = call.a.lengths is None and not call.plan.zoned
    if alone:
        shape = (*call.lead, call.B, call.H)
        strides = (call.B * call.H, call.H, 1)[-len(shape) :]
        dc = zeros.as_strided(shape, strides, own // 4)
        return None if through else zeros.as_strided(shape, strides), dc
    return None if through else dh, dc


def _in_triton(
    call: LSTMCall,
    r: Saved,
    moments: list[Tensor | None],
    weight: Tensor,
    doutput: Tensor | None,
    last: tuple[Tensor | None, ...],
    da: Tensor,
    dwx: Tensor,
    sums: _Sums,
) -> tuple[Tensor | None, Tensor]:
    """Like `_in_cuda`, in one launch or in one per step."""
    a, T, B, wx = call.a, call.T, call.B, call.wx
    da, dwx = da.view(wx.shape), dwx.view(wx.shape)
    dh, dc = (_copied(call, grad) for grad in last)
    through = a.lengths is None and not call.plan.zoned
    if call.path == families.STEPS:
        dy = None if doutput is None else doutput.contiguous()
        assert r.cs is not None
        assert r.wh is not None
        step_launches.backward(call, moments, r.cs, r.wh, dy, dh, dc, da, dwx, sums.parts())
        return None if through else dh, dc
    barrier = torch.zeros(call.R, dtype=torch.int32, device=wx.device)
    tiles, transposed = call.tiles, weight.transpose(-2, -1).contiguous()
    flags = {"K": tiles.k_backward, "HAS_DOUTPUT": doutput is not None}
    vectors, masks = call.vectors(), call.masks()
    pieces = [(T - 1, T)] if tiles.persistent else [(t, 1) for t in range(T - 1, -1, -1)]
    for first, steps in pieces:
        arguments = [
            wx,
            transposed,
            *vectors,
            *(call.empty if m is None else m for m in (*moments[:2], *moments[3:])),
            r.cs,
            r.wh,
            call.lengths,
            call.inv_n,
            *masks,
            call.empty if doutput is None else doutput.contiguous(),
            dh,
            dc,
            da,
            dwx,
            *sums.parts(),
            barrier,
            first,
            steps,
            T,
            B,
            *rows_of(moments),
            a.rate_c,
            a.rate_h,
            a.eps,
        ]
        call.launch(lstm_backward, arguments, flags, tiles.warps_backward, tiles.stages_backward)
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


def _through_weight(
    call: LSTMCall, da: Tensor, weight: Tensor, r: Saved, apart: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of W_h, and the part of h0's gradient that goes through W_h.

    apart: whether the columns of da are ordered gate by gate, like the rows of W_h; otherwise they
    are ordered unit by unit.
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
    if not apart:
        dweight = dweight.unflatten(-2, (call.H, 4)).transpose(-3, -2).flatten(-3, -2)
        first = first.unflatten(-1, (call.H, 4)).transpose(-2, -1).flatten(-2)
    return dweight, _product(call, first, weight)


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


def _sequence_backward(
    call: LSTMCall, r: Saved, dwx: Tensor, dbias: Tensor, dgamma_x: Tensor
) -> None:
    """Add the contribution of sequencewise statistics to the input term's gradient, in place."""
    a, wide = call.a, (call.R, 1, 1, 4 * call.H)
    assert r.mean_x is not None
    assert r.var_x is not None
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
