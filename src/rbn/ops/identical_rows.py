"""Finds the steps in which all rows of a minibatch are still identical, see `CONSTANT`.

The backward kernels pass no gradient through a recurrent or cell term whose variance is almost
zero. That is meant for the steps before the first input that differs between rows. In any other
step such a variance has another cause, such as weights close to zero, and the gradient is real. So
the variances of all other steps are raised to just above the kernels' threshold.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.types import CONSTANT


def identical_steps(
    states: tuple[Tensor, ...],
    wx: Tensor,
    var_x: Tensor | None,
    var_h: Tensor,
    var_c: Tensor | None,
    eps: float,
    masked: bool = False,
    lengths: Tensor | None = None,
    include: bool = False,
) -> tuple[Tensor, Tensor]:
    """In which steps the recurrent term, and in which the cell, may be treated as constant.

    Before such a step the rows of the states are identical, and all variances of the term are
    small: it is constant in all units or in none. For the cell, the rows of the input are identical
    too, in this step and all earlier ones.

    states: ``[..., B, H]`` each, the initial states. wx: ``[..., T, B, F]``.
    var_x, var_h, var_c: ``[..., T, F]`` (``[..., 1, F]`` for a sequencewise var_x), None for absent
        terms.
    masked: whether zoneout masks are given. They differ from row to row, so the rows differ after
        the first step.
    lengths: int ``[B]``.
    include: whether padded rows count in the statistics; they keep their states.
    Returns two bool tensors ``[..., T]``.
    """
    begin: Tensor | None = None
    for state in states:
        if state.stride(-2) != 0:  # else all rows share memory, as in a learned state
            same = state == state[..., :1, :]
            begin = same if begin is None else begin & same
    limit = CONSTANT * eps
    small = (var_h <= limit).all(-1)
    constant = small if var_c is None else (var_c <= limit).all(-1)
    if var_x is None:  # the sum of both terms is normalized
        constant = constant & small
    elif var_x.shape[-2] == wx.shape[-3]:
        constant = constant & (var_x <= limit).all(-1)
    else:
        constant = constant & identical_inputs(wx, None if include else lengths)
    if include and lengths is not None:  # the rows differ once the first one ends
        each = torch.arange(wx.shape[-3], device=wx.device)
        constant = constant & (each < lengths.min().to(wx.device))
    if begin is None:
        first = torch.ones_like(constant[..., :1])
    else:
        first = begin.flatten(-2).all(-1, keepdim=True)
    result = torch.cat([first, constant], -1)
    identical = result.to(torch.int32).cumprod(-1, dtype=torch.int32).to(torch.bool)
    before, after = identical[..., :-1], identical[..., 1:]
    if masked:
        before, after = (
            F.pad(result[..., :1], (0, wx.shape[-3] - 1)) for result in (before, after)
        )
    return before & small, after


def identical_inputs(wx: Tensor, lengths: Tensor | None) -> Tensor:
    """Whether all unpadded rows ``[..., T, B, F]`` of a step are the same, ``[..., T]``."""
    if lengths is None and wx.is_cpu:  # usually two rows tell
        steps = wx.flatten(0, -3)
        same = (steps[:, :1] == steps[:, -1:]).flatten(1).all(1)
        (candidates,) = same.nonzero(as_tuple=True)
        rows = steps[candidates]
        same[candidates] = (rows == rows[:, :1]).flatten(1).all(1)
        return same.view(wx.shape[:-2])
    if lengths is None:
        return (wx == wx[..., :1, :]).flatten(-2).all(-1)
    lengths = lengths.to(wx.device)
    longest = wx.index_select(-2, lengths.argmax().view(1))
    each = torch.arange(wx.shape[-3], device=wx.device)
    padding = (each[:, None] >= lengths)[..., None]  # [T, B, 1]
    return ((wx == longest) | padding).flatten(-2).all(-1)


def raise_variances(var: Tensor, identical: Tensor, eps: float) -> Tensor:
    """Raise variances ``[..., T, F]`` above the threshold `CONSTANT`, except in identical steps."""
    return torch.where(identical[..., None], var, var.clamp(min=2 * CONSTANT * eps))


def lower_rstd(rstd: Tensor, identical: Tensor, eps: float) -> Tensor:
    """`raise_variances` for 1 / sqrt(var + eps)."""
    limit = (eps + 2 * CONSTANT * eps) ** -0.5 if eps > 0 else torch.inf
    return torch.minimum(rstd, torch.where(identical, torch.inf, limit).to(rstd)[..., None])


def variance(rstd: Tensor, eps: float) -> Tensor:
    """The variance from 1 / sqrt(var + eps)."""
    return (rstd.square().reciprocal() - eps).clamp_(min=0)
