"""Shape, dtype and device of the input term, on which the choice of kernels depends."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Term(NamedTuple):
    """Shape, dtype and device of an input term, ``[T, B, 4H]`` or ``[R, T, B, 4H]``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a GPU; False in Triton's interpreter."""
        return self.device.type == "cuda"
