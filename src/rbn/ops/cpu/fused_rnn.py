"""The batch-normalized simple RNN fused, with the backward pass derived by hand.

The same plan as in `rbn.ops.cpu.fused_lstm`, with one nonlinearity and no cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rbn.ops.arguments import alike_of
from rbn.ops.cpu.layout import Layout, Rooms, like_parameter, moments_of, restore_moments
from rbn.ops.cpu.norms import BatchNorm
from rbn.ops.cpu.transition import Transition
from rbn.ops.types import CONSTANT

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_relu_backward = torch.ops.aten.threshold_backward.grad_input


class Inputs(NamedTuple):
    """The arguments of the operator, in its order. See `rbn.ops.bn_rnn` for their meaning."""

    wx: Tensor
    weight_hh: Tensor
    bias: Tensor | None
    gamma_x: Tensor
    gamma_h: Tensor
    h0: Tensor
    lengths: Tensor | None
    population: list[Tensor]  # mean, var of x and h; [] = those of the batch
    mask_h: Tensor | None
    rate_h: float
    eps: float
    input_stats: str
    padding: str
    nonlinearity: str
    save: bool  # keep what the backward pass needs


class Outputs(NamedTuple):
    """The results of the operator: two for the user, then statistics, then what is saved."""

    output: Tensor  # [T, B, H]
    h_n: Tensor  # [B, H]
    mean_x: Tensor
    rstd_x: Tensor
    mean_h: Tensor
    rstd_h: Tensor
    wh: Tensor  # [T * B, H]
    phi: Tensor  # [T * B, H]: the nonlinearity's values, or empty where they are the states
    hidden: Tensor  # [T * B, H], or empty where it is output


class Grads(NamedTuple):
    """The gradients of the operator's differentiable inputs; empty for absent ones."""

    wx: Tensor
    weight_hh: Tensor
    bias: Tensor
    gamma_x: Tensor
    gamma_h: Tensor
    h0: Tensor


def statistics_shapes(a: Inputs) -> list[tuple[int, ...]]:
    """The shapes of mean and rstd of the terms x and h, ``(0,)`` where there is none."""
    steps, _, features = a.wx.shape
    if a.population:
        return [(0,)] * 2
    return [(1 if a.input_stats == "sequence" else steps, features), (steps, features)]


class _Plan:
    """What forward and backward both derive from the arguments."""

    def __init__(self, a: Inputs) -> None:
        include = not a.population and a.padding == "include"
        self.layout = layout = Layout(a.wx, a.h0, a.lengths, include)
        gamma_x, gamma_h = layout.cast(a.gamma_x), layout.cast(a.gamma_h)
        bias, pop_x, pop_h = layout.optional(a.bias), a.population[0:2], a.population[2:4]
        norm_x = layout.input_norm("batch", gamma_x, a.eps, pop_x, a.input_stats)
        norm_h = layout.norm("batch", gamma_h, bias, a.eps, pop_h)
        self.norms = norm_x, norm_h
        self.transition = Transition(layout, a.wx, a.weight_hh, a.bias, norm_x, norm_h)
        self.zoneout_h = layout.zoneout(a.mask_h, a.rate_h)


def forward(a: Inputs) -> Outputs:
    """Run the recurrence over all steps."""
    plan = _Plan(a)
    layout, transition, zoneout_h = plan.layout, plan.transition, plan.zoneout_h
    packing, like, H = layout.packing, transition.wx, layout.hidden
    h = layout.state(a.h0)

    rooms = Rooms(packing, like, a.save)
    transition.start(rooms)
    hidden = packing.buffer(H, like)
    hs = phis = packing.split(hidden)
    phi = None
    if zoneout_h.active:
        phi = packing.buffer(H, like)
        phis = packing.split(phi)

    for t, n in enumerate(packing.sizes):
        h = h[:n]
        transition.forward(t, h, phis[t])
        if a.nonlinearity == "tanh":
            phis[t].tanh_()
        else:
            phis[t].relu_()
        if zoneout_h.active:
            zoneout_h.forward(t, h, phis[t], hs[t])
        h = hs[t]

    output = layout.padded(hidden).to(a.wx.dtype)
    h_n = packing.final(hidden).to(a.wx.dtype)
    saved: list[Tensor | None] = [None] * 3
    if a.save:
        own_hidden = output.data_ptr() != hidden.data_ptr()
        saved = [transition.wh, phi, hidden if own_hidden else None]
    return Outputs(
        output,
        h_n,
        *moments_of(plan.norms, packing.steps, like),
        *(like.new_empty(0) if s is None else s for s in saved),
    )


