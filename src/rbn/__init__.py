"""Normalized recurrent networks for PyTorch (Cooijmans et al., ICLR 2017).

Layers that replace `torch.nn.LSTM`: `BatchNormLSTM`, and `LSTM`, `LayerNormLSTM`, `BatchNormGRU`
and `BatchNormRNN`, each with a ``...Cell`` that runs one step at a time.
"""

from rbn.nn import (
    LSTM,
    BatchNormGRU,
    BatchNormGRUCell,
    BatchNormLSTM,
    BatchNormLSTMCell,
    BatchNormRNN,
    BatchNormRNNCell,
    FoldedLSTM,
    LayerNormLSTM,
    LayerNormLSTMCell,
    LSTMCell,
    PopulationStatistics,
    average_population_stats,
    batch_statistics,
    fold,
    init,
    match_statistics,
    update_population_stats,
)
from rbn.ops import backend, backends
from rbn.pretrained_models import pretrained

__version__ = "0.2.0"

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
    "__version__",
    "average_population_stats",
    "backend",
    "backends",
    "batch_statistics",
    "fold",
    "init",
    "match_statistics",
    "pretrained",
    "update_population_stats",
]
