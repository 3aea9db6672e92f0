"""The reference as a backend: from an operator's arguments to the plain equations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from rbn.ops.definition import Arguments, Definition
from rbn.ops.input_term import input_product
from rbn.ops.reference.bn_gru import bn_gru
from rbn.ops.reference.bn_lstm import bn_lstm
from rbn.ops.reference.bn_rnn import bn_rnn
from rbn.ops.reference.ln_lstm import ln_lstm
from rbn.ops.reference.lstm import lstm
from rbn.ops.types import Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def run(definition: Definition, a: Arguments, group: ProcessGroup | None) -> tuple[Any, ...]:
    """The results of one call: output, last states and statistics."""
    input: Tensor = a.input
    wx = input if a.weight_ih is None else input_product(input, a.weight_ih)
    rows = wx.shape[1], a.weight_hh.shape[1]
    given: dict[str, Any] = {"lengths": a.lengths, "zoneout_h": _zoneout(a, "h")}
    population = None
    if a.mean_h is not None:
        population = Statistics(*(getattr(a, name) for name in definition.moments))
    statistics = {
        "population": population,
        "input_stats": a.input_stats,
        "padding": a.padding,
        "min_rows": a.min_rows,
    }
    if len(definition.states) == 1:
        of_rnn = (wx, a.weight_hh, a.bias, a.gamma_x, a.gamma_h, a.h0.expand(rows))
        given |= statistics | {"eps": a.eps, "group": group}
        if definition.name == "gru":
            return bn_gru(*of_rnn, a.beta_n, **given)
        return bn_rnn(*of_rnn, nonlinearity=a.nonlinearity, **given)
    given["zoneout_c"] = _zoneout(a, "c")
    states = a.h0.expand(rows), a.c0.expand(rows)
    if a.norm == "none":
        return (*lstm(wx, a.weight_hh, a.bias, a.beta_c, *states, **given), Statistics())
    tensors = (wx, a.weight_hh, a.bias, a.gamma_x, a.gamma_h, a.gamma_c, a.beta_c, *states)
    given["eps"] = a.eps
    if a.norm == "layer":
        return (*ln_lstm(*tensors, **given), Statistics())
    given |= statistics | {"pass_normalized_cell": a.pass_normalized_cell, "group": group}
    return bn_lstm(*tensors, **given)


def _zoneout(a: Arguments, state: str) -> Tensor | float:
    mask: Tensor | None = getattr(a, f"mask_{state}")
    rate: float = getattr(a, f"rate_{state}")
    return rate if mask is None else mask
