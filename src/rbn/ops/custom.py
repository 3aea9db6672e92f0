"""What makes a pair of functions, forward and backward, one of PyTorch's operators."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from rbn.ops.compiling import exporting_to_onnx
from rbn.ops.types import compute_dtype


def results(n: int) -> str:
    """The part of a schema that says that an operator returns n tensors."""
    return "(" + ", ".join(["Tensor"] * n) + ")"


def _no_double_backward(op: str) -> Any:
    """What the backward operator does when it is itself differentiated."""

    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(
            f"the fused {op} has no second derivative; run it under "
            'rbn.backend("reference") for double backward'
        )

    return backward


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        _no_double_backward(ctx.op)(ctx, *grads)


def undifferentiable(
    op: str, gradients: Sequence[Tensor | None], origins: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients, which depend on `origins`, such that they refuse to be differentiated."""
    present = [gradient for gradient in gradients if gradient is not None]
    tensors = [tensor for tensor in origins if tensor is not None]
    marked = iter(_Undifferentiable.apply(op, len(present), *present, *tensors))  # type: ignore[no-untyped-call]
    return [None if gradient is None else next(marked) for gradient in gradients]


def without_second_derivative(op: str, backward: Any) -> Any:
    """A backward function, see `Formula.gradients`, whose results refuse to be differentiated."""

    def run(*given: Any) -> Any:
        with torch.no_grad():
            found = tuple(backward(*given))
        return undifferentiable(op, found, [v for v in given if isinstance(v, Tensor)])

    return run


_repeated = threading.local()  # `now`: the backward pass of this thread goes over a graph again


