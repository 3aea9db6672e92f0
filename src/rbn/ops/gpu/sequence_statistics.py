"""Sequencewise statistics: mean and variance of the input term over all unpadded positions."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_moments(wx: Tensor, valid: Tensor | None, mean: Tensor, var: Tensor) -> None:
    """Write the statistics of wx ``[..., T, B, F]``, F of each recurrence, to mean and var.

    valid: bool ``[T, B]``, which positions are not padding.
    """
    x = wx.to(torch.float32)
    if valid is None:
        new_var, new_mean = torch.var_mean(x, dim=(-3, -2), correction=0)
    else:
        keep, n = valid[:, :, None], valid.sum().clamp(min=1)
        new_mean = torch.where(keep, x, 0).sum((-3, -2)) / n
        centered = torch.where(keep, x - new_mean[..., None, None, :], 0)
        new_var = centered.square().sum((-3, -2)) / n
    mean.copy_(new_mean.view_as(mean))
    var.copy_(new_var.view_as(var))


def sequence_backward(
    wx: Tensor,
    valid: Tensor | None,
    moments: tuple[Tensor, Tensor],
    gamma_x: Tensor,
    eps: float,
    dwx: Tensor,
    dbias: Tensor,
    dgamma_x: Tensor,
) -> None:
    """Add the gradient through the statistics `moments` to that of wx ``[..., T, B, F]``, dwx."""
    *lead, T, B, F = wx.shape
    vectors = (*moments, gamma_x, dbias, dgamma_x)
    mean, var, gamma_x, dbias, dgamma_x = (v.view(*lead, 1, 1, F) for v in vectors)
    rstd = torch.rsqrt(var + eps)
    spread = dbias + (wx - mean) * rstd * dgamma_x
    n: Tensor | int = T * B
    if valid is not None:
        n = valid.sum().clamp(min=1)
        spread = torch.where(valid[:, :, None], spread, 0)
    dwx -= (spread * (rstd * gamma_x) / n).to(dwx.dtype)
