"""Inputs that are symbols, which stand for one-hot vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def symbol_rows(symbols: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """See `rbn.ops.symbol_rows`."""
    return F.embedding(symbols, weight.to(dtype).t().contiguous())
