"""What every fused operator needs to become one of PyTorch's: a schema and an autograd formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

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


def like_inputs(a: Any, fields: Sequence[str]) -> tuple[Tensor, ...]:
    """Fresh tensors of the shape of each differentiable input, empty where it is absent."""
    values = (getattr(a, name) for name in fields)
    return tuple(
        a.wx.new_empty(0, dtype=compute_dtype(a.wx.dtype)) if v is None else v.new_empty(v.shape)
        for v in values
    )


def register_autograd(
    op: Any, backward_op: Any, inputs: type[Any], grads: Sequence[str], results: int
) -> None:
    """Wire an operator to its backward one.

    results: how many of the operator's outputs are differentiable, the first ones.
    """
    names = inputs._fields

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[results:])
        population = inputs[names.index("population")]
        is_tensor = [isinstance(v, Tensor) for v in inputs]
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        ctx.save_for_backward(*tensors, *population, *output)
        ctx.layout = is_tensor, len(tensors), len(population)
        ctx.plain = [None if isinstance(v, Tensor) else v for v in inputs]

    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        is_tensor, n, m = ctx.layout
        saved = list(ctx.saved_tensors)
        tensors, population, output = iter(saved[:n]), saved[n : n + m], saved[n + m :]
        args = [
            next(tensors) if tensor else value
            for tensor, value in zip(is_tensor, ctx.plain, strict=True)
        ]
        args[names.index("population")] = population
        found = backward_op(*grad_outputs[:results], output, *args)
        by_name: dict[str, Any] = dict(zip(grads, found, strict=True))
        by_name["population"] = [None] * m
        return tuple(
            by_name[name] if name in by_name and (tensor or name == "population") else None
            for name, tensor in zip(names, is_tensor, strict=True)
        )

    op.register_autograd(backward, setup_context=setup_context)
    backward_op.register_autograd(_no_double_backward(op._opoverload._schema.name.split("::")[1]))
