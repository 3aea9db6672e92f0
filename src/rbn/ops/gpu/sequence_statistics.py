"""Sequencewise statistics: mean and variance of the input term over all unpadded positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu.lstm.prepare import write_input_moments
from rbn.ops.gpu.runtime.device import power_of_two
from rbn.ops.gpu.runtime.launch_cache import launch_by_key
from rbn.ops.gpu.sequence_kernel import subtract_spread

_COLUMNS = 128  # per program


def sequence_moments(wx: Tensor, lengths: Tensor | None, mean: Tensor, var: Tensor) -> None:
    """Write the statistics of wx ``[..., T, B, F]``, ``[F]`` per recurrence, to mean and var.

    Computes the statistics of each step, then merges them.

    lengths: int32 ``[B]``; None without padding.
    """
    *lead, T, _, F = wx.shape
    means, variances = torch.empty((2, *lead, T, F), dtype=torch.float32, device=wx.device)
    write_input_moments(wx.contiguous(), lengths, means, variances)
    if lengths is None:
        new_mean = means.mean(-2, keepdim=True)
        new_var = (variances + (means - new_mean).square()).mean(-2)
    else:
        n = (torch.arange(T, device=wx.device)[:, None] < lengths).sum(1)[:, None]
        part = n / n.sum()
        new_mean = (means * part).sum(-2, keepdim=True)
        new_var = ((variances + (means - new_mean).square()) * part).sum(-2)
    mean.copy_(new_mean.view_as(mean))
    var.copy_(new_var.view_as(var))


def sequence_backward(
    wx: Tensor,
    lengths: Tensor | None,
    moments: tuple[Tensor, Tensor],
    gamma_x: Tensor,
    eps: float,
    dwx: Tensor,
    dbias: Tensor,
    dgamma_x: Tensor,
) -> None:
    """Add the gradient through the statistics `moments` to that of wx ``[..., T, B, F]``, dwx.

    Args:
        wx: the input term.
        lengths: int32 ``[B]``; None without padding.
        moments: mean and variance, float32, ``[F]`` per recurrence, like the gradients below.
        gamma_x: float32.
        eps: added to the variance.
        dwx: the gradient with the statistics taken as constants, contiguous; changed in place.
        dbias: the gradient of the bias.
        dgamma_x: the gradient of gamma_x.
    """
    *_, T, B, F = wx.shape
    wx = wx.contiguous()
    tensors = wx, dwx, *moments, gamma_x, dbias, dgamma_x, wx if lengths is None else lengths

    def arguments() -> Any:
        return (
            (wx.numel() // (B * F), -(-F // _COLUMNS)),
            tensors,
            (eps, T, B),
            {
                "F": F,
                "ROWS": min(64, power_of_two(B)),
                "COLUMNS": _COLUMNS,
                "LENGTHS": lengths is not None,
            },
        )

    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    key = (wx.shape, wx.dtype, eps, lengths is None)
    launch_by_key(subtract_spread, key, addresses, arguments, wx)
