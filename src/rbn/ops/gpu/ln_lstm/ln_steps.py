"""The layer-normalized LSTM step by step, for calls that `ln_single` does not cover.

Each step is a matrix product and one kernel, whose programs own one or a few rows. Work that is not
recurrent is done for all steps at once, after the loop: the backward pass of the input term's
normalization, the sums for gamma and bias, the weight gradient.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rbn.ops.definition import LSTM, VECTORS, LSTMArguments
from rbn.ops.gpu.ln_lstm import ln_kernels as kernels
from rbn.ops.gpu.lstm.prepare import padded_factors
from rbn.ops.gpu.runtime.device import power_of_two
from rbn.ops.gpu.runtime.launch_cache import RepeatedLaunch, launch_cached
from rbn.ops.gpu.stepwise import StepCall, factor, products, weight_gradient, zone
from rbn.ops.input_term import through_term, with_term
from rbn.ops.operator import Incoming, Results

log = logging.getLogger("rbn.ops.gpu")

LARGEST = 8192  # hidden units: a program keeps all gates of a row in registers
_KEPT = kernels.KEPT.value
# The least number of elements of a gate per program: short rows share a program.
_TILE, _TILE_INTERPRETED = 128, 4096


class Saved(NamedTuple):
    """The tensors that the backward pass needs; None if absent, or if nothing is saved."""

    wx: Tensor | None = None  # the input term and its factors, if the call computed them
    x: Tensor | None = None
    w: Tensor | None = None
    output: Tensor | None = None
    centered: Tensor | None = None  # [T, B, 4H]: W_h h minus its mean
    cs: Tensor | None = None  # [T + 1, B, H] float32
    moments: Tensor | None = None  # [T, B, 5] float32
    states: Tensor | None = None  # [T + 1, B, H]: h0 and h after each step, instead of the output
    vectors: Tensor | None = None  # see `Call`


class Call(StepCall):
    """Sizes, modes and tensors, in the form that the kernels take.

    Attributes:
        joined: the parameters `VECTORS`, concatenated in float32; zeros for an absent bias.
        vectors: views of its parts.
    """

    def __init__(self, a: LSTMArguments, joined: Tensor | None = None) -> None:
        super().__init__(a.input, a.lengths)
        self.a, self.H = a, a.input.shape[2] // 4
        if joined is None:
            given = [getattr(a, name) for name in VECTORS]
            if given[0] is None:
                given[0] = torch.zeros_like(given[1])
            joined = torch.cat(given).to(torch.float32)
        self.joined = joined
        self.vectors = list(joined.split([4 * self.H] * 3 + [self.H] * 2))
        self.masks = [self.mask(a.mask_c), self.mask(a.mask_h)]
        # Triton would specialize the kernel for integers.
        self.rates = float(a.rate_c), float(a.rate_h)
        units = power_of_two(self.H)
        tile = _TILE if a.input.is_cuda else _TILE_INTERPRETED
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
        """The number of programs for this many rows."""
        return (-(-rows // self.rows),)


def fake(a: LSTMArguments) -> Results:
    """Empty tensors with the shapes and dtypes of the results of one call."""
    (T, B), H, dtype = a.input.shape[:2], a.weight_hh.shape[1], a.input.dtype

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return a.input.new_empty(shape, dtype=dtype)

    saved = Saved()
    if a.save:
        saved = Saved(
            wx=None if a.weight_ih is None else new(T, B, 4 * H, dtype=dtype),
            centered=new(T, B, 4 * H, dtype=dtype),
            cs=new(T + 1, B, H),
            moments=new(T, B, _KEPT),
        )
    states = new(B, H, dtype=dtype), new(B, H, dtype=dtype)
    return Results(new(T + 1, B, H, dtype=dtype)[1:], states, (None,) * 6, saved)


def forward(given: LSTMArguments, separate: bool) -> Results:
    """Run the recurrence over all steps. separate: whether no two results may share memory."""
    a: LSTMArguments
    a, kept = with_term(LSTM, given, make_factors=padded_factors)
    if separate:  # the factors may be views of one buffer
        kept.update(x=None, w=None)
    call = Call(a)
    T, B, H, wx = call.T, call.B, call.H, call.wx
    log.debug("ln_lstm forward T=%d B=%d H=%d %s: a kernel for each step", T, B, H, wx.dtype)
    hs = call.new(T + 1, B, H, dtype=wx.dtype)
    hs[0] = a.h0
    cs = call.new(T + 1 if a.save else 1, B, H)
    cs[0] = a.c0
    centered = call.new(T if a.save else 0, B, 4 * H, dtype=wx.dtype)
    moments = input_moments(call)
    h_n = call.state(a.h0) if a.lengths is not None else call.empty
    weight = factor(a.weight_hh, wx).t()
    wh = call.new(B, 4 * H)
    tensors = [wh, wx, *call.vectors, hs, cs, centered, moments, h_n, call.lengths, *call.masks]
    step = RepeatedLaunch(
        kernels.ln_lstm_step, call.grid(B), tensors, call.flags | {"SAVE": a.save}
    )
    with torch.cuda.device_of(wx):
        multiply = products(hs, weight, wh)
        for t, h in enumerate(hs[:T].unbind()):
            multiply(h)
            step(t, B, *call.rates, float(a.eps))
    output, h_n = hs[1:], hs[T].clone() if a.lengths is None else h_n.to(wx.dtype)
    saved = Saved()
    if a.save:
        saved = Saved(**kept, output=output, centered=centered, cs=cs, moments=moments)
    return Results(output, (h_n, cs[-1].to(wx.dtype, copy=True)), (None,) * 6, saved)


def backward(given: LSTMArguments, r: Saved, incoming: Incoming) -> dict[str, Tensor | None]:
    """The gradients of all differentiable tensors, by name."""
    a: LSTMArguments
    a, _ = with_term(LSTM, given, r.wx)
    doutput, (dh_n, dc_n) = incoming.output, incoming.states
    assert r.output is not None
    assert r.centered is not None
    assert r.cs is not None
    assert r.moments is not None
    call = Call(a)
    T, B, H, wx = call.T, call.B, call.H, call.wx
    log.debug("ln_lstm backward T=%d B=%d H=%d %s: a kernel for each step", T, B, H, wx.dtype)
    rows, through = call.zeros(4, B, H), call.zeros(B, H)
    dh, dc, dgamma_c, dbeta_c = rows.unbind()
    for state, incoming_state in ((dh, dh_n), (dc, dc_n)):
        if incoming_state is not None:
            state.copy_(incoming_state)
    da, dwx = torch.empty_like(wx), torch.empty_like(wx)
    weight = factor(a.weight_hh, wx)
    tensors = [wx, *call.vectors, r.cs, r.centered, r.moments, call.lengths, *call.masks]
    tensors += [call.empty if doutput is None else doutput.contiguous()]
    tensors += [through, dh, dc, da, dwx, dgamma_c, dbeta_c]
    flags = call.flags | {"HAS_DOUTPUT": doutput is not None}
    step = RepeatedLaunch(kernels.ln_lstm_step_backward, call.grid(B), tensors, flags)
    steps = da.unbind()
    with torch.cuda.device_of(wx):
        multiply = products(da, weight, through)
        for t in range(T - 1, -1, -1):
            step(t, B, *call.rates)
            multiply(steps[t])
    dh += through
    dweight = weight_gradient(da, a.h0, r.output).to(a.weight_hh.dtype)
    return gradients(call, given, r, dwx, rows, dweight, incoming.input, separate=True)


def input_moments(call: Call) -> Tensor:
    """The statistics of each row and step ``[T, B, 5]``, with only the input term's filled in."""
    n = call.T * call.B
    moments = call.new(call.T, call.B, _KEPT)
    tensors = (call.wx, call.lengths, moments)
    numbers = (call.B, n, float(call.a.eps))
    _launch(kernels.ln_input_moments, (*call.grid(n), 1), tensors, numbers, call.row)
    return moments


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    flags: dict[str, Any],
) -> None:
    """Launch a kernel that does not run in every step."""
    wx = tensors[0]
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    launch_cached(kernel, grid, addresses, lambda: tensors, numbers, flags, (wx.dtype,), wx)


