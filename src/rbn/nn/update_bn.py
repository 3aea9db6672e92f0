"""Makes `torch.optim.swa_utils.update_bn` work with batch-normalized recurrent layers."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn


class Owner(Protocol):
    """The part of a layer that `UpdateBN` uses."""

    momentum: float | None

    def reset_running_stats(self) -> None:
        """Discard the running averages."""

    def mark_fresh(self) -> None:
        """Declare that the statistics belong to the current weights."""


class UpdateBN(nn.modules.batchnorm._BatchNorm):
    """Represents a recurrent layer to tools that look for PyTorch's batch normalization.

    `update_bn` and Lightning's `StochasticWeightAveraging` reset each `_BatchNorm` module, set its
    momentum to None for one pass over the data, and then restore it. This module is a child of the
    layer, without parameters or buffers, and forwards these calls to it.
    """

    def __init__(self, owner: Owner) -> None:
        nn.Module.__init__(self)
        self.num_features, self.eps = 0, 0.0
        self.affine = self.track_running_stats = False
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        # Lightning resets these itself. Plain tensors do not appear in state dicts.
        self.running_mean = self.running_var = torch.empty(0)
        self.num_batches_tracked = torch.zeros((), dtype=torch.int64)
        self.link(owner)

    def link(self, owner: Owner) -> None:
        """Represent this layer from now on."""
        self.__dict__["_owner"] = weakref.ref(owner)

    @property
    def momentum(self) -> float | None:
        """The layer's momentum."""
        return self._layer().momentum

    @momentum.setter
    def momentum(self, value: float | None) -> None:
        layer = self._layer()
        layer.momentum = value
        if value is None:  # a pass over the data begins
            layer.reset_running_stats()
        else:  # and ends
            layer.mark_fresh()

    def reset_running_stats(self) -> None:
        """Discard the layer's running averages."""
        self._layer().reset_running_stats()

    def reset_parameters(self) -> None:
        """Does nothing: there are no parameters, and the layer resets its own."""

    def _layer(self) -> Owner:
        layer: Owner | None = self.__dict__["_owner"]()
        assert layer is not None
        return layer

    def __getstate__(self) -> dict[str, Any]:
        """State without the link to the layer. A copy of the layer links itself again."""
        return {name: value for name, value in self.__dict__.items() if name != "_owner"}

    def extra_repr(self) -> str:
        """Empty: there are no options to show."""
        return ""
