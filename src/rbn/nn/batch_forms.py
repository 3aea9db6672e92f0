"""Runs a model on a batch in any form that data loaders and trainers produce."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
FORWARD_HINT = "pass forward=, e.g. forward=lambda model, batch: model(batch[0], lengths=batch[1])"


def default_forward(
    device: torch.device | str | None, trained_with_lengths: bool = False
) -> Callable[[nn.Module, Any], object]:
    """Returns a function that calls a model with the inputs in a batch.

    - A tensor or `PackedSequence` is the input.
    - The entries of a mapping (a dict, a Hugging Face `BatchEncoding`) are keyword arguments. Those
      that the model's `forward` has no parameter for are dropped.
    - A tuple or list starts with the inputs: as many as `forward` has parameters without a default,
      at least one. The rest (targets) is dropped. Raises `TypeError` if two or more elements are
      left over and `forward` could take one of them: the batch could be
      ``(input, lengths, target)`` as well as ``(input, target, weight)``. Also raises it, with
      `trained_with_lengths`, for integers ``[B]`` that are left over and could be the lengths.
    - The first element of a tuple or list may itself be a mapping, or a tuple or list of arguments:
      ``({"input": x, "lengths": n}, target)``, ``((x, n), target)``.
    - Any other object is passed unchanged.

    device: moves all tensors of a batch there first, at any depth; None does not move them.
    """

    def forward(model: nn.Module, batch: Any) -> object:
        if device is not None:
            batch = _to_device(batch, device)
        args, kwargs = _arguments(model, batch, trained_with_lengths)
        return model(*args, **kwargs)

    return forward


def check_batch(model: nn.Module, batch: Any) -> None:
    """Raise what `default_forward` would raise for this batch, without calling the model."""
    _arguments(model, batch, trained_with_lengths(model))


def _arguments(
    model: nn.Module, batch: Any, trained_with_lengths: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if batch is None or isinstance(batch, (str, bytes, bool, int, float)):
        raise TypeError(
            "a batch must be a tensor, a tuple, a list or a mapping, got "
            f"{type(batch).__name__}: {FORWARD_HINT}"
        )
    if isinstance(batch, Mapping):
        return (), _keywords(model, batch)
    if not _is_sequence(batch):
        return (batch,), {}
    if not batch:
        raise ValueError("batches contains an empty tuple or list instead of a batch")
    first = batch[0]
    if isinstance(first, Mapping):
        return (), _keywords(model, first)
    parameters, takes_any = _positional(model)
    required = sum(p.default is inspect.Parameter.empty for p in parameters)
    if _is_sequence(first):  # a group of arguments, or one argument that is a tuple
        fits = required <= len(first) <= len(parameters) or takes_any
        return (tuple(first) if fits else (first,)), {}
    inputs = max(1, required)
    if len(batch) < inputs:
        raise TypeError(
            f"{type(model).__name__}.forward needs {_names(parameters[:inputs])}, got a batch of "
            f"{len(batch)} elements: {FORWARD_HINT}"
        )
    takes_lengths = trained_with_lengths and any("len" in p.name for p in parameters[inputs:])
    if takes_lengths and len(batch) == inputs + 1 and _is_integers(batch[-1]):
        raise TypeError(
            f"got a batch of {len(batch)} elements: the last could be lengths, as in training, or "
            f"targets. {FORWARD_HINT}, or make each batch a dict of named arguments"
        )
    if len(batch) > inputs + 1 and len(parameters) > inputs:
        raise TypeError(
            f"got a batch of {len(batch)} elements, but {type(model).__name__}.forward takes "
            f"{_names(parameters)}: cannot tell which element is which. {FORWARD_HINT}, or make "
            "each batch a dict with these names"
        )
    return tuple(batch[:inputs]), {}


def _keywords(model: nn.Module, batch: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries of `batch` that `forward` takes."""
    parameters = _parameters(model)
    kinds = {p.kind for p in parameters}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return {str(name): value for name, value in batch.items()}
    named = [
        p
        for p in parameters
        if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    missing = [p for p in named if p.default is inspect.Parameter.empty and p.name not in batch]
    if missing:
        raise TypeError(
            f"{type(model).__name__}.forward needs {_names(missing)}, got a batch with the keys "
            f"{list(batch)}: {FORWARD_HINT}"
        )
    return {p.name: batch[p.name] for p in named if p.name in batch}


def _positional(model: nn.Module) -> tuple[list[inspect.Parameter], bool]:
    """The positional parameters of `forward`, and whether it has ``*args``."""
    parameters = _parameters(model)
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    return [p for p in parameters if p.kind in POSITIONAL], takes_any


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """The parameters of the model's `forward`. For wrappers like DDP, those of the inner model."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if not any(p.kind in POSITIONAL for p in parameters):
        for name in ("module", "_orig_mod"):
            inner = getattr(model, name, None)
            if isinstance(inner, nn.Module):
                return _parameters(inner)
    return parameters


def _names(parameters: list[inspect.Parameter]) -> str:
    return ", ".join(repr(p.name) for p in parameters)


def _is_integers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(one, int) for one in value)
    integral = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return integral and value.dim() == 1


def trained_with_lengths(model: nn.Module) -> bool:
    """Whether a layer's most recent training calls had lengths."""
    recent = (getattr(module, "recent_calls", ()) for module in model.modules())
    return any(c.lengths is not None for calls in recent for group in calls for c in group)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence)


def _to_device(batch: Any, device: torch.device | str) -> Any:
    """Move all tensors of a batch to the device."""
    if not hasattr(batch, "to") and not isinstance(batch, (Mapping, list, tuple)):
        raise TypeError(
            f"a batch of type {type(batch).__name__} cannot be moved to a device: pass forward= to "
            "run the model on it"
        )
    return _moved(batch, device)


def _moved(value: Any, device: torch.device | str) -> Any:
    if hasattr(value, "to"):  # a tensor, a PackedSequence, a BatchEncoding
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(entry, device) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        moved = [_moved(entry, device) for entry in value]
        return tuple(moved) if isinstance(value, tuple) else moved
    return value
