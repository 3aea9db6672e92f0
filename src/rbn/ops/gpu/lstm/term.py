"""What the choice of kernels depends on: the shape, dtype and device of the input term."""

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
        """Whether it is on a GPU; in Triton's interpreter it is not."""
        return self.device.type == "cuda"
