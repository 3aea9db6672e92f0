"""Inputs of one feature through the kernels for small layers, without the input term.

The input term of such a layer is W_x x_t = w x_t, so a step needs one number for each row. Its
statistics are those of x times w and w^2, and the gradient of w is a sum that the backward kernel
makes: see ``cuda/small.cuh``. Gradients of x are not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from rbn.ops.arguments import needs_grad
from rbn.ops.custom import Direct, Formula, is_traced, without_second_derivative
from rbn.ops.gpu.lstm import families, forward
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.persistent.tiles import tf32_allowed
from rbn.ops.gpu.lstm.signature import Grads, Inputs, Outputs
from rbn.ops.gpu.lstm.together import joined, parted

_TENSORS = ("weight_hh", "bias", "gamma_x", "gamma_h", "gamma_c", "beta_c", "h0", "c0")
# w, then the operator's arguments: in the place of the input term x, as often as it has columns.
_Inputs: Any = NamedTuple("_Inputs", [("w", Tensor), *get_type_hints(Inputs).items()])  # type: ignore[misc]


def may_take(op: str, x: Tensor) -> bool:
    """Whether inputs ``[T, B, 1]`` may be taken as they are, as far as they themselves say."""
    return (
        x.dtype in cluster_kernels.ONE_FEATURE
        and op in ("bn_lstm", "lstm")
        and x.numel() > 0
        and not (x.requires_grad and torch.is_grad_enabled())
        and not is_traced(x)
    )


def from_one_feature(
    op: str, calls: Sequence[dict[str, Any]], weights: Sequence[Tensor]
) -> list[tuple[Any, ...]] | None:
    """What each call returns; None where the input terms must be made first.

    calls: as for `together`, but wx is the input, expanded to the shape of the input term.
    weights: W_x of each, ``[4H, 1]``, in the input's type.
    """
    if not all(type(w) in (Tensor, torch.nn.Parameter) for w in weights):
        return None
    first = calls[0]
    if cluster_kernels.choose(first["wx"]) is None:
        return None
    if op == "bn_lstm" and (first["gamma_x"] is None or first["gamma_c"] is None):
        return None
    if len(calls) == 1:
        wx, w = first["wx"], weights[0]
    else:
        x = torch.stack([call["wx"][..., :1] for call in calls])
        wx, w = x.expand(-1, -1, -1, first["wx"].shape[-1]), torch.stack(list(weights))
    found = joined(op, calls, _TENSORS)
    if found is None:
        return None
    tensors, rest = found
    a = Inputs._make((wx, *tensors, *rest, needs_grad((w, *tensors)), tf32_allowed()))
    if a.zoned or families.choose(a) != families.CUDA:
        return None
    return parted(op, _one_feature(w, *a), len(calls))


def _forward(*args: Any) -> tuple[Tensor, ...]:
    return forward.forward_of_one_feature(args[0], Inputs(*args[1:]))


def _backward(
    doutput: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    results: Sequence[Tensor],
    *args: Any,
    consume: bool = False,
) -> Grads:
    w, a = args[0], Inputs(*args[1:])
    *found, inputs = results
    given = (a, Outputs(*found), doutput, dh_n, dc_n, consume, w, inputs)
    device = a.wx.device.type
    if not torch.is_autocast_enabled(device):
        return forward.backward(*given)
    with torch.autocast(device, enabled=False):  # where backward() is called under it
        return forward.backward(*given)


def _consuming(*given: Any) -> Grads:
    """The same, over what was saved."""
    return _backward(*given, consume=True)


_one_feature = Direct(
    Formula(_Inputs, ("w", *Grads._fields[1:]), results=3),
    _forward,
    _backward,
    _consuming,
    without_second_derivative("gpu_lstm", _backward),
)
