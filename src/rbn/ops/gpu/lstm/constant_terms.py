"""Raises the variances of non-constant terms in one launch, see `rbn.ops.identical_rows`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu.lstm.constant_terms_kernel import raise_variances as kernel
from rbn.ops.gpu.runtime.launch_cache import launch_by_key
from rbn.ops.identical_rows import identical_inputs, identical_steps, raise_variances
from rbn.ops.types import CONSTANT

BLOCK = 1024
PROGRAMS = 128  # not more, because each program searches for the first step whose rows differ


def raises_in_kernel(T: int, B: int, G: int) -> bool:
    """Whether 32-bit indices suffice: they run past the end by up to one block per program."""
    return max(T * G, B * G // 4) < 2**31 - PROGRAMS * BLOCK


def raised_variances(
    states: tuple[Tensor | None, Tensor | None],
    wx: Tensor,
    var_x: Tensor | None,
    var_h: Tensor,
    var_c: Tensor | None,
    eps: float,
    masked: bool = False,
    lengths: Tensor | None = None,
    include: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """var_h and var_c ``[..., T, F]`` for the backward kernels, from those of the forward pass.

    states: ``[..., B, H]`` each, None if all rows share the state. wx: ``[..., T, B, 4H]``. var_x:
    ``[..., T, 4H]``, or ``[..., 1, 4H]`` if sequencewise. var_x and var_c are None for absent
    terms. For the other arguments see `identical_steps`.
    """
    T, B, G = wx.shape[-3:]
    # Rare cases that the kernel does not support:
    if var_x is None or include or not raises_in_kernel(T, B, G):
        seen = tuple(state for state in states if state is not None)
        variances = var_x, var_h, var_c
        before, after = identical_steps(seen, wx, *variances, eps, masked, lengths, include)
        return raise_variances(var_h, before, eps), None if var_c is None else raise_variances(
            var_c, after, eps
        )
    if var_x.shape[-2] != T:  # sequencewise: replace var_x by whether the rows of a step differ
        var_x = (~identical_inputs(wx, lengths)).to(var_h.dtype)[..., None].expand(var_h.shape)
        var_x = var_x.contiguous()
    different = [None if s is None or s.stride(-2) == 0 else s.contiguous() for s in states]
    h0, c0 = [var_h if state is None else state for state in different]
    compare = [state is not None for state in different]
    new_h, new_c = torch.empty_like(var_h), None if var_c is None else torch.empty_like(var_c)
    cell = (var_h, new_h) if var_c is None or new_c is None else (var_c, new_c)
    tensors = (h0, c0, var_x, var_h, cell[0], new_h, cell[1])

    def arguments() -> Any:
        return (
            (min(PROGRAMS, -(-T * G // BLOCK)), var_h.numel() // (T * G)),
            tensors,
            (T, B, G // 4, CONSTANT * eps, 2 * CONSTANT * eps),
            {
                **{"COMPARE_H": compare[0], "COMPARE_C": compare[1], "CELL": var_c is not None},
                **{"MASKED": masked, "BLOCK": BLOCK},
            },
        )

    known = (wx.shape, *compare, var_c is None, masked, eps, h0.dtype, c0.dtype)
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    launch_by_key(kernel, known, addresses, arguments, var_h)
    return new_h, new_c
