"""The autograd wrapper of every recurrence on every backend.

A backend implements a recurrence as a forward and a backward function on the arguments of its
definition (`rbn.ops.definition`). `Operator` turns the pair into an `autograd.Function` for eager
mode and into a PyTorch custom operator for compilers and exporters.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from rbn.ops.compiling import exporting_to_onnx
from rbn.ops.definition import Arguments, Definition
from rbn.ops.types import Statistics

# The results of one call: output, last states and statistics.
CallResults = tuple[Any, ...]
Moments = tuple[Tensor | None, ...]  # mean and variance of each term


class Results(NamedTuple):
    """What a forward function returns.

    With several calls (recurrences side by side), every tensor has a leading dimension for them.
    """

    output: Tensor  # [T, B, H]
    states: tuple[Tensor, ...]  # [B, H] each
    moments: Moments
    saved: (
        Any  # a NamedTuple of tensors for the backward pass; its field `output` may be the output
    )
    plan: Any = None  # anything else that the backward pass would otherwise recompute


class Incoming(NamedTuple):
    """The incoming gradients of a backward function, and its options."""

    output: Tensor | None  # the gradient of the output
    states: tuple[Tensor | None, ...]  # the gradients of the last states
    input: bool = True  # whether the gradient of the input is needed
    consume: bool = False  # whether saved tensors may be overwritten, because nothing rereads them


class Implementation(NamedTuple):
    """One recurrence on one backend.

    Attributes:
        Saved: a NamedTuple of the tensors that the backward pass needs.
        forward: ``(calls, separate) -> Results``. separate: no two results may share memory, as
            custom operators require.
        backward: ``(calls, saved, plan, incoming) -> gradients`` of each call by name. plan: the
            forward pass's `Results.plan`, or None.
        fake: ``(call) -> Results`` of empty tensors, for compilers.
        returned: the fields of `Saved` that the custom operator returns besides the output and the
            statistics; all by default. The others only save work in eager mode and are None in the
            custom operator.
    """

    Saved: type[Any]
    forward: Callable[[Sequence[Any], bool], Results]
    backward: Callable[[Sequence[Any], Any, Any, Incoming], list[dict[str, Tensor | None]]]
    fake: Callable[[Any], Results]
    returned: tuple[str, ...] | None = None


class Operator:
    """A differentiable recurrence on one backend.

    Compilers and other tracers see the custom operator ``rbn::BACKEND_NAME``. In eager mode its
    Python overhead would exceed the time of many kernels, so the same functions run in an
    `autograd.Function`.

    Args:
        definition: the recurrence.
        backend: prefix of the operator's name, such as ``"cpu"``.
        implementation: its functions.
        in_onnx: the function that `torch.onnx.export` traces instead, built from PyTorch's own
            operators.
    """

    def __init__(
        self,
        definition: Definition,
        backend: str,
        implementation: Implementation,
        in_onnx: Callable[..., CallResults] | None = None,
    ) -> None:
        self.definition, self.implementation = definition, implementation
        self.tensors, self.gradients = len(definition.tensors), len(definition.gradients)
        self._in_onnx = in_onnx
        self.name = f"{backend}_{definition.name}"
        self.op, self.backward_op = _custom_operators(self)

    def __call__(self, calls: Sequence[Arguments]) -> list[CallResults]:
        """The results of each call. Several calls must have equal shapes; they run side by side."""
        a = calls[0]
        if is_traced(a.input) or type(a.weight_hh) not in (Tensor, torch.nn.Parameter):
            return [self._traced(each) for each in calls]
        if not a.save:
            return _results_of(self.implementation.forward(calls, False), len(calls))
        moments: list[Moments] = []
        if len(calls) == 1:
            tensors = a[: self.gradients]
            results = _apply(self, calls, moments, *tensors)  # type: ignore[no-untyped-call]
            return [(*results, Statistics(*moments[0]))]
        tensors = [tensor for each in calls for tensor in each[: self.gradients]]
        output, *states = _apply(self, calls, moments, *tensors)  # type: ignore[no-untyped-call]
        # Split here, not inside the autograd node, which would then get one gradient per part.
        parts = zip(output.unbind(), *_in_groups(states, len(calls)), strict=True)
        own_moments = _moments_per_call(moments[0], len(calls))
        return [(*part, Statistics(*own)) for part, own in zip(parts, own_moments, strict=True)]

    def _traced(self, a: Arguments) -> CallResults:
        run = self._in_onnx if self._in_onnx is not None and exporting_to_onnx() else self.op
        results = run(*a)
        n = 1 + len(self.definition.states)
        moments = results[n : n + len(self.definition.moments)]
        return (*results[:n], Statistics(*(m if m.numel() > 0 else None for m in moments)))


def _results_of(results: Results, count: int) -> list[CallResults]:
    if count == 1:
        return [(results.output, *results.states, Statistics(*results.moments))]
    tensors = zip(*(value.unbind() for value in (results.output, *results.states)), strict=True)
    moments = _moments_per_call(results.moments, count)
    return [(*part, Statistics(*own)) for part, own in zip(tensors, moments, strict=True)]


def _moments_per_call(moments: Moments, count: int) -> list[Moments]:
    """Split stacked statistics into those of each call."""
    parts = ([None] * count if m is None else m.unbind() for m in moments)
    return list(zip(*parts, strict=True))


def _in_groups(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[k : k + size] for k in range(0, len(values), size)]


# Eager mode ---------------------------------------------------------------------------------------


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        calls: Sequence[Arguments],
        moments: list[Moments],
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        """Returns the output of all calls, then the last states of each.

        tensors: the calls' differentiable tensors, passed so that autograd sees them. The
        statistics are appended to `moments`, because autograd must not track them.
        """
        results = operator.implementation.forward(calls, False)
        moments.append(results.moments)
        count, n = operator.tensors, len(calls)
        ctx.set_materialize_grads(False)
        ctx.operator, ctx.calls, ctx.plan = operator, n, results.plan
        ctx.options, ctx.saved = calls[0][count:], type(results.saved)
        # The last states are not saved: no backward pass reads them, and users may change them.
        if n == 1:
            ctx.save_for_backward(*calls[0][:count], *results.saved)
            return (results.output, *results.states)
        ctx.save_for_backward(*(t for a in calls for t in a[:count]), *results.saved)
        return (results.output, *(part for state in results.states for part in state.unbind()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return _backward(ctx, *grads)


# Skips the Python code of `apply` that handles `torch.func` transforms, which never reach this.
_apply = super(torch.autograd.Function, _Recurrence).apply


def one_by_one(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward pass of an `autograd.Function` accept batched gradients.

    `torch.autograd.grad(is_grads_batched=True)` and `jacobian(vectorize=True)` pass all gradients
    at once, as batched tensors that no kernel can read. The wrapper processes them one by one.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        for grad in grads:
            if grad is not None and is_legacy_batchedtensor(grad):
                break
        else:
            return backward(ctx, *grads)
        level = 1  # of the only active vmap; the threads that run backward passes cannot query it
        parts: list[Any] = []
        for grad in grads:
            batched = grad is not None and is_legacy_batchedtensor(grad)
            parts.append(torch._remove_batch_dim(grad, level, 1, 0) if batched else None)
        size = next(len(part) for part in parts if part is not None)
        results = []
        _repeated.now = True
        try:
            for k in range(size):
                each = zip(grads, parts, strict=True)
                results.append(backward(ctx, *(g if part is None else part[k] for g, part in each)))
        finally:
            _repeated.now = False
        return tuple(
            None if values[0] is None else torch._add_batch_dim(torch.stack(values), 0, level)
            for values in zip(*results, strict=True)
        )

    return run


_repeated = threading.local()  # `now`: `one_by_one` is running several backward passes over a graph


@one_by_one
def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    operator: Operator = ctx.operator
    saved = ctx.saved_tensors
    definition, n, count = operator.definition, ctx.calls, operator.tensors
    ends = range(0, n * count, count)
    calls = [definition.arguments(*saved[k : k + count], *ctx.options) for k in ends]
    kept = ctx.saved(*saved[n * count :])
    states = grads[1:] if n == 1 else tuple(map(_stacked, _in_groups(grads[1:], n)))
    create_graph = torch.is_grad_enabled()
    consume = not create_graph and not graph_is_kept()
    needed = any(ctx.needs_input_grad[3 :: operator.gradients])  # the input comes first
    incoming = Incoming(grads[0], states, needed, consume)
    backward, device = operator.implementation.backward, calls[0].input.device.type
    if not create_graph and not torch.is_autocast_enabled(device):
        result = backward(calls, kept, ctx.plan, incoming)
    else:
        with torch.no_grad(), without_autocast(device):
            result = backward(calls, kept, ctx.plan, incoming)
    gradients: list[Tensor | None] = [
        None if tensor is None else own[name]
        for a, own in zip(calls, result, strict=True)
        for name, tensor in zip(definition.gradients, a, strict=False)
    ]
    if create_graph:
        origins = [t for t in (*saved, *grads) if t is not None]
        gradients = undifferentiable(operator.name, gradients, origins)
    return (None, None, None, *gradients)


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Stack one state's gradients of all calls, with zeros for missing ones; None if all are."""
    some = next((g for g in grads if g is not None), None)
    if some is None:
        return None
    return torch.stack([torch.zeros_like(some) if g is None else g for g in grads])


