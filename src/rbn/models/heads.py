"""The last layer of a model, made to fit what comes before it."""

from __future__ import annotations

from typing import Any

from torch import nn

from rbn.nn import init


def softmax_layer(recurrent: nn.Module, features: int, classes: int) -> nn.Linear:
    """A linear layer with orthogonal weights, of the device and type of the recurrent layer."""
    like = next(recurrent.parameters(), None)
    made: dict[str, Any] = {} if like is None else {"device": like.device, "dtype": like.dtype}
    result = nn.Linear(features, classes, **made)
    init.orthogonal_(result.weight)
    nn.init.zeros_(result.bias)
    return result
