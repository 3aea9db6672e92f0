"""Several independent recurrences of one shape in one launch, such as the directions of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.arguments import needs_grad, population_list, zoneout_arguments
from rbn.ops.checks import (
    check_masks,
    check_sequence_lengths,
    check_shapes,
    constant_statistics,
)
from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.families import is_streamed, plan_for
from rbn.ops.gpu.lstm.library import lstm_op
from rbn.ops.gpu.lstm.persistent.tiles import tf32_allowed
from rbn.ops.types import Statistics

_TENSORS = ("wx", "weight_hh", "bias", "gamma_x", "gamma_h", "gamma_c", "beta_c", "h0", "c0")
_ZONEOUT = ("zoneout_c", "zoneout_h")
_OPTIONS: dict[str, Any] = {
    "lengths": None,
    "eps": 1e-5,
    "input_stats": "step",
    "padding": "exclude",
    "pass_normalized_cell": False,
}
_EMPTY: dict[str, Any] = (
    dict.fromkeys((*_TENSORS, "population")) | dict.fromkeys(_ZONEOUT, 0.0) | _OPTIONS
)


def together(op: str, calls: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]] | None:
    """What each call returns; None where they are better made one after another.

    op: ``"bn_lstm"`` or ``"lstm"``; anything else is not made together. calls: the arguments of
    `rbn.ops.bn_lstm` or `rbn.ops.lstm` by name.
    """
    if op not in ("bn_lstm", "lstm") or not pays(calls[0]["wx"], len(calls)):
        return None
    found = joined(op, calls, _TENSORS)
    if found is None:
        return None
    tensors, rest = found
    return parted(op, lstm_op(*tensors, *rest, needs_grad(tensors), tf32_allowed()), len(calls))


def joined(
    op: str, calls: Sequence[dict[str, Any]], names: Sequence[str]
) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """The tensors of these names, and all that the operator takes behind tensors but `save`.

    None where the calls differ, or have an option that the kernels have not. The tensors of several
    have a leading dimension.
    """
    if any(call[name] is not None for call in calls for name in call.keys() - _EMPTY.keys()):
        return None  # an option that the kernels do not have
    calls = [_EMPTY | call for call in calls]
    first = calls[0]
    if not all(alike(first, call) for call in calls[1:]):
        return None
    for call in calls:
        H = check_shapes(call["wx"], 4, **{name: call[name] for name in _TENSORS[1:]})
        check_sequence_lengths(call["lengths"], call["wx"])
        check_masks(call["wx"], H, **{name: call[name] for name in _ZONEOUT})
    return tuple(_stacked(calls, name) for name in names), rest_of(op, calls)


def rest_of(op: str, calls: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    """All that the operator takes behind tensors but `save`, for calls that are alike."""
    first = calls[0]
    zoneout = zoneout_arguments(_stacked(calls, "zoneout_c"), _stacked(calls, "zoneout_h"))
    if op == "lstm":
        return first["lengths"], [], *zoneout, "none", 0.0, "step", "exclude", False
    population: list[Tensor] = []
    if first["population"] is not None:
        given = zip(*map(_population, calls), strict=True)
        population = [values[0] if len(calls) == 1 else torch.stack(values) for values in given]
    options = (first["eps"], first["input_stats"], first["padding"], first["pass_normalized_cell"])
    return first["lengths"], population, *zoneout, "batch", *options


def parted(op: str, found: Sequence[Tensor], count: int) -> list[tuple[Any, ...]]:
    """The results of each of `count` calls that were made in one."""
    if count == 1:
        if op == "lstm":
            return [tuple(found[:3])]
        return [(*found[:3], Statistics(*(m if m.numel() else None for m in found[3:9])))]
    results = zip(*(value.unbind() for value in found[:3]), strict=True)
    if op == "lstm":
        return list(results)
    moments = [m.unbind() if m.numel() else [None] * count for m in found[3:9]]
    statistics = (Statistics(*values) for values in zip(*moments, strict=True))
    return [(*found, s) for found, s in zip(results, statistics, strict=True)]


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two calls differ in nothing but the values of their tensors."""
    if one["lengths"] is not other["lengths"] or one.keys() != other.keys():
        return False
    for name, value in one.items():
        if isinstance(value, Tensor):
            fellow = other[name]
            same = isinstance(fellow, Tensor) and fellow.shape == value.shape
            if not same or fellow.dtype != value.dtype or fellow.device != value.device:
                return False
        elif isinstance(value, Statistics) or value is None:
            if type(other[name]) is not type(value):
                return False
        elif other[name] != value:
            return False
    return True


def pays(wx: Tensor, calls: int) -> bool:
    """Whether so many recurrences over wx ``[T, B, 4H]`` fit on the card as one of them does."""
    if not wx.is_cuda or wx.dtype == torch.float64:
        return False
    several = wx.expand(calls, *wx.shape)
    one, all_ = plan_for(wx), plan_for(several)
    if one is None or all_ is None or not all_.persistent:
        return False
    kind = cuda_kernels.kind(wx)
    return not is_streamed(wx) if kind is None else cuda_kernels.kind(several) == kind


def _stacked(calls: Sequence[dict[str, Any]], name: str) -> Any:
    """The tensors of that name with a leading dimension; what is none, or one, as it is."""
    if len(calls) > 1 and isinstance(calls[0][name], Tensor):
        return torch.stack([call[name] for call in calls])
    return calls[0][name]


def _population(call: dict[str, Any]) -> list[Tensor]:
    wx, H = call["wx"], call["weight_hh"].shape[1]
    x, c = (
        None if call[name] is None else size for name, size in (("gamma_x", 4 * H), ("gamma_c", H))
    )
    return population_list(constant_statistics(call["population"], wx, x=x, h=4 * H, c=c), wx)
