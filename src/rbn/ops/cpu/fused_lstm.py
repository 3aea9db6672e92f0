"""Equations 2 to 4 and 6 to 8 fused, with the backward pass derived by hand.

One loop serves the plain, the batch-normalized and the layer-normalized LSTM: they differ in what
stands for the normalization of each term. There is no autograd node per step; the weight gradient
is one matrix product over all steps; every step writes into buffers made once.

Names: ``pre`` are the gates before their nonlinearities, ``cand`` the cell c_t of equation 7,
``cell`` the cell passed on to the next step (they differ under zoneout), ``tanh_c`` the tanh of
equation 8, and ``d...`` the gradient of each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rbn.ops.arguments import alike_of
from rbn.ops.cpu.derivatives import GateDerivatives
from rbn.ops.cpu.layout import Layout, Rooms, like_parameter, moments_of, restore_moments
from rbn.ops.cpu.norms import BatchNorm, Norm, Shift
from rbn.ops.cpu.transition import Transition


class Inputs(NamedTuple):
    """The arguments of the operator, in its order. See `rbn.ops.bn_lstm` for their meaning."""

    wx: Tensor
    weight_hh: Tensor
    bias: Tensor | None
    gamma_x: Tensor | None
    gamma_h: Tensor | None
    gamma_c: Tensor | None
    beta_c: Tensor | None
    h0: Tensor
    c0: Tensor
    lengths: Tensor | None
    population: list[Tensor]  # mean, var of x, h, c; empty tensors for absent terms; [] = batch
    mask_c: Tensor | None
    mask_h: Tensor | None
    rate_c: float
    rate_h: float
    norm: str  # "none", "batch" or "layer"
    eps: float
    input_stats: str
    padding: str
    pass_normalized_cell: bool
    save: bool  # keep what the backward pass needs

    @property
    def joint(self) -> bool:
        """Whether the input and the recurrent term are normalized as one."""
        return self.norm != "none" and self.gamma_x is None


class Outputs(NamedTuple):
    """The results of the operator: three for the user, then statistics, then what is saved."""

    output: Tensor  # [T, B, H]
    h_n: Tensor  # [B, H]
    c_n: Tensor  # [B, H]
    mean_x: Tensor
    rstd_x: Tensor
    mean_h: Tensor
    rstd_h: Tensor
    mean_c: Tensor
    rstd_c: Tensor
    wh: Tensor  # [T * B, 4H]
    gates: Tensor  # [T * B, 4H], after their nonlinearities
    cand: Tensor  # [T * B, H]
    cell: Tensor  # [T * B, H], or empty where it is cand
    tanh_c: Tensor  # [T * B, H]
    hidden: Tensor  # [T * B, H], or empty where it is output


class Grads(NamedTuple):
    """The gradients of the operator's differentiable inputs; empty for absent ones."""

    wx: Tensor
    weight_hh: Tensor
    bias: Tensor
    gamma_x: Tensor
    gamma_h: Tensor
    gamma_c: Tensor
    beta_c: Tensor
    h0: Tensor
    c0: Tensor


def statistics_shapes(a: Inputs) -> list[tuple[int, ...]]:
    """The shapes of mean and rstd of the terms x, h and c, ``(0,)`` where there is none."""
    steps, batch, features = a.wx.shape
    hidden = features // 4
    if a.norm == "layer":
        return [(steps * batch, 1)] * 3
    if a.norm == "none" or a.population:
        return [(0,)] * 3
    x = (1 if a.input_stats == "sequence" else steps, features)
    return [
        (0,) if a.joint else x,
        (steps, features),
        (0,) if a.gamma_c is None else (steps, hidden),
    ]


