"""Losses, gradient norms and the loss scale of recent steps, kept on the model's device."""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-6  # added to the norm, as in `torch.nn.utils.clip_grad_norm_`
# Gradients through many time steps may overflow float32; their squares in the norm overflow from
# 1e19 on. Clipped gradients would fit. So after an overflow the loss is scaled down, by a power of
# two, and scaled up again step by step while the norm is below `_GROW_BELOW`.
_BACKOFF, _MIN_SCALE = 2.0**-20, 2.0**-80
_GROW_BELOW = 2.0**30


def _not_finite(number: Tensor) -> Tensor:
    """Whether a number is infinite or NaN, in two operations; `isfinite` needs several more."""
    return number - number != 0


class GradientLog:
    """Sums and counts over steps, updated without synchronizing with the host.

    Attributes:
        total: sum of the losses since it was last set to 0.
        bad: number of the first step with a loss that was not finite, or -1.
        skipped: number of steps with a gradient that was not finite.
        in_a_row: how many of those were the most recent steps.
        number: number of the next step, from 0.
        loss_scale: factor for the next loss, if gradients are clipped: 1, and less after gradients
            that were not finite.
    """

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self._counts = torch.tensor([-1, 0, 0, 0], device=device)
        self.bad, self.skipped, self.in_a_row, self.number = self._counts.unbind()
        # The gradients' divisor, 1 if they are not finite (else 0), and the loss scale.
        self._factors = torch.tensor([1.0, 0.0, 1.0], device=device)
        self.loss_scale = self._factors[2]
        self._uses_kernel = device.type == "cuda"

    def record(
        self, loss: Tensor, norm: Tensor | None = None, clip: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Record a step.

        Args:
            loss: a scalar.
            norm: norm of the scaled loss's gradients: a scalar, or the norms of parts, ``[N]``.
            clip: largest norm to allow.

        Returns:
            The divisor of the gradients, and 1 if they are not finite, else 0: float32 scalars
            that the next step overwrites.
        """
        divisor, overflow, scale = self._factors.unbind()
        if self._uses_kernel:
            from rbn.training.gradient_log_kernel import record

            norms = loss if norm is None else norm
            parts = norms.numel()
            with torch.cuda.device_of(loss):
                record[(1,)](
                    *(loss, norms, self.total, self._counts, self._factors),
                    *(float(clip), _EPS, parts),
                    CLIPPED=norm is not None,
                    PARTS=1 << (parts - 1).bit_length(),
                    BACKOFF=_BACKOFF,
                    MIN_SCALE=_MIN_SCALE,
                    GROW_BELOW=_GROW_BELOW,
                    num_warps=1 if parts == 1 else 8,
                )
            return divisor, overflow
        if norm is not None:
            norm = torch.linalg.vector_norm(norm) if norm.dim() else norm
            bad = _not_finite(norm)
            divisor.copy_(torch.maximum((norm + _EPS * scale) / clip, scale))
            overflow.copy_(bad)
            larger = torch.where(norm < _GROW_BELOW, scale * 2, scale).clamp(max=1)
            scale.copy_(torch.where(bad, (scale * _BACKOFF).clamp(min=_MIN_SCALE), larger))
            self.skipped += bad
            self.in_a_row.add_(1).mul_(bad)
        first_bad = _not_finite(loss) & (self.bad < 0)
        self.bad.copy_(torch.where(first_bad, self.number, self.bad))
        self.total += loss
        self.number += 1
        return divisor, overflow