def _states_alike(alike: Sequence[bool], states: Sequence[Tensor], eps: float) -> list[bool]:
    """The steps before which the rows of all states ``[B, H]`` are the same.

    A normalization with a small variance magnifies what differs, so terms that count as constant
    can give states that do not.
    """
    found = list(alike)
    for t in range(1, min(len(found), len(states) + 1)):  # no row reaches the steps after those
        var = states[t - 1].var(0, correction=0)
        found[t] = found[t] and found[t - 1] and bool((var <= CONSTANT * eps).all())
        if not found[t]:
            return found[:t] + [False] * (len(found) - t)
    return found


def backward(a: Inputs, r: Outputs, doutput: Tensor | None, dh_n: Tensor | None) -> Grads:
    """The gradients of all differentiable inputs, from those of the two results."""
    plan = _Plan(a)
    layout, transition, zoneout_h = plan.layout, plan.transition, plan.zoneout_h
    packing, like, H = layout.packing, transition.wx, layout.hidden
    restore_moments(plan.norms, (r.mean_x, r.rstd_x, r.mean_h, r.rstd_h))
    norm_h = plan.norms[1]
    if isinstance(norm_h, BatchNorm):
        include = a.padding == "include"
        found = alike_of((a.h0,), a.wx, r[2:6], a.eps, (a.mask_h,), a.lengths, include)
        norm_h.alike = found[0].tolist()
    h0 = layout.state(a.h0)
    hidden = r.hidden if r.hidden.numel() else r.output.reshape(-1, H)
    if isinstance(norm_h, BatchNorm):
        constant = (r.rstd_h.square() * a.eps > 1 - CONSTANT).all(-1).tolist()
        alike = _states_alike(norm_h.alike, packing.split(hidden), a.eps)
        # A term is constant as a whole or not at all.
        norm_h.alike = [both and all_ for both, all_ in zip(alike, constant, strict=True)]
    phis = packing.split(r.phi if r.phi.numel() else hidden)

    transition.start_backward(r.wh)
    dys = layout.output_gradients(doutput)
    dh = layout.state_gradient(dh_n, h0)
    for t in range(len(packing.sizes) - 1, -1, -1):
        dh_t = dh[: packing.sizes[t]]
        dpre = transition.gradient_room(t)
        if dys is not None:
            dh_t += dys[t]
        dh_new, dh_kept = zoneout_h.backward(t, dh_t) if zoneout_h.active else (dh_t, None)
        if a.nonlinearity == "tanh":
            _tanh_backward(dh_new, phis[t], grad_input=dpre)
        else:
            _relu_backward(dh_new, phis[t], 0, grad_input=dpre)
        transition.backward(t, dpre, dh_t)
        if dh_kept is not None:
            dh_t += dh_kept

    dwx, dweight, dbias, dgamma_x, dgamma_h = transition.finish_backward(hidden, h0)
    return Grads(
        dwx.to(a.wx.dtype),
        dweight.to(a.weight_hh.dtype),
        like_parameter(dbias, a.bias, like),
        like_parameter(dgamma_x, a.gamma_x, like),
        like_parameter(dgamma_h, a.gamma_h, like),
        packing.unsort(dh).to(a.h0.dtype),
    )
