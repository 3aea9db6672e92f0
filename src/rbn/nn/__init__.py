"""Modules around the recurrences: layers, cells, population statistics, initialisation."""

from rbn.nn import init
from rbn.nn.batch_norm_gru import BatchNormGRU, BatchNormGRUCell
from rbn.nn.batch_norm_lstm import BatchNormLSTM, BatchNormLSTMCell
from rbn.nn.batch_norm_rnn import BatchNormRNN, BatchNormRNNCell
from rbn.nn.folded import FoldedLSTM, fold
from rbn.nn.layer_norm_lstm import LayerNormLSTM, LayerNormLSTMCell
from rbn.nn.lstm import LSTM, LSTMCell
from rbn.nn.match import match_statistics
from rbn.nn.population import (
    average_population_stats,
    batch_statistics,
    keep_running_averages,
    kept_statistics,
    own_statistics,
    update_population_stats,
)
from rbn.nn.statistics import PopulationStatistics

__all__ = [
    "LSTM",
    "BatchNormGRU",
    "BatchNormGRUCell",
    "BatchNormLSTM",
    "BatchNormLSTMCell",
    "BatchNormRNN",
    "BatchNormRNNCell",
    "FoldedLSTM",
    "LSTMCell",
    "LayerNormLSTM",
    "LayerNormLSTMCell",
    "PopulationStatistics",
    "average_population_stats",
    "batch_statistics",
    "fold",
    "init",
    "keep_running_averages",
    "kept_statistics",
    "match_statistics",
    "own_statistics",
    "update_population_stats",
]
