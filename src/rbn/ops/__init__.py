"""Pure functions on tensors: the recurrences and a loss, forward and backward."""

from rbn.ops.dispatch import backend, backends
from rbn.ops.functional import (
    bn_gru,
    bn_lstm,
    bn_rnn,
    linear_cross_entropy,
    ln_lstm,
    lstm,
    symbol_rows,
)
from rbn.ops.types import Statistics

__all__ = [
    "Statistics",
    "backend",
    "backends",
    "bn_gru",
    "bn_lstm",
    "bn_rnn",
    "linear_cross_entropy",
    "ln_lstm",
    "lstm",
    "symbol_rows",
]
