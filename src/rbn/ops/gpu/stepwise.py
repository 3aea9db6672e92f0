"""Shared by recurrences that run step by step, with a matrix product and a kernel per step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu.row_counts import row_counts
from rbn.ops.gpu.runtime import triton_functions as kernel_device
from rbn.ops.types import valid_steps


def factor(weight: Tensor, like: Tensor) -> Tensor:
    """Convert a weight for `product`: to the dtype of `like`, or to float32."""
    in_full = _sums_in_full(like.dtype, like.device)
    return weight.to(like.dtype if in_full else torch.float32)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a b`` in float32, for factors of any dtype; not rounded, because it is normalized next.

    Half-precision factors are multiplied directly if PyTorch can return float32 for them. Otherwise
    they are converted to float32 first.
    """
    if b.dtype != torch.float32 and _sums_in_full(b.dtype, b.device):
        multiply: Any = torch.mm
        result: Tensor = multiply(a, b, out_dtype=torch.float32, out=out)
        return result
    return torch.mm(a.to(torch.float32), b.to(torch.float32), out=out)


def products(like: Tensor, b: Tensor, out: Tensor) -> Callable[[Tensor], object]:
    """A function that computes `product` of its argument (of `like`'s dtype) and b into `out`."""
    multiply: Any = torch.mm
    if b.dtype != torch.float32 and _sums_in_full(b.dtype, b.device):
        return lambda a: multiply(a, b, out_dtype=torch.float32, out=out)
    if like.dtype == b.dtype == torch.float32:
        return lambda a: multiply(a, b, out=out)
    return lambda a: product(a, b, out=out)


@functools.lru_cache(maxsize=16)
def _sums_in_full(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch can multiply tensors of this dtype into a float32 result."""
    if dtype == torch.float32:
        return True
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    if not hasattr(torch.ops.aten.mm, "dtype_out"):  # torch before 2.8
        return False
    return dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) >= (8, 0)


def weight_gradient(da: Tensor, h0: Tensor, hidden: Tensor) -> Tensor:
    """The sum of ``da[t]' h[t - 1]`` over all steps, ``[F, H]`` float32.

    Shapes: da ``[T, B, F]``, h0 ``[B, H]``, hidden ``[T, B, H]``.
    """
    result = product(da[0].t(), h0.to(da.dtype))
    if len(da) > 1:
        result += product(da[1:].flatten(0, 1).t(), hidden[:-1].flatten(0, 1))
    return result


class StepCall:
    """Shared by the forward and backward passes of all step-by-step recurrences."""

    def __init__(self, wx: Tensor, lengths: Tensor | None, fewest: int = 1) -> None:
        """fewest: how many rows a step needs for minibatch statistics of its own."""
        self.wx = wx.contiguous()
        self.T, self.B = wx.shape[:2]
        self.empty = wx.new_empty(1, dtype=torch.float32)
        self.lengths = self.inv_n = self.empty  # see `row_counts`
        self.valid: Tensor | None = None  # [T, B]
        if lengths is not None:
            self.lengths, self.inv_n = row_counts(lengths, self.T, wx, fewest)
            self.valid = valid_steps(self.lengths, self.T)

    @property
    def given_lengths(self) -> Tensor | None:
        """The lengths, or None."""
        return None if self.valid is None else self.lengths

    def full(self, value: Tensor) -> Tensor:
        """A contiguous float32 version."""
        return value.to(torch.float32).contiguous()

    def bias(self, value: Tensor | None) -> Tensor:
        """A bias as contiguous float32; zeros if it is None."""
        return self.zeros(self.wx.shape[2]) if value is None else self.full(value)

    def state(self, value: Tensor | None, *shape: int) -> Tensor:
        """A writable float32 copy of a state; zeros if it is None."""
        if value is None:
            return self.zeros(*shape)
        return value.to(torch.float32, copy=True).contiguous()

    def zeros(self, *shape: int) -> Tensor:
        """Float32 zeros."""
        return torch.zeros(shape, dtype=torch.float32, device=self.wx.device)

    def mask(self, value: Tensor | None) -> Tensor:
        """A zoneout mask as bytes."""
        return self.empty if value is None else value.contiguous().view(torch.uint8)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialized memory."""
        return torch.empty(shape, dtype=dtype, device=self.wx.device)

    def gradient(self, value: Tensor, parameter: Tensor | None) -> Tensor | None:
        """The gradient in the parameter's dtype; None if the parameter is None."""
        return None if parameter is None else value.to(parameter.dtype)


def zone(mask: Tensor | None, rate: float) -> int:
    """The kernels' code for how zoneout is given: by mask, by rate, or not at all."""
    if mask is not None:
        return int(kernel_device.MASK.value)
    return int(kernel_device.RATE.value) if rate else 0
