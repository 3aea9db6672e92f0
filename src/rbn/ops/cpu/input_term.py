"""The input term W_x x_t, forward and backward, and initial states expanded to all rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from rbn.ops.definition import Arguments, Definition


def with_term(definition: Definition, a: Arguments, wx: Tensor | None = None) -> Arguments:
    """The arguments with the input term ``[T, B, G]`` as input, and states expanded to ``[B, H]``.

    wx: the input term, if it is already computed.
    """
    batch, hidden = a.input.shape[1], a.weight_hh.shape[1]
    states = [name for name, shape in definition.shapes.items() if shape == "BH"]
    given = {name: getattr(a, name).expand(batch, hidden) for name in states}
    if a.weight_ih is not None:
        given |= {"input": F.linear(a.input, a.weight_ih) if wx is None else wx, "weight_ih": None}
    return a._replace(**given)


def through_term(
    a: Arguments, gradients: dict[str, Tensor | None], needs_input: bool
) -> dict[str, Tensor | None]:
    """Take the gradients of what `with_term` returned back to the original arguments."""
    for name in ("h0", "c0"):
        gradient = gradients.get(name)
        if gradient is not None and getattr(a, name).dim() == 1:
            gradients[name] = gradient.sum(0)
    dwx = gradients["input"]
    gradients["weight_ih"] = None
    if a.weight_ih is None or dwx is None:
        return gradients
    rows = dwx.flatten(0, 1)
    gradients["weight_ih"] = rows.t().mm(a.input.reshape(-1, a.input.shape[-1]))
    gradients["input"] = rows.mm(a.weight_ih).view_as(a.input) if needs_input else None
    return gradients
