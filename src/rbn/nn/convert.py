"""Layers of this package from `torch.nn.LSTM`; the way back is `rbn.LSTM.to_lstm`."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from rbn.nn.recurrence import Layers

T = TypeVar("T", bound="LSTMLayers")


class LSTMLayers(Layers[tuple[Tensor, Tensor]]):
    """A stack with the weights of `torch.nn.LSTM`, gate by gate."""

    @classmethod
    def from_lstm(cls: type[T], lstm: nn.LSTM, **options: object) -> T:
        """A new module that starts from the weights of `lstm`.

        Sizes, layout, dropout, dtype and device are those of `lstm`, its two biases become their
        sum; `options` are this class's own.
        """
        if not isinstance(lstm, nn.LSTM):
            raise TypeError(f"lstm must be a torch.nn.LSTM, got {type(lstm).__name__}")
        if lstm.proj_size:
            raise ValueError(f"an LSTM with proj_size={lstm.proj_size} has no counterpart here")
        weight = lstm.weight_ih_l0
        new = cls(
            lstm.input_size,
            lstm.hidden_size,
            lstm.num_layers,
            lstm.bias,
            lstm.batch_first,
            lstm.dropout,
            lstm.bidirectional,
            device=weight.device,
            dtype=weight.dtype,
            **cast(dict[str, Any], options),
        )
        new.train(lstm.training)
        with torch.no_grad():
            for layer in range(new.num_layers):
                for suffix in new._suffixes(layer):
                    for name in ("weight_ih", "weight_hh"):
                        getattr(new, name + suffix).copy_(getattr(lstm, name + suffix))
                    if lstm.bias:
                        both = [getattr(lstm, name + suffix) for name in ("bias_ih", "bias_hh")]
                        getattr(new, "bias" + suffix).copy_(both[0] + both[1])
        return new
