"""The fused LSTM, equations 2 to 4 and 6 to 8, with a backward pass derived by hand.

One loop runs the plain, the batch-normalized and the layer-normalized LSTM; they differ only in the
normalization object of each term. There is no autograd node per step; the weight gradient is one
matrix product over all steps; every step writes into buffers that are allocated once.

Names: ``pre`` are the pre-activations of the gates, ``cand`` is the cell c_t of equation 7,
``cell`` the cell passed on to the next step (they differ under zoneout), ``tanh_c`` the tanh of
equation 8, and ``d...`` the gradient of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rbn.ops.cpu.derivatives import GateDerivatives
from rbn.ops.cpu.layout import Buffers, Layout, moments_of, restore_moments
from rbn.ops.cpu.norms import BatchNorm, Norm, Shift
from rbn.ops.cpu.transition import Transition
from rbn.ops.definition import LSTMArguments
from rbn.ops.identical_rows import identical_steps, variance


class Saved(NamedTuple):
    """The tensors that the backward pass needs; None if absent, or if nothing is saved."""

    wx: Tensor | None  # the input term, if the call computed it
    output: Tensor | None  # the output, if it holds the states
    mean_x: Tensor | None
    rstd_x: Tensor | None
    mean_h: Tensor | None
    rstd_h: Tensor | None
    mean_c: Tensor | None
    rstd_c: Tensor | None
    wh: Tensor | None  # [T * B, 4H]
    gates: Tensor | None  # [T * B, 4H], after their nonlinearities
    cand: Tensor | None  # [T * B, H]
    cell: Tensor | None  # [T * B, H], if it is not cand
    tanh_c: Tensor | None  # [T * B, H]
    hidden: Tensor | None  # [T * B, H], if it is not the output


Forward = tuple[Tensor, tuple[Tensor, Tensor], Saved]  # output, last states, saved tensors
Gradients = dict[str, Tensor | None]


class _Plan:
    """Objects that both the forward and the backward pass derive from the arguments."""

    def __init__(self, a: LSTMArguments) -> None:
        self.layout = layout = Layout(a)
        bias, beta_c = layout.optional(a.bias), layout.optional(a.beta_c)
        gamma_x, gamma_h, gamma_c = map(layout.optional, (a.gamma_x, a.gamma_h, a.gamma_c))
        pop_x, pop_h, pop_c = (a.mean_x, a.var_x), (a.mean_h, a.var_h), (a.mean_c, a.var_c)

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
        self.transition = Transition(layout, a.input, a.weight_hh, a.bias, norm_x, norm_h)
        self.zoneout_c = layout.zoneout(a.mask_c, a.rate_c)
        self.zoneout_h = layout.zoneout(a.mask_h, a.rate_h)


def forward(a: LSTMArguments) -> Forward:
    """Run the recurrence over all steps."""
    plan = _Plan(a)
    layout, transition, norm_c = plan.layout, plan.transition, plan.norm_c
    zoneout_c, zoneout_h = plan.zoneout_c, plan.zoneout_h
    packing, like, H = layout.packing, transition.wx, layout.hidden
    h, c = layout.state(a.h0), layout.state(a.c0)

    buffers = Buffers(packing, like, a.save)
    transition.start(buffers)
    hidden = packing.buffer(H, like)
    hs = packing.split(hidden)
    gates, tanh_c, cand = buffers.make(4 * H), buffers.make(H), buffers.make(H)
    pres, tanhs, cands = buffers.views(gates), buffers.views(tanh_c), buffers.views(cand)
    ifs, gs, os = (buffers.views(part) for part in gates.split([2 * H, H, H], dim=1))
    i_s, f_s = buffers.views(gates[:, :H]), buffers.views(gates[:, H : 2 * H])
    cell, cells = cand, cands
    own_cell = zoneout_c.active or a.pass_normalized_cell
    if own_cell:
        cell = buffers.make(H)
        cells = buffers.views(cell)

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

    rows = packing.steps * packing.batch if a.norm == "layer" else packing.steps
    moments = moments_of(plan.norms, rows)
    own = cell if own_cell else None
    return results(a, layout, hidden, moments, transition.wh, gates, cand, tanh_c, own)


def results(
    a: LSTMArguments,
    layout: Layout,
    hidden: Tensor,
    moments: Sequence[Tensor | None],
    wh: Tensor | None,
    gates: Tensor,
    cand: Tensor,
    tanh_c: Tensor,
    own_cell: Tensor | None = None,
) -> Forward:
    """The results of a forward pass from its buffers. The arguments are named as in `Saved`."""
    packing, dtype = layout.packing, a.input.dtype
    output = layout.padded(hidden).to(dtype)
    cell = cand if own_cell is None else own_cell
    h_n = packing.final(hidden)
    c_n = packing.final(cell) if a.save else packing.unsort(cell)
    saved: list[Tensor | None] = [None] * 6
    own_hidden = output.data_ptr() != hidden.data_ptr()
    if a.save:
        saved = [wh, gates, cand, own_cell, tanh_c, hidden if own_hidden else None]
    kept = None if own_hidden or not a.save else output
    return output, (h_n.to(dtype), c_n.to(dtype)), Saved(None, kept, *moments, *saved)


def backward(
    a: LSTMArguments, r: Saved, doutput: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None
) -> Gradients:
    """The gradients of all differentiable tensors, from those of the three results."""
    assert r.gates is not None
    assert r.cand is not None
    assert r.tanh_c is not None
    plan = _Plan(a)
    layout, transition, norm_c = plan.layout, plan.transition, plan.norm_c
    zoneout_c, zoneout_h = plan.zoneout_c, plan.zoneout_h
    packing, like, H = layout.packing, transition.wx, layout.hidden
    restore_moments(plan.norms, (r.mean_x, r.rstd_x, r.mean_h, r.rstd_h, r.mean_c, r.rstd_c))
    if a.batch_stats:
        for norm, identical in zip(plan.norms[1:], identical_steps_of(a, r), strict=True):
            if isinstance(norm, BatchNorm):
                norm.identical = identical.tolist()
    h0, c0 = layout.state(a.h0), layout.state(a.c0)
    hidden = states_of(r, H)
    cell = r.cand if r.cell is None else r.cell

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
        dpre = transition.gradient_buffer(t)
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
    vectors = {"bias": dbias, "gamma_x": dgamma_x, "gamma_h": dgamma_h}
    vectors |= {"gamma_c": dgamma_c, "beta_c": dbeta_c}
    return layout.gradients(a, dwx, dweight, **vectors, h0=dh, c0=dc)


def states_of(r: Saved, hidden: int) -> Tensor:
    """The hidden states of all steps, ``[T * B, H]``."""
    if r.hidden is not None:
        return r.hidden
    assert r.output is not None
    return r.output.reshape(-1, hidden)


def identical_steps_of(a: LSTMArguments, r: Saved) -> tuple[Tensor, Tensor]:
    """The steps in which the recurrent term, and the cell, can be treated as constant: ``[T]``."""
    variances = [None if rstd is None else variance(rstd, a.eps) for rstd in (r.rstd_x, r.rstd_h)]
    var_c = None if r.rstd_c is None else variance(r.rstd_c, a.eps)
    assert variances[1] is not None
    masked = a.mask_c is not None or a.mask_h is not None
    given = (a.eps, masked, a.lengths, a.padding == "include")
    return identical_steps((a.h0, a.c0), a.input, variances[0], variances[1], var_c, *given)
