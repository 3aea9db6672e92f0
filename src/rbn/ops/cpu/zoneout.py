"""Keeping previous values: zoneout, and the padded rows of ``padding="include"``."""

from __future__ import annotations

import torch
from torch import Tensor


class Zoneout:
    """``state = z * previous + (1 - z) * new``."""

    def __init__(self, z: tuple[Tensor, ...] | float) -> None:
        """z: one rate, or for each step a mask or rates that broadcast to ``[n, H]``."""
        self.z = z

    @property
    def active(self) -> bool:
        """Whether any value is ever kept."""
        return self.z != 0

    def forward(self, t: int, previous: Tensor, new: Tensor, out: Tensor) -> None:
        """Write the state after step t into out (which may be new)."""
        z = self.z[t] if isinstance(self.z, tuple) else self.z
        if isinstance(z, Tensor) and z.dtype == torch.bool:
            torch.where(z, previous, new, out=out)
        else:
            torch.lerp(new, previous, z, out=out)

    def backward(self, t: int, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of new and of previous."""
        z = self.z[t] if isinstance(self.z, tuple) else self.z
        if isinstance(z, Tensor) and z.dtype == torch.bool:
            return grad.masked_fill(z, 0), grad.masked_fill(~z, 0)
        return grad * (1 - z), grad * z
