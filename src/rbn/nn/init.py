"""Initializations of the paper and its code.

All work in place on the parameters of an `rbn` layer or cell, for every layer and direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

_FORGET = 1  # torch's gate order is i, f, g, o


def orthogonal_(weight: Tensor, gain: float = 1.0) -> Tensor:
    """Fill weight ``[n, m]`` with orthonormal rows or columns, whichever are fewer.

    Treats a ``[4H, n]`` matrix as one, not gate by gate, as in the authors' code.
    """
    with torch.no_grad():
        if weight.dtype in (torch.float16, torch.bfloat16):  # no QR solver for these
            return weight.copy_(nn.init.orthogonal_(weight.float(), gain))
        return nn.init.orthogonal_(weight, gain)


def _parameters(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields module, name and value of each parameter with this prefix, to be written in place.

    A parameter computed by `torch.nn.utils.parametrize` is yielded as a copy, which is assigned
    back when the next one is requested.
    """
    for path, owner in module.named_modules():
        if "parametrizations" in path.split("."):  # originals of computed parameters
            continue
        for name, parameter in owner._parameters.items():
            if parameter is not None and name.startswith(prefix):
                yield owner, name, parameter
        for name in getattr(owner, "parametrizations", ()):
            if name.startswith(prefix):
                value = getattr(owner, name).detach().clone()
                yield owner, name, value
                setattr(owner, name, value)


def zeros_but_weights_(module: nn.Module) -> None:
    """Zero biases, gammas, initial states and everything else except weight_ih and weight_hh."""
    with torch.no_grad():
        for _, name, parameter in _parameters(module, ""):
            if not name.startswith("weight_"):
                parameter.zero_()


def orthogonal_weights_(module: nn.Module) -> None:
    """Make every weight_ih and weight_hh orthogonal."""
    for _, _, weight in _parameters(module, "weight_"):
        orthogonal_(weight)


def identity_recurrent_(
    module: nn.Module, blocks: Literal["candidate", "all"] = "candidate"
) -> None:
    """Initialize the recurrent weights as in the MNIST experiments.

    ``"candidate"``, as in the authors' code: the block of the candidate g (of a GRU, n) is the
    identity, and the gates together are one orthogonal matrix, ``[3H, H]``. ``"all"``, as in the
    paper's text: each block is the identity. For a simple RNN both give the identity.
    """
    if blocks not in ("candidate", "all"):
        raise ValueError(f"blocks must be 'candidate' or 'all', got {blocks!r}")
    with torch.no_grad():
        for _, _, weight in _parameters(module, "weight_hh"):
            hidden = weight.shape[1]
            eye = torch.eye(hidden, device=weight.device, dtype=weight.dtype)
            if blocks == "all" or len(weight) == hidden:
                weight.copy_(eye.repeat(len(weight) // hidden, 1))
                continue
            gates = orthogonal_(weight.new_empty(len(weight) - hidden, hidden))
            weight.copy_(torch.cat([gates[: 2 * hidden], eye, gates[2 * hidden :]]))


def repeated_gates_(module: nn.Module, scale: float = 0.05) -> None:
    """Initialize as the authors' Attentive Reader: the same block for every gate.

    A square block ``[H, H]`` is `scale` times an orthogonal matrix; any other ``[H, n]`` is uniform
    within ``sqrt(6 / (n + H + 1))``. Blocks of the same shape are equal in all layers, directions
    and encoders, for input and recurrent weights, because the authors' code uses the same seed for
    every draw (``ortho_weight`` and ``norm_weight`` in ``codes/att_reader/utils.py``, branch ``bn``
    of `cooijmanstim/Attentive_reader`).
    """
    blocks: dict[int, Tensor] = {}
    with torch.no_grad():
        for owner, _, weight in _parameters(module, "weight_"):
            hidden: Any = owner.hidden_size
            features = weight.shape[1]
            if features not in blocks:
                block = weight.new_empty(hidden, features)
                bound = (6 / (features + hidden + 1)) ** 0.5
                square = features == hidden
                blocks[features] = (
                    orthogonal_(block, scale) if square else block.uniform_(-bound, bound)
                )
            weight.copy_(blocks[features].repeat(len(weight) // hidden, 1))


def forget_bias_(module: nn.Module, value: float = 1.0) -> None:
    """Set the forget gate's part of every LSTM bias."""
    with torch.no_grad():
        for owner, name, bias in _parameters(module, "bias"):
            weight = getattr(owner, "weight_hh" + name.removeprefix("bias"), None)
            if weight is not None and len(weight) == 4 * weight.shape[1]:
                bias.view(4, -1)[_FORGET].fill_(value)


def gamma_(module: nn.Module, value: float = 0.1) -> None:
    """Set every scale gamma_x, gamma_h and gamma_c (section 4 of the paper)."""
    with torch.no_grad():
        for _, _, gamma in _parameters(module, "gamma_"):
            gamma.fill_(value)
