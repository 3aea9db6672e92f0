"""The fused recurrences on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from rbn.ops.cpu import lstm, rnn, scan
from rbn.ops.definition import GRU, LSTM, RNN, Arguments, Definition
from rbn.ops.operator import Operator
from rbn.ops.reference import linear_cross_entropy, symbol_rows

__all__ = ["joins", "linear_cross_entropy", "operator_for", "symbol_rows", "tf32_allowed"]

_OPERATORS = {
    "lstm": Operator(LSTM, "cpu", lstm.IMPLEMENTATION, in_onnx=scan.lstm),
    "rnn": Operator(RNN, "cpu", rnn.IMPLEMENTATION, in_onnx=scan.rnn),
    "gru": Operator(GRU, "cpu", rnn.IMPLEMENTATION, in_onnx=scan.rnn),
}


def operator_for(definition: Definition, calls: Sequence[Arguments]) -> Operator:
    """The operator of a recurrence."""
    return _OPERATORS[definition.name]


def joins(definition: Definition, calls: Sequence[Arguments]) -> bool:
    """Whether to run several calls at once: never, because one call keeps all cores busy."""
    return False


def tf32_allowed() -> bool:
    """Whether the operators may use TF32: no CPU has it."""
    return False