class _Plan:
    """What forward and backward both derive from the arguments."""

    def __init__(self, a: Inputs) -> None:
        include = a.norm == "batch" and not a.population and a.padding == "include"
        self.layout = layout = Layout(a.wx, a.h0, a.lengths, include)
        bias, beta_c = layout.optional(a.bias), layout.optional(a.beta_c)
        gamma_x, gamma_h, gamma_c = map(layout.optional, (a.gamma_x, a.gamma_h, a.gamma_c))
        pop_x, pop_h, pop_c = a.population[0:2], a.population[2:4], a.population[4:6]

        norm_x, norm_h = None, None
        self.norm_c: Norm | None = None
        if gamma_x is not None:
            norm_x = layout.input_norm(a.norm, gamma_x, a.eps, pop_x, a.input_stats)
        if gamma_h is not None:
            norm_h = layout.norm(a.norm, gamma_h, bias, a.eps, pop_h)
        if gamma_c is not None:
            self.norm_c = layout.norm(a.norm, gamma_c, beta_c, a.eps, pop_c)
        elif beta_c is not None:
            self.norm_c = Shift(beta_c)
        self.norms = norm_x, norm_h, self.norm_c
        self.transition = Transition(layout, a.wx, a.weight_hh, a.bias, norm_x, norm_h)
        self.zoneout_c = layout.zoneout(a.mask_c, a.rate_c)
        self.zoneout_h = layout.zoneout(a.mask_h, a.rate_h)


def forward(a: Inputs) -> Outputs:
    """Run the recurrence over all steps."""
    plan = _Plan(a)
    layout, transition, norm_c = plan.layout, plan.transition, plan.norm_c
    zoneout_c, zoneout_h = plan.zoneout_c, plan.zoneout_h
    packing, like, H = layout.packing, transition.wx, layout.hidden
    h, c = layout.state(a.h0), layout.state(a.c0)

    rooms = Rooms(packing, like, a.save)
    transition.start(rooms)
    hidden = packing.buffer(H, like)
    hs = packing.split(hidden)
    gates, tanh_c, cand = rooms.make(4 * H), rooms.make(H), rooms.make(H)
    pres, tanhs, cands = rooms.views(gates), rooms.views(tanh_c), rooms.views(cand)
    ifs, gs, os = (rooms.views(part) for part in gates.split([2 * H, H, H], dim=1))
    i_s, f_s = rooms.views(gates[:, :H]), rooms.views(gates[:, H : 2 * H])
    cell, cells = cand, cands
    own_cell = zoneout_c.active or a.pass_normalized_cell
    if own_cell:
        cell = rooms.make(H)
        cells = rooms.views(cell)

    for t, n in enumerate(packing.sizes):
        if len(h) != n:
            h, c = h[:n], c[:n]
        tanh_t, cand_t, h_t = tanhs[t], cands[t], hs[t]

        # The gates, equation 2 or 6.
        transition.forward(t, h, pres[t])
        ifs[t].sigmoid_()
        gs[t].tanh_()
        os[t].sigmoid_()

        # The cell, equation 3 or 7.
        torch.mul(f_s[t], c, out=cand_t)
        cand_t.addcmul_(i_s[t], gs[t])

        # The output, equation 4 or 8.
        c_hat = cand_t if norm_c is None else norm_c.forward(t, cand_t)
        torch.tanh(c_hat, out=tanh_t)
        if own_cell:
            zoneout_c.forward(t, c, c_hat if a.pass_normalized_cell else cand_t, cells[t])
        torch.mul(os[t], tanh_t, out=h_t)
        if zoneout_h.active:
            zoneout_h.forward(t, h, h_t, h_t)
        h, c = h_t, cells[t]

    dtype = a.wx.dtype
    output = layout.padded(hidden).to(dtype)
    h_n = packing.final(hidden)
    c_n = packing.final(cell) if a.save else packing.unsort(cell)
    saved: list[Tensor | None] = [None] * 6
    if a.save:
        own_hidden = output.data_ptr() != hidden.data_ptr()
        saved = [transition.wh, gates, cand, cell if own_cell else None, tanh_c]
        saved.append(hidden if own_hidden else None)
    rows = packing.steps * packing.batch if a.norm == "layer" else packing.steps
    return Outputs(
        output,
        h_n.to(dtype),
        c_n.to(dtype),
        *moments_of(plan.norms, rows, like),
        *(like.new_empty(0) if s is None else s for s in saved),
    )


