"""The recurrent layer of a config."""

from __future__ import annotations

from typing import Any

from torch import nn

import rbn
from rbn.experiments.config import Config, check_names

_LAYERS = {
    "lstm": rbn.LSTM,
    "bn-lstm": rbn.BatchNormLSTM,
    "ln-lstm": rbn.LayerNormLSTM,
    "bn-gru": rbn.BatchNormGRU,
    "bn-rnn": rbn.BatchNormRNN,
}


def recurrent_layer(config: Config, input_size: int) -> nn.Module:
    """The recurrent layer of a config, initialized."""
    options: dict[str, Any] = dict(config.layer)
    if config.model in ("rnn", "irnn"):
        # The settings of some tasks have noise in the initial state; torch.nn.RNN has none.
        unknown = sorted(set(options) - {"hidden_noise"})
        if unknown:
            raise ValueError(f"model {config.model} is torch.nn.RNN, which has no {unknown[0]}")
        kind = "relu" if config.model == "irnn" else "tanh"
        layer: nn.Module = nn.RNN(input_size, config.hidden_size, nonlinearity=kind)
        if config.model == "irnn":  # Le et al. (2015)
            rbn.init.identity_recurrent_(layer)
            for name, parameter in layer.named_parameters():
                if name.startswith("bias"):
                    nn.init.zeros_(parameter)
        return layer
    layer_class = _LAYERS[config.model]
    check_names("layer", config.layer, layer_class)
    if config.batch_normalized:
        check_names("normalization", config.normalization, layer_class)
        options |= config.normalization
    layer = layer_class(input_size, config.hidden_size, **options)
    if config.start != "orthogonal":
        blocks: Any = config.start.removeprefix("identity-")
        rbn.init.identity_recurrent_(layer, blocks)
    return layer


def check_layer(config: Config) -> nn.Module:
    """Build the layer, which rejects invalid options, including those of `normalization`.

    All models share a config, so `normalization` is also checked for models that do not use it.
    """
    layer = recurrent_layer(config, 1)
    if not config.batch_normalized:
        check_names("normalization", config.normalization, rbn.BatchNormLSTM)
        rbn.BatchNormLSTM(1, config.hidden_size, **config.normalization)
    return layer
