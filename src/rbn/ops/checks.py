"""Checks of the loss function's targets, before any work starts.

They look at shapes and dtypes, and at values in the host's memory: they never wait for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.types import readable


def check_targets(input: Tensor, targets: Tensor, reduction: str) -> None:
    """Reject targets that are not one integer per row of the input ``[..., H]``."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"targets must be integers, got {targets.dtype}")
    if input.dim() == 0 or targets.shape != input.shape[:-1]:
        raise ValueError(
            f"targets must have the shape of the input but its last dimension, "
            f"{list(input.shape[:-1])}, got {list(targets.shape)}"
        )


def check_classes(targets: Tensor, classes: int) -> None:
    """Reject targets in host memory that are not from 0 to ``classes - 1``."""
    if readable(targets) and targets.numel():
        least, most = (int(v) for v in targets.long().aminmax())
        if least < 0 or most >= classes:
            raise ValueError(f"targets must be from 0 to {classes - 1}, got {least} to {most}")
