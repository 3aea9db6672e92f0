"""Computes the input term of step-by-step recurrences, and expands initial states to all rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.definition import Arguments, Definition
from rbn.ops.gpu.lstm.prepare import padded_factors, without_padding


def with_term(
    definition: Definition, a: Arguments, wx: Tensor | None = None, separate: bool = False
) -> tuple[Arguments, dict[str, Tensor | None]]:
    """The arguments with the input term ``[T, B, G]`` as input and states expanded to ``[B, H]``.

    Also returns what to save: the term, and those of its factors that are not the arguments.
    wx: the input term, if it is already computed.
    separate: do not save the factors, which may share memory.
    """
    batch, hidden = a.input.shape[1], a.weight_hh.shape[1]
    states = [name for name, shape in definition.shapes.items() if shape == "BH"]
    given = {name: getattr(a, name).expand(batch, hidden) for name in states}
    if a.weight_ih is None:
        return a._replace(**given), {}
    kept: dict[str, Tensor | None] = {}
    if wx is None:
        x, w = padded_factors(a.input, a.weight_ih)
        wx = F.linear(x, w)
        kept = {"wx": wx}
        if not separate:  # both may be views of one buffer
            kept |= {"x": None if x is a.input else x, "w": None if w is a.weight_ih else w}
    return a._replace(input=wx, weight_ih=None, **given), kept


def through_term(
    a: Arguments, saved: Any, gradients: dict[str, Tensor | None], needs_input: bool
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
    x, w = a.input if saved.x is None else saved.x, a.weight_ih if saved.w is None else saved.w
    rows, columns = dwx.flatten(0, 1), a.input.shape[-1]
    dw = rows.t().mm(x.reshape(-1, x.shape[-1]))
    gradients["weight_ih"] = without_padding(dw, columns)
    gradients["input"] = None
    if needs_input:
        gradients["input"] = without_padding(torch.matmul(dwx, w), columns)
    return gradients
