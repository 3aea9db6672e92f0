"""Mean and variance over the rows of several processes, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def global_moments(h: Tensor, rows: Tensor | None, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over the rows of all processes of a group, ``[..., F]`` each.

    Every process must call it, in the same order as the group's other operations; the same holds
    for its backward pass. All processes get bitwise identical results. Forward exchanges 2F + 1
    numbers per leading index, backward 2F.

    Args:
        h: ``[..., B, F]``; B may differ from process to process, and be 0.
        rows: bool ``[..., B]``, the rows that count (all of them by default).
        group: the processes.
    """
    results: tuple[Tensor, Tensor] = _GlobalMoments.apply(h, rows, group)  # type: ignore[no-untyped-call]
    return results


def identical_globally(states: Tensor, group: ProcessGroup) -> Tensor:
    """Whether all rows ``[B, F]`` of all processes of a group are identical, as a bool tensor.

    Every process must call it and gets the same result. Exchanges F + 2 numbers.
    """
    own = states.new_zeros(states.shape[1] + 2)
    if len(states) > 0:
        own[0], own[1], own[2:] = 1, (states == states[0]).all(), states[0].detach()
    everyone = own.new_empty(dist.get_world_size(group), len(own))
    dist.all_gather(list(everyone), own, group=group)
    absent, first = everyone[:, 0] == 0, everyone[:, 0].argmax()
    same = (everyone[:, 1] == 1) & (everyone[:, 2:] == everyone[first, 2:]).all(1)
    return (same | absent).all()


class _GlobalMoments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, rows: Tensor | None, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        keep = None if rows is None else rows[..., None]
        count = (
            h.new_full((*h.shape[:-2], 1), h.shape[-2])
            if rows is None
            else rows.sum(-1, keepdim=True).to(h.dtype)
        )
        own_mean = _kept(h, keep).sum(-2) / count.clamp(min=1)
        centred = _kept(h - own_mean[..., None, :], keep).square().sum(-2)
        # Merge the means and the sums of squares about each process's own mean (Chan, Golub and
        # LeVeque, 1979). This avoids the cancellation of E[h^2] - E[h]^2.
        own = torch.cat([own_mean, centred, count], dim=-1)
        everyone = own.new_empty(dist.get_world_size(group), *own.shape)
        dist.all_gather(list(everyone), own, group=group)
        features = h.shape[-1]
        means, squares, counts = everyone.split([features, features, 1], dim=-1)
        total = counts.sum(0).clamp(min=1)
        mean = (counts / total * means).sum(0)
        var = (squares + counts * (means - mean).square()).sum(0) / total
        ctx.save_for_backward(h, keep, mean, total)
        ctx.group = group
        return mean, var

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor) -> tuple[Tensor, None, None]:
        h, keep, mean, total = ctx.saved_tensors
        both = torch.cat([d_mean, d_var], dim=-1)  # from the rows of this process
        dist.all_reduce(both, group=ctx.group)
        d_mean, d_var = (both / total)[..., None, :].chunk(2, dim=-1)
        d_h = d_mean + 2 * d_var * (h - mean[..., None, :])
        return _kept(d_h, keep), None, None


def _kept(h: Tensor, keep: Tensor | None) -> Tensor:
    return h if keep is None else torch.where(keep, h, 0)
