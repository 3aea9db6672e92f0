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
    states = {name: getattr(a, name).expand(rows) for name in ("h0", "c0") if hasattr(a, name)}
    a = definition.replaced(a, {"input": wx, "weight_ih": None} | states)
    if definition.name != "lstm":
        return (bn_gru if a.gated else bn_rnn)(a, group)
    if a.norm == "batch":
        return bn_lstm(a, group)
    return (*(lstm(a) if a.norm == "none" else ln_lstm(a)), Statistics())
