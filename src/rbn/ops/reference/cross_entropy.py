"""A linear layer and the cross-entropy of its softmax, with PyTorch's own functions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rbn.ops.checks import check_classes


def linear_cross_entropy(
    input: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, reduction: str = "mean"
) -> Tensor:
    """See `rbn.ops.linear_cross_entropy`. Autocast applies as to any linear layer."""
    check_classes(targets, len(weight))
    logits = F.linear(input, weight, bias).float()
    return F.cross_entropy(
        logits.reshape(-1, len(weight)), targets.flatten().long(), reduction=reduction
    )
