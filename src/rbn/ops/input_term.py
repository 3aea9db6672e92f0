"""The input term W_x x_t of all steps at once, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.definition import Arguments, Definition


def padding(input: Tensor) -> int:
    """How many columns of zeros to append to the input.

    In half precision on a GPU the columns are padded to a multiple of 8, because cuBLAS has only
    slow kernels for rows that are not a multiple of 16 bytes, forward and backward. With one or two
    columns the padding would cost more than it saves.
    """
    columns = input.shape[-1]
    if columns % 8 == 0 or columns <= 2 or not input.is_cuda:
        return 0
    return -columns % 8 if input.dtype in (torch.float16, torch.bfloat16) else 0


def factors(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of the product, ``[..., I']`` and ``[G, I']``, zero-padded as `padding` says."""
    more = padding(input)
    return (F.pad(input, (0, more)), F.pad(weight, (0, more))) if more else (input, weight)


def input_product(input: Tensor, weight: Tensor) -> Tensor:
    """``input @ weight.T``, ``[..., I]`` and ``[G, I]``."""
    return F.linear(*factors(input, weight))


def without_padding(gradient: Tensor, columns: int) -> Tensor:
    """Drop the columns that `factors` added from the gradient of a factor."""
    same = gradient.shape[-1] == columns
    return gradient if same else gradient[..., :columns].contiguous()


def _unpadded(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return input, weight


def with_term(
    definition: Definition,
    a: Arguments,
    wx: Tensor | None = None,
    *,
    make_factors: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _unpadded,
    linear: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> tuple[Arguments, dict[str, Tensor | None]]:
    """The arguments with the input term ``[T, B, G]`` as input, and states expanded to ``[B, H]``.

    Also returns what to save: the term wx, and its factors x and w if they are not the arguments.

    Args:
        definition: the recurrence.
        a: its arguments.
        wx: the input term, if it is already computed.
        make_factors: gives the factors of the product, such as `factors`.
        linear: the product, ``[..., I]`` and ``[G, I]`` to ``[..., G]``.
    """
    a = with_states(definition, a)
    if a.weight_ih is None:
        return a, {}
    kept: dict[str, Tensor | None] = {}
    if wx is None:
        x, w = make_factors(a.input, a.weight_ih)
        wx = linear(x, w)
        kept = {"wx": wx, "x": None if x is a.input else x, "w": None if w is a.weight_ih else w}
    return a._replace(input=wx, weight_ih=None), kept


def with_states(definition: Definition, a: Arguments) -> Arguments:
    """The arguments with states expanded to ``[B, H]``."""
    batch, hidden = a.input.shape[1], a.weight_hh.shape[1]
    states = [name for name, shape in definition.shapes.items() if shape == "BH"]
    return a._replace(**{name: getattr(a, name).expand(batch, hidden) for name in states})


def through_term(
    a: Arguments,
    gradients: dict[str, Tensor | None],
    needs_input: bool,
    x: Tensor | None = None,
    w: Tensor | None = None,
) -> dict[str, Tensor | None]:
    """The backward pass of `with_term`: gradients with respect to the original arguments.

    x, w: the factors of the input term, if they are not the arguments.
    """
    for name in ("h0", "c0"):
        gradient = gradients.get(name)
        if gradient is not None and getattr(a, name).dim() == 1:
            gradients[name] = gradient.sum(0)
    dwx = gradients["input"]
    gradients.setdefault("weight_ih", None)
    if a.weight_ih is None or dwx is None:
        return gradients
    x, w = a.input if x is None else x, a.weight_ih if w is None else w
    columns = a.input.shape[-1]
    dw = dwx.flatten(0, 1).t().mm(x.reshape(-1, x.shape[-1]))
    gradients["weight_ih"] = without_padding(dw, columns)
    gradients["input"] = without_padding(torch.matmul(dwx, w), columns) if needs_input else None
    return gradients