def gradients(
    call: Call,
    given: LSTMArguments,
    r: Saved,
    dwx: Tensor,
    rows: Tensor,
    dweight: Tensor,
    needs_input: bool,
    separate: bool,
) -> dict[str, Tensor | None]:
    """All gradients by name, in the dtypes of the arguments.

    given: the original arguments. dwx: the gradient of the pre-activations, ``[T, B, 4H]``;
    overwritten. rows: each row's gradients of h0, c0, gamma_c and beta_c, ``[4, B, H]``. separate:
    whether no two gradients may share memory.
    """
    sums = _parameter_sums(call, r, dwx)
    _input_backward(call, r, dwx)
    results = through_term(given, {"input": dwx, "weight_hh": dweight}, needs_input, r.x, r.w)
    of_rows = rows.sum(1)
    parts = {
        ("bias", "gamma_x", "gamma_h"): sums,
        ("gamma_c", "beta_c"): of_rows[2:],
        ("h0", "c0"): of_rows[:2] if given.h0.dim() == given.c0.dim() == 1 else rows[:2],
    }
    for names, values in parts.items():
        own = [getattr(given, name) for name in names]
        kinds = {v.dtype for v in own if v is not None}
        # One conversion for all, because launches dominate the time of short sequences.
        values = values.to(kinds.pop()) if len(kinds) == 1 else values
        for name, v, gradient in zip(names, own, values.unbind(), strict=True):
            if v is not None:
                gradient = gradient.sum(0) if gradient.dim() > v.dim() else gradient
                results[name] = gradient.to(v.dtype, copy=separate)
            else:
                results[name] = None
    return results


def _parameter_sums(call: Call, r: Saved, dpre: Tensor) -> Tensor:
    """The gradients of bias, gamma_x and gamma_h, ``[3, 4H]``; deterministic.

    dpre: the gradient of the pre-activations, ``[T, B, 4H]``.
    """
    rows, columns, F = 32, 64, 4 * call.H
    n = call.T * call.B
    programs = min(32, -(-n // (4 * rows)))
    sums = call.new(programs, 3, F)
    assert r.centered is not None
    assert r.moments is not None
    tensors = (call.wx, r.centered, dpre, r.moments, call.lengths, sums)
    flags = {
        "F": F,
        "ROWS": rows,
        "COLUMNS": columns,
        "LENGTHS": call.a.lengths is not None,
    }
    grid, numbers = (-(-F // columns), programs), (call.B, n, -(-n // programs))
    _launch(kernels.ln_parameter_sums, grid, tensors, numbers, flags)
    return sums.sum(0)


def _input_backward(call: Call, r: Saved, dwx: Tensor) -> None:
    """Turn the gradient of the pre-activations into that of wx ``[T, B, 4H]``, in place."""
    assert r.moments is not None
    tensors = (call.wx, call.vectors[1], r.moments, call.lengths, dwx)
    n = call.T * call.B
    _launch(kernels.ln_input_backward, (*call.grid(n), 1), tensors, (call.B, n), call.row)
