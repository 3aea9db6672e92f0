"""What steps leave behind on the model's device, which the host looks at now and then."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 1e-6  # added to the norm that divides, as `torch.nn.utils.clip_grad_norm_` does
# Gradients through many steps may be larger than float32 holds, or their squares in the norm, from
# 1e19 on. What is left of them by clipping is not: so the loss is made smaller, by powers of two.
_LESS, _LEAST = 2.0**-20, 2.0**-80
_ROOM = 2.0**30  # the norm of scaled gradients below which the scale grows again


def _not_finite(number: Tensor) -> Tensor:
    """Whether it is infinite or no number, in two operations: `isfinite` has several times more."""
    return number - number != 0


class Ledger:
    """Sums and counts of steps, kept without a word from the host.

    Attributes:
        total: of the losses since it was last set to 0.
        bad: the number of the first step whose loss was not finite, or -1.
        skipped: steps whose gradient was not finite.
        in_a_row: how many of those were the last ones.
        number: of the next step, from 0.
        loss_scale: what the next loss is to be multiplied with before its gradients are taken,
            where they are clipped: 1, and less after gradients that were not finite.
    """

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self._counts = torch.tensor([-1, 0, 0, 0], device=device)
        self.bad, self.skipped, self.in_a_row, self.number = self._counts.unbind()
        # What the gradients are to be divided by, 1 where they are not finite, the loss's scale.
        self._factors = torch.tensor([1.0, 0.0, 1.0], device=device)
        self.loss_scale = self._factors[2]
        self._in_one = device.type == "cuda"

    def enter(
        self, loss: Tensor, norm: Tensor | None = None, clip: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Note a step.

        norm: of all its gradients together, those of the scaled loss; or ``[N]``, of parts of them.
        Returns what the gradients are to be divided by, and 1 where they are not finite, else 0;
        float32, overwritten by the next step.
        """
        divisor, found, scale = self._factors.unbind()
        if self._in_one:
            from rbn.training.ledger_kernel import enter

            given = loss if norm is None else norm
            parts = given.numel()
            with torch.cuda.device_of(loss):
                enter[(1,)](
                    *(loss, given, self.total, self._counts, self._factors),
                    *(float(clip), _SMALL, parts),
                    CLIPPED=norm is not None,
                    PARTS=1 << (parts - 1).bit_length(),
                    LESS=_LESS,
                    LEAST=_LEAST,
                    ROOM=_ROOM,
                    num_warps=1 if parts == 1 else 8,
                )
            return divisor, found
        if norm is not None:
            norm = torch.linalg.vector_norm(norm) if norm.dim() else norm
            bad = _not_finite(norm)
            divisor.copy_(torch.maximum((norm + _SMALL * scale) / clip, scale))
            found.copy_(bad)
            larger = torch.where(norm < _ROOM, scale * 2, scale).clamp(max=1)
            scale.copy_(torch.where(bad, (scale * _LESS).clamp(min=_LEAST), larger))
            self.skipped += bad
            self.in_a_row.add_(1).mul_(bad)
        first_bad = _not_finite(loss) & (self.bad < 0)
        self.bad.copy_(torch.where(first_bad, self.number, self.bad))
        self.total += loss
        self.number += 1
        return divisor, found
