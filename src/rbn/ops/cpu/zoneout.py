"""Keeps previous values: zoneout, and the padded rows of ``padding="include"``."""

from __future__ import annotations

import torch
from torch import Tensor


class Zoneout:
    """``state = z * previous + (1 - z) * new``, or just ``previous`` where a mask is true."""

    def __init__(self, rate: float, masks: tuple[Tensor, ...] | None = None) -> None:
        """rate: z. masks: one bool mask per step, broadcast to ``[n, H]``."""
        self.rate, self.masks = rate, masks

    @property
    def active(self) -> bool:
        """Whether any previous value is ever kept."""
        return self.rate != 0 or self.masks is not None

    def forward(self, t: int, previous: Tensor, new: Tensor, out: Tensor) -> None:
        """Write the state after step t into out (which may be new)."""
        if self.masks is None:
            torch.add(self.rate * previous, new, alpha=1 - self.rate, out=out)
            return
        if self.rate != 0:
            new = torch.add(self.rate * previous, new, alpha=1 - self.rate)
        torch.where(self.masks[t], previous, new, out=out)

    def backward(self, t: int, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `new` and of `previous`."""
        if self.masks is None:
            return grad * (1 - self.rate), grad * self.rate
        mask = self.masks[t]
        if self.rate == 0:
            return grad.masked_fill(mask, 0), grad.masked_fill(~mask, 0)
        kept = torch.where(mask, grad, grad * self.rate)
        return (grad * (1 - self.rate)).masked_fill(mask, 0), kept
