"""The optimiser of a config."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from rbn.experiments.config import Config, check_names
from rbn.training import Adam, AdamW

_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
# One pass over parameters and moments instead of ten.
_FUSED: dict[type, type] = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW}


def make_optimizer(config: Config, model: nn.Module, graph: bool = False) -> torch.optim.Optimizer:
    """The optimiser of a config.

    Args:
        config: its `optimizer` and `decay_from` matter.
        model: the parameters to optimise.
        graph: whether a CUDA graph will capture the optimiser's step.
    """
    options = dict(config.optimizer)
    name = options.pop("name")
    kind = _OPTIMIZERS[name]
    check_names("optimizer", options, kind)
    device = next(model.parameters()).device
    if graph and kind is not torch.optim.SGD:
        options["capturable"] = True
    if device.type == "cuda" and kind in _FUSED and options.pop("fused", True):
        kind = _FUSED[kind]
    if graph and config.decay_from < 1:
        rate = options.get("lr", inspect.signature(_OPTIMIZERS[name]).parameters["lr"].default)
        options["lr"] = torch.tensor(float(rate), device=device)
    parameters: list[Any] = list(model.parameters())
    if name == "adamw":
        # Weights before a normalization are scale-invariant: there, weight decay only keeps the
        # relative step size from shrinking. The scale of gammas, betas and biases matters.
        decayed = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        parameters = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    if "betas" in options:
        options["betas"] = tuple(map(float, options["betas"]))  # torch rejects the integer 0
    try:
        optimizer: torch.optim.Optimizer = kind(parameters, **options)
    except (AssertionError, LookupError, RuntimeError) as error:
        raise ValueError(f"the optimizer's settings are not valid: {error}") from error
    return optimizer