# Custom operators ---------------------------------------------------------------------------------


_LIBRARY = torch.library.Library("rbn", "FRAGMENT")


def register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register a custom operator ``rbn::NAME`` for all devices.

    `torch.library.custom_op` would do the same, with more Python in every call: 70 microseconds on
    one core of a Neoverse-N1.
    """
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rbn::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.rbn, name).default


def _custom_operators(operator: Operator) -> tuple[Any, Any]:
    """Register ``rbn::NAME`` and ``rbn::NAME_backward``.

    They return only tensors: an absent result becomes an empty tensor, and the saved tensors follow
    the other results.
    """
    definition, implementation = operator.definition, operator.implementation
    fields: tuple[str, ...] = implementation.Saved._fields
    saved_names = fields if implementation.returned is None else implementation.returned
    results_also_saved = [n for n in ("output", *definition.moments) if n in fields]
    nothing = implementation.Saved(**dict.fromkeys(fields))
    n_states, n_moments = len(definition.states), len(definition.moments)
    n_results = 1 + n_states + n_moments

    def flat(results: Results) -> tuple[Tensor, ...]:
        """All results as one tuple; a saved tensor that is also a result appears only once."""
        like = results.output
        values = [results.output, *results.states, *results.moments]
        seen = {id(value) for value in values if value is not None}
        saved = [getattr(results.saved, name) for name in saved_names]
        values += [None if id(value) in seen else value for value in saved]
        return tuple(like.new_empty(0) if v is None else v for v in values)

    def run(*args: Any) -> tuple[Tensor, ...]:
        return flat(implementation.forward([definition.arguments(*args)], True))

    def run_backward(*args: Any) -> tuple[Tensor, ...]:
        *grads, results, needed = args[: n_states + 3]
        a = definition.arguments(*args[n_states + 3 :])
        present = [value if value.numel() else None for value in results]
        by_name = dict(zip(("output", *definition.moments), present, strict=False))
        kept = {name: by_name[name] for name in results_also_saved}
        for name, value in zip(saved_names, present[len(by_name) :], strict=True):
            if value is not None:
                kept[name] = value
        incoming = Incoming(grads[0], tuple(grads[1:]), needed, consume=False)
        with without_autocast(a.input.device.type):
            (own,) = implementation.backward([a], nothing._replace(**kept), None, incoming)
        present = [None if getattr(a, n) is None else own[n] for n in definition.gradients]
        return tuple(a.input.new_empty(0) if v is None else v for v in present)

    def fake_backward(*args: Any) -> tuple[Tensor, ...]:
        needed = args[n_states + 2]
        a = definition.arguments(*args[n_states + 3 :])
        present = [getattr(a, name) for name in definition.gradients]
        present[0] = present[0] if needed else None
        return tuple(a.input.new_empty(0) if v is None else v.new_empty(v.shape) for v in present)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1 + n_states :])
        count = len(definition.tensors)
        ctx.options = inputs[count:]
        ctx.save_for_backward(*inputs[:count], output[0], *output[1 + n_states :])

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        count = len(definition.tensors)
        saved = ctx.saved_tensors
        tensors, results = saved[:count], list(saved[count:])
        needed = ctx.needs_input_grad[0]
        args = (*grads[: 1 + n_states], results, needed, *tensors, *ctx.options)
        result = dict(zip(definition.gradients, backward_op(*args), strict=True))
        names: tuple[str, ...] = definition.arguments._fields
        given = dict(zip(definition.tensors, tensors, strict=True))
        if not needed:
            result["input"] = None
        return tuple(result.get(n) if given.get(n) is not None else None for n in names)

    def refuse(ctx: Any, *grads: Any) -> None:
        _refuse_double_backward(operator.name)

    op = register(
        operator.name,
        f"({definition.schema}) -> {_tensors(n_results + len(saved_names))}",
        run,
        lambda *args: flat(implementation.fake(definition.arguments(*args))),
    )
    incoming_schema = ", ".join(f"Tensor? d{name}" for name in ("output", *definition.states))
    backward_op = register(
        f"{operator.name}_backward",
        f"({incoming_schema}, Tensor[] results, bool needs_input, {definition.schema}) -> "
        f"{_tensors(len(definition.gradients))}",
        run_backward,
        fake_backward,
    )
    torch.library.register_autograd(op, backward, setup_context=keep, lib=_LIBRARY)
    torch.library.register_autograd(backward_op, refuse, lib=_LIBRARY)
    return op, backward_op


def _tensors(n: int) -> str:
    """The return type of n tensors in PyTorch's schema language."""
    return "(" + ", ".join(["Tensor"] * n) + ")"


