"""The input term W_x x_t of all steps at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def factors(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What is multiplied, ``[..., I']`` and ``[G, I']``.

    In half precision on a GPU with zeros up to a multiple of 8 columns: for rows that are no
    multiple of 16 bytes cuBLAS has slow kernels only, forward and backward. With one or two
    columns the zeros would cost more.
    """
    columns = input.shape[-1]
    if columns % 8 == 0 or columns <= 2 or not input.is_cuda or input.dtype == torch.float32:
        return input, weight
    if input.dtype not in (torch.float16, torch.bfloat16):
        return input, weight
    padding = (0, -columns % 8)
    return F.pad(input, padding), F.pad(weight, padding)


def input_product(input: Tensor, weight: Tensor) -> Tensor:
    """``input @ weight.T``, ``[..., I]`` and ``[G, I]``."""
    return F.linear(*factors(input, weight))
