"""The steps in which all rows of a minibatch are still alike: the host's part of `CONSTANT`.

The backward kernels let no gradient through a recurrent or cell term whose variance is next to
nothing. That is meant for the steps before the first input that differs; anywhere else such a
variance comes from weights next to zero, say, and the gradient is as real as any other. So the
variances of all other steps are raised to just above what the kernels take for constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.types import CONSTANT


def steps_alike(
    states: tuple[Tensor, ...],
    wx: Tensor,
    var_x: Tensor | None,
    var_h: Tensor,
    var_c: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """In which steps the recurrent term, and in which the cell, may be taken for constant.

    The rows of the states are alike before such a step, and for the cell after it as well.

    states: ``[..., B, H]`` each, what the recurrence begins with. wx: ``[..., T, B, F]``. var_x,
    var_h, var_c: ``[..., T, F]`` (var_x ``[..., 1, F]`` over a sequence), None for absent terms.
    Returns bool ``[..., T]`` each.
    """
    begin = states[0] == states[0][..., :1, :]
    for state in states[1:]:
        begin = begin & (state == state[..., :1, :])
    limit = CONSTANT * eps
    if var_c is not None:
        constant = (var_c <= limit).all(-1)
    else:
        constant = (var_h <= limit).all(-1)
        if var_x is not None and var_x.shape[-2] == wx.shape[-3]:
            constant = constant & (var_x <= limit).all(-1)
        elif var_x is not None:
            constant = constant & (wx == wx[..., :1, :]).flatten(-2).all(-1)
    found = torch.cat([begin.flatten(-2).all(-1, keepdim=True), constant], -1)
    alike = found.to(torch.int32).cumprod(-1, dtype=torch.int32).to(torch.bool)
    before, after = alike[..., :-1], alike[..., 1:]
    if var_x is None:  # both terms in one: constant only if the input is alike as well
        before = before & (var_h <= limit).all(-1)
    return before, after


def raised(var: Tensor, alike: Tensor, eps: float) -> Tensor:
    """Variances ``[..., T, F]`` by which only terms of steps alike ``[..., T]`` can be constant."""
    return torch.maximum(var, torch.where(alike, 0.0, 2 * CONSTANT * eps).to(var)[..., None])


def lowered(rstd: Tensor, alike: Tensor, eps: float) -> Tensor:
    """The same for 1 / sqrt(var + eps)."""
    limit = (eps + 2 * CONSTANT * eps) ** -0.5 if eps > 0 else torch.inf
    return torch.minimum(rstd, torch.where(alike, torch.inf, limit).to(rstd)[..., None])
