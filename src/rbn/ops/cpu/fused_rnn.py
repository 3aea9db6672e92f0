"""The fused batch-normalized simple RNN and GRU, with a backward pass derived by hand.

Structured like `rbn.ops.cpu.fused_lstm`, with one nonlinearity or `Gates`, and without a cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rbn.ops.cpu.fused_gru import Gates
from rbn.ops.cpu.layout import Buffers, Layout, moments_of, restore_moments
from rbn.ops.cpu.norms import BatchNorm
from rbn.ops.cpu.transition import Transition
from rbn.ops.definition import RNNArguments
from rbn.ops.identical_rows import identical_steps, variance
from rbn.ops.types import CONSTANT

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_relu_backward = torch.ops.aten.threshold_backward.grad_input


class Saved(NamedTuple):
    """The tensors that the backward pass needs; None if absent, or if nothing is saved."""

    wx: Tensor | None  # the input term, if the call computed it
    output: Tensor | None  # the output, if it holds the states
    mean_x: Tensor | None
    rstd_x: Tensor | None
    mean_h: Tensor | None
    rstd_h: Tensor | None
    wh: Tensor | None  # [T * B, G]
    phi: Tensor | None  # nonlinearity's values [T * B, H] unless they are the states; or `Gates`'
    hidden: Tensor | None  # [T * B, H], if it is not the output


class _Plan:
    """Objects that both the forward and the backward pass derive from the arguments."""

    def __init__(self, a: RNNArguments) -> None:
        self.layout = layout = Layout(a)
        gamma_x, gamma_h = layout.cast(a.gamma_x), layout.cast(a.gamma_h)
        bias, pop_x, pop_h = layout.optional(a.bias), (a.mean_x, a.var_x), (a.mean_h, a.var_h)
        self.gates = Gates(a, layout) if a.gated else None
        beta = bias if self.gates is None else self.gates.beta_h
        norm_x = layout.input_norm("batch", gamma_x, a.eps, pop_x, a.input_stats)
        norm_h = layout.norm("batch", gamma_h, beta, a.eps, pop_h)
        self.norms = norm_x, norm_h
        self.transition = Transition(layout, a.input, a.weight_hh, a.bias, norm_x, norm_h)
        if self.gates is not None:
            self.gates.transition = self.transition
        self.zoneout_h = layout.zoneout(a.mask_h, a.rate_h)


def forward(a: RNNArguments) -> tuple[Tensor, tuple[Tensor], Saved]:
    """Run the recurrence over all steps."""
    plan = _Plan(a)
    layout, transition, zoneout_h = plan.layout, plan.transition, plan.zoneout_h
    packing, like, H = layout.packing, transition.wx, layout.hidden
    h = layout.state(a.h0)

    buffers = Buffers(packing, like, a.save)
    transition.start(buffers)
    hidden = packing.buffer(H, like)
    hs = phis = packing.split(hidden)
    phi = None
    if zoneout_h.active:
        phi = packing.buffer(H, like)
        phis = packing.split(phi)
    if plan.gates is not None:
        phi = buffers.make(4 * H)
        gates = buffers.views(phi)

    for t, n in enumerate(packing.sizes):
        h = h[:n]
        if plan.gates is not None:
            plan.gates.forward(t, gates[t], h, phis[t])
        else:
            transition.forward(t, h, phis[t])
            phis[t].tanh_() if a.nonlinearity == "tanh" else phis[t].relu_()
        if zoneout_h.active:
            zoneout_h.forward(t, h, phis[t], hs[t])
        h = hs[t]

    output = layout.padded(hidden).to(a.input.dtype)
    h_n = packing.final(hidden).to(a.input.dtype)
    own_hidden = output.data_ptr() != hidden.data_ptr()
    saved: list[Tensor | None] = [None] * 3
    if a.save:
        saved = [transition.wh, phi, hidden if own_hidden else None]
    kept = None if own_hidden or not a.save else output
    return (
        output,
        (h_n,),
        Saved(None, kept, *moments_of(plan.norms, packing.steps), *saved),
    )


def _identical_states(
    identical: Sequence[bool], states: Sequence[Tensor], eps: float
) -> list[bool]:
    """The steps in which the rows of the previous states ``[B, H]`` are still identical.

    Normalizing with a small variance magnifies differences, so terms that count as constant can
    produce states that do not.
    """
    result = list(identical)
    for t in range(1, min(len(result), len(states) + 1)):  # no row reaches later steps
        var = states[t - 1].var(0, correction=0)
        result[t] = result[t] and result[t - 1] and bool((var <= CONSTANT * eps).all())
        if not result[t]:
            return result[:t] + [False] * (len(result) - t)
    return result


def backward(
    a: RNNArguments, r: Saved, doutput: Tensor | None, dh_n: Tensor | None
) -> dict[str, Tensor | None]:
    """The gradients of all differentiable tensors, from those of the two results."""
    plan = _Plan(a)
    layout, transition, zoneout_h = plan.layout, plan.transition, plan.zoneout_h
    packing, H = layout.packing, layout.hidden
    restore_moments(plan.norms, (r.mean_x, r.rstd_x, r.mean_h, r.rstd_h))
    norm_h = plan.norms[1]
    h0 = layout.state(a.h0)
    kept = r.output if r.hidden is None else r.hidden
    assert kept is not None
    hidden = kept.reshape(-1, H)
    states = packing.split(hidden)
    if isinstance(norm_h, BatchNorm):
        assert r.rstd_x is not None
        assert r.rstd_h is not None
        before, _ = identical_steps(
            (a.h0,),
            a.input,
            variance(r.rstd_x, a.eps),
            variance(r.rstd_h, a.eps),
            None,
            a.eps,
            a.mask_h is not None,
            a.lengths,
            a.padding == "include",
        )
        constant = (r.rstd_h.square() * a.eps > 1 - CONSTANT).all(-1).tolist()
        identical = _identical_states(before.tolist(), states, a.eps)
        # A term counts as constant only if all its features do.
        norm_h.identical = [both and all_ for both, all_ in zip(identical, constant, strict=True)]
    phis = states if r.phi is None else packing.split(r.phi)

    transition.start_backward(r.wh)
    dys = layout.output_gradients(doutput)
    dh = layout.state_gradient(dh_n, h0)
    for t in range(len(packing.sizes) - 1, -1, -1):
        dh_t = dh[: packing.sizes[t]]
        dpre = transition.gradient_buffer(t)
        if dys is not None:
            dh_t += dys[t]
        dh_new, dh_kept = zoneout_h.backward(t, dh_t) if zoneout_h.active else (dh_t, None)
        if plan.gates is not None:
            h = (h0 if t == 0 else states[t - 1])[: len(dh_t)]
            plan.gates.backward(t, phis[t], h, dh_new, dh_t)
        else:
            if a.nonlinearity == "tanh":
                _tanh_backward(dh_new, phis[t], grad_input=dpre)
            else:
                _relu_backward(dh_new, phis[t], 0, grad_input=dpre)
            transition.backward(t, dpre, dh_t)
        if dh_kept is not None:
            dh_t += dh_kept

    dwx, dweight, dbias, dgamma_x, dgamma_h = transition.finish_backward(hidden, h0)
    dbeta = None
    if plan.gates is not None and dbias is not None:
        dbias, dbeta = plan.gates.dbias, dbias[-H:].clone()
    vectors = {"bias": dbias, "gamma_x": dgamma_x, "gamma_h": dgamma_h, "beta_n": dbeta}
    return layout.gradients(a, dwx, dweight, **vectors, h0=dh)
