"""Joins several calls into one for the kernels: computes the input term and stacks tensors.

The input term is a product, or the input itself. Recurrences side by side, such as the directions
of a layer, have their tensors stacked along a leading dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.definition import LSTM, VECTORS, LSTMArguments
from rbn.ops.gpu.lstm.kernel_arguments import LSTMCall
from rbn.ops.gpu.lstm.plan import Plan
from rbn.ops.gpu.lstm.prepare import padded_factors

_OTHERS = LSTM.tensors[len(LSTM.gradients) :]  # tensors without a gradient


class Saved(NamedTuple):
    """The tensors that the backward pass needs; None if absent.

    The fields from `x` to `inputs` are saved only to avoid recomputing them. x, w, x_reverse and
    w_reverse are the factors of the input term if they are not the arguments themselves; vectors
    holds the parameters `VECTORS` of all calls.
    """

    term: Tensor | None = None  # [R, T, B, 4H], if the call computed it
    x: Tensor | None = None
    w: Tensor | None = None
    x_reverse: Tensor | None = None
    w_reverse: Tensor | None = None
    weights: Tensor | None = None  # [R, 4H, H], if several calls are stacked
    vectors: Tensor | None = None
    h0: Tensor | None = None
    c0: Tensor | None = None
    memory: Tensor | None = None  # of the `Workspace`; the statistics below are then absent
    inputs: Tensor | None = None  # inputs of one feature in the kernels' layout
    output: Tensor | None = None  # [R, T, B, H], if it is not a view of `hidden`
    mean_x: Tensor | None = None  # [R, T, 4H], or [R, 1, 4H] for sequencewise statistics
    var_x: Tensor | None = None
    mean_h: Tensor | None = None
    var_h: Tensor | None = None
    mean_c: Tensor | None = None
    var_c: Tensor | None = None
    # Read only by the kernels, in the memory layout of the one that ran:
    wh: Tensor | None = None  # W_h h minus its mean; without a norm the pre-activations
    cs: Tensor | None = None  # cells in float32
    hidden: Tensor | None = None  # h0 and h after each step [R, T + 1, B, H], if contiguous


RETURNED = ("term", "wh", "cs", "hidden")  # by the custom operator


def join(calls: Sequence[LSTMArguments], plan: Plan, saved: Saved | None = None) -> LSTMCall:
    """Join the calls into one for the kernels. saved: given in the backward pass only."""
    if len(calls) > 1:
        return _join_several(calls, plan, saved)
    (a,) = calls
    if a.weight_ih is None:
        return LSTMCall(a, plan)
    if plan.one_feature:
        x = a.input.expand(-1, -1, 4 * plan.sizes[-1])
        return LSTMCall(_with_term(a, x), plan, a.weight_ih)
    if saved is not None:
        assert saved.term is not None
        return LSTMCall(_with_term(a, saved.term), plan)
    x, w = padded_factors(a.input, a.weight_ih)
    call = LSTMCall(_with_term(a, F.linear(x, w)), plan)
    call.factors = [(x, w)]
    return call


def _with_term(a: LSTMArguments, term: Tensor) -> LSTMArguments:
    """The arguments with another input, several times as fast as `_replace`."""
    return LSTMArguments(term, *a[1:])


def _join_several(calls: Sequence[LSTMArguments], plan: Plan, saved: Saved | None) -> LSTMCall:
    first = calls[0]
    factors: list[tuple[Tensor, Tensor]] = []
    w: Tensor | None = None
    if saved is not None and saved.term is not None:
        term = saved.term
    elif first.weight_ih is None:
        term = torch.stack([a.input for a in calls])
    elif plan.one_feature:
        term = torch.stack([a.input for a in calls]).expand(-1, -1, -1, 4 * plan.sizes[-1])
        w = _stack(calls, "weight_ih")
    else:
        factors = [padded_factors(a.input, a.weight_ih) for a in calls if a.weight_ih is not None]
        term = first.input.new_empty(plan.term.shape)
        for (x, w_x), part in zip(factors, term.flatten(1, 2).unbind(), strict=True):
            torch.mm(x.view(-1, x.shape[-1]), w_x.t(), out=part)
    given: dict[str, Any] = {name: _stack(calls, name) for name in _OTHERS if name != "lengths"}
    vectors = _vectors(calls) if saved is None or saved.vectors is None else saved.vectors
    if saved is None or saved.weights is None:
        given |= {name: _stack(calls, name) for name in ("weight_hh", "h0", "c0")}
    else:
        given |= {"weight_hh": saved.weights, "h0": saved.h0, "c0": saved.c0}
    given |= _split_vectors(calls, vectors)
    call = LSTMCall(first._replace(input=term, weight_ih=None, **given), plan, w)
    call.factors, call.vectors_of_all = factors, vectors
    return call


def _stack(calls: Sequence[LSTMArguments], name: str) -> Tensor | None:
    values = [getattr(a, name) for a in calls]
    return None if values[0] is None else torch.stack(values)


def _vectors(calls: Sequence[LSTMArguments]) -> Tensor | None:
    """The parameters `VECTORS` of all calls in one tensor; None if their dtypes differ."""
    present = [v for name in VECTORS for a in calls if (v := getattr(a, name)) is not None]
    return torch.cat(present) if len({vector.dtype for vector in present}) == 1 else None


def _split_vectors(calls: Sequence[LSTMArguments], vectors: Tensor | None) -> dict[str, Any]:
    """The parameters `VECTORS` by name, stacked ``[R, ...]``."""
    if vectors is None:
        return {name: _stack(calls, name) for name in VECTORS}
    parts: dict[str, Tensor | None] = {}
    n, begin = len(calls), 0
    for name in VECTORS:
        vector: Tensor | None = getattr(calls[0], name)
        if vector is None:
            parts[name] = None
            continue
        size = vector.numel()
        parts[name] = vectors.as_strided((n, size), (size, 1), begin)
        begin += n * size
    return parts


def to_save(call: LSTMCall, calls: Sequence[LSTMArguments]) -> dict[str, Tensor | None]:
    """The fields of `Saved` that `join` computed."""
    kept: dict[str, Tensor | None] = {}
    if call.factors:
        kept["term"] = call.a.input
    for suffix, (x, w), a in zip(("", "_reverse"), call.factors, calls, strict=False):
        if x is not a.input:
            kept[f"x{suffix}"] = x
        if w is not a.weight_ih:
            kept[f"w{suffix}"] = w
    if len(calls) > 1:
        if call.w is None:
            kept["term"] = call.a.input
        kept |= {"weights": call.a.weight_hh, "vectors": call.vectors_of_all}
        kept |= {"h0": call.a.h0, "c0": call.a.c0}
    return kept


def factors_of(calls: Sequence[LSTMArguments], saved: Saved) -> list[tuple[Tensor, Tensor]]:
    """The factors of the input terms, as the forward pass multiplied them."""
    made = ((saved.x, saved.w), (saved.x_reverse, saved.w_reverse))
    factors: list[tuple[Tensor, Tensor]] = []
    for a, (x, w) in zip(calls, made, strict=False):
        assert a.weight_ih is not None
        factors.append((a.input if x is None else x, a.weight_ih if w is None else w))
    return factors