# Second derivatives -------------------------------------------------------------------------------


def _refuse_double_backward(name: str) -> None:
    raise RuntimeError(
        f"the fused {name} has no second derivative; run it under "
        'rbn.backend("reference") for double backward'
    )


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name_of_op = name
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        _refuse_double_backward(ctx.name_of_op)


def undifferentiable(
    name: str, gradients: Sequence[Tensor | None], origins: Sequence[Tensor]
) -> list[Tensor | None]:
    """Returns gradients that raise when differentiated again with respect to `origins`."""
    present = [gradient for gradient in gradients if gradient is not None]
    marked = iter(_Undifferentiable.apply(name, len(present), *present, *origins))  # type: ignore[no-untyped-call]
    return [None if gradient is None else next(marked) for gradient in gradients]


# The current context ------------------------------------------------------------------------------


class without_autocast:
    """Disables autocast for a device: a cheaper `torch.autocast(enabled=False)` for eager mode."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = torch.is_autocast_enabled(self._device)
        if self._before:
            torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *error: object) -> None:
        if self._before:
            torch.set_autocast_enabled(self._device, True)


def graph_is_kept() -> bool:
    """Whether another backward pass over the same graph may follow the current one."""
    if getattr(_repeated, "now", False):
        return True
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())


def is_traced(tensor: Tensor) -> bool:
    """Whether a compiler, tracer or dispatch mode is active, or this is a tensor subclass."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def needs_grad(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the forward pass must save tensors for the backward pass."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