def one_by_one(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of an `autograd.Function`, for a batch of gradients too.

    `torch.autograd.grad(is_grads_batched=True)` and `jacobian(vectorize=True)` pass on
    all gradients at once, as tensors that no kernel can read. They are taken one after the other.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if not any(grad is not None and is_legacy_batchedtensor(grad) for grad in grads):
            return backward(ctx, *grads)
        level = 1  # of the only vmap there is; threads that run backward passes do not know it
        parts: list[Any] = []
        for grad in grads:
            batched = grad is not None and is_legacy_batchedtensor(grad)
            parts.append(torch._remove_batch_dim(grad, level, 1, 0) if batched else None)
        size = next(len(part) for part in parts if part is not None)
        found = []
        _repeated.now = True
        try:
            for k in range(size):
                each = zip(grads, parts, strict=True)
                found.append(backward(ctx, *(g if part is None else part[k] for g, part in each)))
        finally:
            _repeated.now = False
        return tuple(
            None if values[0] is None else torch._add_batch_dim(torch.stack(values), 0, level)
            for values in zip(*found, strict=True)
        )

    return run


def like_inputs(a: Any, fields: Sequence[str]) -> tuple[Tensor, ...]:
    """Fresh tensors of the shape of each differentiable input, empty where it is absent."""
    values = (getattr(a, name) for name in fields)
    return tuple(
        a.wx.new_empty(0, dtype=compute_dtype(a.wx.dtype)) if v is None else v.new_empty(v.shape)
        for v in values
    )


_SAVED = object()  # in the place of a tensor that autograd keeps


class Formula:
    """How an operator is differentiated: what is kept, and what is made of it.

    inputs: the operator's arguments, a NamedTuple whose `population` is a list of tensors.
    grads: the names of those with a gradient.
    results: how many of the operator's outputs are differentiable, the first ones.
    """

    def __init__(self, inputs: type[Any], grads: Sequence[str], results: int) -> None:
        names: tuple[str, ...] = inputs._fields
        self.results, self.list_at = results, names.index("population")
        self.grads_at = [names.index(name) for name in grads]
        hints = get_type_hints(inputs)
        self.tensors_at = [k for k, n in enumerate(names) if hints[n] in (Tensor, Tensor | None)]

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save everything for the backward pass."""
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[self.results :])
        tensors: list[Tensor] = []
        plain = list(inputs)
        for at in self.tensors_at:
            if plain[at] is not None:
                tensors.append(plain[at])
                plain[at] = _SAVED
        population = inputs[self.list_at]
        # Without the last states, which users may change: no backward pass looks at them.
        ctx.save_for_backward(*tensors, *population, output[0], *output[self.results :])
        ctx.plain, ctx.counts = plain, (len(tensors), len(population))

    def gradients(self, ctx: Any, grad_outputs: Sequence[Any], backward: Any) -> list[Any]:
        """One for each argument; None for those without, and for the list.

        backward: takes the results' gradients, the operator's outputs, and its arguments.
        """
        n, m = ctx.counts
        saved = ctx.saved_tensors
        tensors = iter(saved[:n])
        args = list(ctx.plain)
        for at in self.tensors_at:
            if args[at] is not None:
                args[at] = next(tensors)
        args[self.list_at] = list(saved[n : n + m])
        first, *rest = saved[n + m :]
        output = [first] * self.results + rest  # the first stands in for last states
        found = backward(*grad_outputs[: self.results], output, *args)
        gradients: list[Any] = [None] * len(args)
        for at, gradient in zip(self.grads_at, found, strict=True):
            if ctx.plain[at] is _SAVED:
                gradients[at] = gradient
        return gradients


class Operator:
    """An operator with its autograd formula, called the shortest way.

    PyTorch's compiler and other tracers see the custom operator. In eager mode its Python wrapping
    would cost more than many a kernel, so the same functions run as an `autograd.Function`.

    consuming: what runs in the place of `backward_op` where nobody will need again what the forward
        pass saved, and it may be overwritten; by default the same.
    direct: what runs in the place of `op` in eager mode; by default the same function.
    in_onnx: what `torch.onnx.export` sees in the place of `op`, made of PyTorch's own operators.
    """

    def __init__(
        self,
        op: Any,
        backward_op: Any,
        formula: Formula,
        consuming: Any | None = None,
        direct: Any | None = None,
        in_onnx: Any | None = None,
    ) -> None:
        self.op, self._in_onnx = op, in_onnx or op
        forward, backward = direct or op._init_fn, backward_op._init_fn

        def op_backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
            found = formula.gradients(ctx, grad_outputs, backward_op)
            found[formula.list_at] = [None] * ctx.counts[1]
            return tuple(found)

        def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            formula.keep(ctx, inputs, output)

        op.register_autograd(op_backward, setup_context=keep)
        name = op._opoverload._schema.name.split("::")[1]
        backward_op.register_autograd(_no_double_backward(name))

        self._direct = Direct(formula, forward, backward, consuming or backward, backward_op)

    def __call__(self, *args: Any) -> Any:
        """The outputs, the first of them differentiable."""
        if not is_traced(args[0]):
            return self._direct(*args)
        return self._in_onnx(*args) if exporting_to_onnx() else self.op(*args)


class Direct:
    """A pair of functions as an `autograd.Function`, which tracers do not see.

    forward: takes what `formula` says. backward: see `Formula.gradients`. consuming: the same where
        nobody will need again what was kept. in_graph: the same where gradients are to be
        differentiated, too.
    """

    def __init__(
        self, formula: Formula, forward: Any, backward: Any, consuming: Any, in_graph: Any
    ) -> None:
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
                output: tuple[Tensor, ...] = forward(*args)
                formula.keep(ctx, args, output)
                return output

            @staticmethod
            @one_by_one
            def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
                if torch.is_grad_enabled():
                    # With create_graph the operator says, if asked, that there is no second
                    # derivative.
                    run = in_graph
                else:
                    run = backward if graph_is_kept() else consuming
                return tuple(formula.gradients(ctx, grad_outputs, run))

        self.forward = forward
        # Without what Python does first for transforms of `torch.func`, under which nobody calls.
        self._apply = super(torch.autograd.Function, Function).apply

    def __call__(self, *args: Any) -> Any:
        """The outputs, the first of them differentiable."""
        if not torch.is_grad_enabled():
            return self.forward(*args)
        return self._apply(*args)  # type: ignore[no-untyped-call]


class without_autocast:
    """`torch.autocast` of a device, disabled: no more than that, and for eager mode alone."""

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
    """Whether the backward pass that runs now may be followed by another over the same graph."""
    if getattr(_repeated, "now", False):
        return True
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())


def is_traced(tensor: Tensor) -> bool:
    """Whether someone watches the operators that run, or tensors are not what they seem."""
    return (
        torch.compiler.is_compiling()
        or type(tensor) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )
