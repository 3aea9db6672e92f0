"""The output layer of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from rbn.nn import init


def softmax_layer(recurrent: nn.Module, features: int, classes: int) -> nn.Linear:
    """A linear layer with orthogonal weights, on the recurrent layer's device and in its dtype."""
    like = next(recurrent.parameters(), None)
    made: dict[str, Any] = {} if like is None else {"device": like.device, "dtype": like.dtype}
    result = nn.Linear(features, classes, **made)
    init.orthogonal_(result.weight)
    nn.init.zeros_(result.bias)
    return result
