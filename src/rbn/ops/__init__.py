"""Pure functions on tensors: the recurrences, forward and backward."""

from rbn.ops.dispatch import backend, backends
from rbn.ops.functional import bn_lstm, bn_rnn, ln_lstm, lstm, side_by_side, symbol_rows
from rbn.ops.types import Statistics

__all__ = [
    "Statistics",
    "backend",
    "backends",
    "bn_lstm",
    "bn_rnn",
    "ln_lstm",
    "lstm",
    "side_by_side",
    "symbol_rows",
]
