"""The LSTM with what a layer does before it, as one node of autograd.

The input term is a product, learned initial states are the same for all rows, and several
directions run side by side. Nodes of their own for the product, the rows and what is stacked and
parted again would take the host longer than all that is around the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rbn.ops.arguments import needs_grad
from rbn.ops.checks import check_masks, check_sequence_lengths
from rbn.ops.custom import graph_is_kept, is_traced, one_by_one, undifferentiable, without_autocast
from rbn.ops.gpu.lstm import forward
from rbn.ops.gpu.lstm.backward import columns_of
from rbn.ops.gpu.lstm.kernel_arguments import Call
from rbn.ops.gpu.lstm.persistent.tiles import tf32_allowed
from rbn.ops.gpu.lstm.plan import once
from rbn.ops.gpu.lstm.prepare import padded_factors
from rbn.ops.gpu.lstm.signature import Inputs, Outputs
from rbn.ops.gpu.lstm.together import alike, pays, rest_of
from rbn.ops.types import Statistics

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PARAMETERS = ("weight_hh", "bias", "gamma_x", "gamma_h", "gamma_c", "beta_c", "h0", "c0")


def from_inputs(
    op: str, calls: Sequence[dict[str, Any]], weights: Sequence[Tensor]
) -> list[tuple[Any, ...]] | None:
    """What each call returns; None where its input term and its states must be made first.

    calls: as for `together`, but wx is the input ``[T, B, I]``, and h0 and c0 may be ``[H]``.
    weights: W_x of each, ``[4H, I]``, in the input's type.
    """
    if op not in ("bn_lstm", "lstm") or not all(map(_fits, calls, weights)):
        return None
    count = len(calls)
    if count == 1:
        return [_run(op, calls, weights)]
    if not _pay(calls[0]["wx"], weights[0].shape[0], count):
        return [_run(op, [call], [weight]) for call, weight in zip(calls, weights, strict=True)]
    if not all(alike(calls[0], call) for call in calls[1:]):
        return None
    found = _run(op, calls, weights)
    return [found[k::count] for k in range(count)]


def _pay(x: Tensor, columns: int, calls: int) -> bool:
    """`pays` for an input term of so many columns."""
    key = ("pays", x.shape[:2], columns, x.dtype, x.device, calls, tf32_allowed())
    return bool(once(key, lambda: pays(x[..., :1].expand(-1, -1, columns), calls)))


def _fits(call: dict[str, Any], weight: Tensor) -> bool:
    """Whether all have the shapes that they should have; if not, others will say which."""
    x: Tensor = call["wx"]
    if type(weight) not in (Tensor, nn.Parameter) or is_traced(x) or x.dtype not in _TYPES:
        return False
    (steps, batch, size), (columns, inputs), device = x.shape, weight.shape, x.device
    hidden = columns // 4
    if size != inputs or columns % 4 or not steps * batch * columns or call.get("group"):
        return False
    wide, narrow, whole = (columns,), (hidden,), (batch, hidden)
    shapes = ((columns, hidden), wide, wide, wide, narrow, narrow)
    for name, shape in zip(_PARAMETERS, shapes, strict=False):
        value = call.get(name)
        if value is not None and (value.shape != shape or value.device != device):
            return False
    for state in (call["h0"], call["c0"]):
        if state.shape not in (narrow, whole) or state.device != device:
            return False
    if call["lengths"] is not None:
        check_sequence_lengths(call["lengths"], x)
    zoneout_c, zoneout_h = call["zoneout_c"], call["zoneout_h"]
    if type(zoneout_c) is not float or type(zoneout_h) is not float:
        check_masks(x, hidden, zoneout_c=zoneout_c, zoneout_h=zoneout_h)
    return weight.device == device


class _Given(NamedTuple):
    """What the node takes besides tensors with a gradient, see `Inputs`."""

    calls: int
    lengths: Tensor | None
    population: list[Tensor]
    mask_c: Tensor | None
    mask_h: Tensor | None
    numbers: tuple[Any, ...]  # all that follow there
    moments: list[Tensor | None]  # to be filled: statistics are nothing for autograd


def _run(op: str, calls: Sequence[dict[str, Any]], weights: Sequence[Tensor]) -> tuple[Any, ...]:
    """The results of all calls: the first one of each, the second one of each and so on."""
    n, first = len(calls), calls[0]
    tensors: tuple[Any, ...]
    if n == 1:
        tensors = (first["wx"], weights[0], *map(first.get, _PARAMETERS))
    else:
        tensors = (*(call["wx"] for call in calls), *weights)
        tensors += tuple(call.get(name) for name in _PARAMETERS for call in calls)
    save = needs_grad(tensors)
    lengths, population, mask_c, mask_h, *numbers = rest_of(op, calls)
    given = _Given(n, lengths, population, mask_c, mask_h, (*numbers, save, tf32_allowed()), [])
    run: Any = _apply if save else _without_node
    found: tuple[Any, ...] = run(given, *tensors)
    if n > 1:
        # Not inside the node, which would have the gradient of each beside that of all.
        found = (*found[0].unbind(), *found[1:])
    if op == "lstm":
        return found
    if n == 1:
        return (*found, Statistics._make(given.moments))
    moments = _parted(given.moments, n)
    return (*found, *(Statistics._make(moments[k::n]) for k in range(n)))


def _forward(given: _Given, tensors: tuple[Any, ...]) -> tuple[Call, Outputs, list[Tensor]]:
    """The call as the kernels take it, what it found, and the factors of the input terms."""
    n = given.calls
    pairs = [padded_factors(tensors[k], tensors[n + k]) for k in range(n)]
    joined: Tensor | None = None
    if n == 1:
        wx = F.linear(*pairs[0])
        parameters = tensors[2:]
    else:
        steps, batch, _ = tensors[0].shape
        wx = tensors[0].new_empty(n, steps, batch, tensors[n].shape[0])
        for (x, w), room in zip(pairs, wx.flatten(1, 2).unbind(), strict=True):
            torch.mm(x.view(-1, x.shape[-1]), w.t(), out=room)
        weight, *vectors, h0, c0 = (tensors[k : k + n] for k in range(2 * n, len(tensors), n))
        stacked, joined = _stacked_vectors(vectors)
        parameters = (torch.stack(weight), *stacked, torch.stack(h0), torch.stack(c0))
    rest = (given.lengths, given.population, given.mask_c, given.mask_h, *given.numbers)
    call = Call(Inputs._make((wx, *parameters, *rest)), joined=joined)
    found = forward.run(call)
    given.moments.extend(found[3:9])
    return call, found, [factor for pair in zip(*pairs, strict=True) for factor in pair]


def _stacked_vectors(
    groups: Sequence[tuple[Any, ...]],
) -> tuple[list[Tensor | None], Tensor | None]:
    """Vectors of all calls, stacked by name, and all of them as `Call.joined` if it needs that."""
    present = [vector for group in groups if group[0] is not None for vector in group]
    if len({vector.dtype for vector in present}) != 1:
        return [None if group[0] is None else torch.stack(group) for group in groups], None
    whole = torch.cat(present)
    stacked: list[Tensor | None] = []
    begin = 0
    for group in groups:
        if group[0] is None:
            stacked.append(None)
            continue
        size = group[0].numel()
        stacked.append(whole.as_strided((len(group), size), (size, 1), begin))
        begin += len(group) * size
    return stacked, None if whole.dtype == torch.float32 else whole.float()


def _without_node(given: _Given, *tensors: Any) -> tuple[Any, ...]:
    return _results(_forward(given, tensors)[1], given.calls)


def _results(found: Outputs, n: int) -> tuple[Any, ...]:
    """The output of all calls, and the last states of each."""
    return (found.output, *_parted(found[1:3], n))


def _parted(values: Sequence[Tensor | None], n: int) -> tuple[Any, ...]:
    """What each call has of them."""
    if n == 1:
        return tuple(values)
    return tuple(part for v in values for part in ([None] * n if v is None else v.unbind()))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: _Given, *tensors: Any) -> tuple[Any, ...]:
        n = given.calls
        call, found, factors = _forward(given, tensors)
        ctx.set_materialize_grads(False)
        ctx.plain = n, given.numbers, call.facts, tensors[0].shape[-1]
        a = call.a
        ctx.save_for_backward(
            *(*factors, *a[:10], a.mask_c, a.mask_h, call.joined),
            # The output is a part of the states, where there are those.
            *(found.output if found.hidden is None else None, *found[3:], *a.population),
        )
        return _results(found, n)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        device = saved[0].device.type
        if torch.is_grad_enabled():  # with create_graph
            with torch.no_grad(), without_autocast(device):
                found = _gradients(ctx, saved, grads, consume=False)
            return tuple(undifferentiable("gpu_lstm", found, (*saved, *grads)))
        consume = not graph_is_kept()
        if not torch.is_autocast_enabled(device):
            return tuple(_gradients(ctx, saved, grads, consume))
        with without_autocast(device):  # where backward() is called under it
            return tuple(_gradients(ctx, saved, grads, consume))


# Without what Python does first for transforms of `torch.func`, under which nobody calls.
_apply = super(torch.autograd.Function, _Node).apply


def _gradients(
    ctx: Any, saved: tuple[Any, ...], grads: tuple[Tensor | None, ...], consume: bool
) -> list[Tensor | None]:
    """Of all that the node takes, the first of which is no tensor."""
    n, numbers, facts, columns = ctx.plain
    factors, saved = saved[: 2 * n], saved[2 * n :]
    mask_c, mask_h, joined, output = saved[10:14]
    a = Inputs._make((*saved[:10], list(saved[23:]), mask_c, mask_h, *numbers))
    r = Outputs._make((output, None, None, *saved[14:23]))
    if n > 1:
        grads = (grads[0], _stacked(grads[1 : n + 1]), _stacked(grads[n + 1 :]))
    doutput, dh_n, dc_n = grads
    call = Call(a, facts=facts, joined=joined)
    dwx, *found = forward.gradients(call, r, doutput, dh_n, dc_n, consume)
    needed = ctx.needs_input_grad[1:]
    gradients: list[Any] = [None] * (1 + 2 * n)
    for k, d in enumerate([dwx] if n == 1 else dwx.unbind()):
        x, w = factors[k], factors[n + k]
        if needed[k]:
            gradients[1 + k] = _without_zeros(torch.matmul(d, w), columns)
        if needed[n + k]:
            dw = torch.mm(columns_of(d, 0, call.T), x.view(-1, x.shape[-1]))
            gradients[1 + n + k] = _without_zeros(dw, columns)
    if n == 1:
        return [*gradients, *found]
    for gradient in found:
        gradients += [None] * n if gradient is None else gradient.unbind()
    return gradients


def _without_zeros(gradient: Tensor, columns: int) -> Tensor:
    """That of a factor without the columns that `factors` added."""
    same = gradient.shape[-1] == columns
    return gradient if same else gradient[..., :columns].contiguous()


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    """The gradients of one result of all calls, zeros for those without."""
    some = next((g for g in grads if g is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if g is None else g for g in grads])
