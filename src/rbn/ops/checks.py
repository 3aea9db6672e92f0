"""Argument checks, run before any kernel.

They read only shapes, dtypes and values in host memory, so they never wait for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.types import Statistics, check_lengths, compute_dtype, readable


def check_shapes(
    wx: Tensor, gates: int, *, may_be_empty: bool = False, **tensors: Tensor | None
) -> int:
    """Returns the hidden size H; raises if the input term, a weight or a state does not fit.

    wx: input term ``[T, B, gates * H]``.
    may_be_empty: whether the batch may be empty, B = 0.
    tensors: weights and states, by the names that every recurrence uses.
    """
    sizes = wx.shape[::2] if may_be_empty else wx.shape
    if wx.dim() != 3 or wx.shape[2] % gates or 0 in sizes:
        wanted = "H" if gates == 1 else f"{gates}H"
        raise ValueError(f"wx must be [T, B, {wanted}] and not empty, got {list(wx.shape)}")
    if not wx.is_floating_point():
        raise TypeError(f"wx must be a floating point tensor, got {wx.dtype}")
    B, columns, H = wx.shape[1], wx.shape[2], wx.shape[2] // gates
    shapes: dict[str, tuple[int, ...]] = {
        "weight_hh": (columns, H),
        "bias": (columns,),
        "gamma_x": (columns,),
        "gamma_h": (columns,),
        "gamma_c": (H,),
        "beta_c": (H,),
        "h0": (B, H),
        "c0": (B, H),
    }
    device = wx.device
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"{name} must have the shape {list(shapes[name])}, got {list(tensor.shape)}"
            )
        if tensor.device != device:
            raise ValueError(f"{name} must be on wx's device, {device}, got {tensor.device}")
    return H


def _check_device(name: str, tensor: Tensor, wx: Tensor) -> None:
    if tensor.device != wx.device:
        raise ValueError(f"{name} must be on wx's device, {wx.device}, got {tensor.device}")


def check_sequence_lengths(lengths: Tensor | None, wx: Tensor) -> None:
    """Refuse lengths that are not integers ``[B]``, or (if in host memory) not from 1 to T."""
    if lengths is None:
        return
    steps, batch = wx.shape[:2]
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    if tuple(lengths.shape) != (batch,):
        raise ValueError(f"lengths must have the shape [{batch}], got {list(lengths.shape)}")
    if readable(lengths):
        check_lengths(lengths.tolist(), steps)


def check_masks(wx: Tensor, hidden: int, **masks: Tensor | float) -> None:
    """Refuse zoneout masks that are not bool ``[T, B, H]``."""
    for name, mask in masks.items():
        if isinstance(mask, float) or not isinstance(mask, Tensor):
            continue
        shape = (*wx.shape[:2], hidden)
        _check_device(name, mask, wx)
        if mask.dtype != torch.bool or tuple(mask.shape) != shape:
            raise ValueError(
                f"{name} must be a rate or a bool tensor {list(shape)}, "
                f"got {mask.dtype} {list(mask.shape)}"
            )


def check_targets(input: Tensor, targets: Tensor, reduction: str) -> None:
    """Refuse targets that are not one integer per row of the input ``[..., H]``."""
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
    """Refuse targets in host memory that are not from 0 to ``classes - 1``."""
    if readable(targets) and targets.numel():
        least, most = (int(v) for v in targets.long().aminmax())
        if least < 0 or most >= classes:
            raise ValueError(f"targets must be from 0 to {classes - 1}, got {least} to {most}")


def constant_statistics(
    population: Statistics | None, wx: Tensor, **features: int | None
) -> Statistics | None:
    """Returns the population statistics as constants; raises an error that names a wrong one.

    features: the number of columns of each term ``x``, ``h`` and ``c``, or None if the term is not
        normalized; statistics of such a term are dropped.
    """
    if population is None:
        return None
    results: dict[str, Tensor] = {}
    for term, columns in features.items():
        if columns is None:
            continue
        rows = None
        for name in (f"mean_{term}", f"var_{term}"):
            value: Tensor | None = getattr(population, name)
            if value is None:
                raise ValueError(f"population.{name} is missing, but its term is normalized")
            good = value.dim() == 2 and value.shape[1] == columns and value.shape[0] >= 1
            if not good or value.shape[0] != (rows or value.shape[0]):
                wanted = f"[{rows or 'S >= 1'}, {columns}]"
                raise ValueError(
                    f"population.{name} must have the shape {wanted}, got {list(value.shape)}"
                )
            _check_device(f"population.{name}", value, wx)
            rows = value.shape[0]
            dtype = compute_dtype(wx.dtype)
            value = value.detach() if value.requires_grad else value
            results[name] = value if value.dtype == dtype else value.to(dtype)
    return Statistics(**results)
