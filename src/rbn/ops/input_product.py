"""The input term W_x x_t of all steps at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def padding(input: Tensor) -> int:
    """How many columns of zeros to append to the input.

    In half precision on a GPU the columns are padded to a multiple of 8, because cuBLAS has only
    slow kernels for rows that are not a multiple of 16 bytes, forward and backward. With one or two
    columns the padding would cost more than it saves.
    """
    columns = input.shape[-1]
    if columns % 8 == 0 or columns <= 2 or not input.is_cuda:
        return 0
    return -columns % 8 if input.dtype in (torch.float16, torch.bfloat16) else 0


def factors(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of the product, ``[..., I']`` and ``[G, I']``, zero-padded as `padding` says."""
    more = padding(input)
    return (F.pad(input, (0, more)), F.pad(weight, (0, more))) if more else (input, weight)


def input_product(input: Tensor, weight: Tensor) -> Tensor:
    """``input @ weight.T``, ``[..., I]`` and ``[G, I]``."""
    return F.linear(*factors(input, weight))