def backward(
    a: Inputs, r: Outputs, doutput: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None
) -> Grads:
    """The gradients of all differentiable inputs, from those of the three results."""
    plan = _Plan(a)
    layout, transition, norm_c = plan.layout, plan.transition, plan.norm_c
    zoneout_c, zoneout_h = plan.zoneout_c, plan.zoneout_h
    packing, like, H = layout.packing, transition.wx, layout.hidden
    restore_moments(plan.norms, (r.mean_x, r.rstd_x, r.mean_h, r.rstd_h, r.mean_c, r.rstd_c))
    if a.norm == "batch" and not a.population:
        masks, include = (a.mask_c, a.mask_h), a.padding == "include"
        found = alike_of((a.h0, a.c0), a.wx, r[3:9], a.eps, masks, a.lengths, include)
        for norm, alike in zip(plan.norms[1:], found, strict=True):
            if isinstance(norm, BatchNorm):
                norm.alike = alike.tolist()
    h0, c0 = layout.state(a.h0), layout.state(a.c0)
    hidden = r.hidden if r.hidden.numel() else r.output.reshape(-1, H)
    cell = r.cell if r.cell.numel() else r.cand

    transition.start_backward(r.wh)
    dys = layout.output_gradients(doutput)
    dh, dc = layout.state_gradient(dh_n, h0), layout.state_gradient(dc_n, c0)
    f_s, cands = packing.split(r.gates[:, H : 2 * H]), packing.split(r.cand)
    derivatives = GateDerivatives(packing, r.gates, cell, r.tanh_c, c0)
    product = like.new_empty(packing.batch, H)

    for t in range(len(packing.sizes) - 1, -1, -1):
        n = packing.sizes[t]
        dh_t, dc_t, dc_hat = dh[:n], dc[:n], product[:n]
        to_ifg, to_o, to_c_hat = derivatives.at(t)
        dpre = transition.gradient_room(t)
        dgates = dpre.view(n, 4, H)

        # The output, equation 4 or 8.
        if dys is not None:
            dh_t += dys[t]
        dh_new, dh_kept = zoneout_h.backward(t, dh_t) if zoneout_h.active else (dh_t, None)
        torch.mul(dh_new, to_o, out=dgates[:, 3])
        torch.mul(dh_new, to_c_hat, out=dc_hat)

        # The cell, equation 3 or 7: read by this step's output and passed on to the next step.
        dc_new, dc_kept = zoneout_c.backward(t, dc_t) if zoneout_c.active else (dc_t, None)
        if a.pass_normalized_cell:
            dc_hat += dc_new
        dcand = dc_hat if norm_c is None else norm_c.backward(t, dc_hat, cands[t])
        if not a.pass_normalized_cell:
            dcand = torch.add(dcand, dc_new, out=dc_hat)
        torch.mul(dcand[:, None], to_ifg, out=dgates[:, :3])
        torch.mul(dcand, f_s[t], out=dc_t)
        if dc_kept is not None:
            dc_t += dc_kept

        # The gates, equation 2 or 6.
        transition.backward(t, dpre, dh_t)
        if dh_kept is not None:
            dh_t += dh_kept

    dwx, dweight, dbias, dgamma_x, dgamma_h = transition.finish_backward(hidden, h0)
    dgamma_c, dbeta_c = (None, None) if norm_c is None else (norm_c.dgamma, norm_c.dbeta)
    return Grads(
        dwx.to(a.wx.dtype),
        dweight.to(a.weight_hh.dtype),
        like_parameter(dbias, a.bias, like),
        like_parameter(dgamma_x, a.gamma_x, like),
        like_parameter(dgamma_h, a.gamma_h, like),
        like_parameter(dgamma_c, a.gamma_c, like),
        like_parameter(dbeta_c, a.beta_c, like),
        packing.unsort(dh).to(a.h0.dtype),
        packing.unsort(dc).to(a.c0.dtype),
    )
