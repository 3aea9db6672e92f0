"""Checks for the values of single settings."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

LARGEST = 2**63 - 1  # the largest integer that torch accepts
LARGEST_RATE = 1e30  # products with it in an optimiser still fit into float32
# Options of optimisers, by type of value.
_BOOLEANS = (
    *("fused", "foreach", "nesterov", "amsgrad", "centered", "maximize"),
    "decoupled_weight_decay",
)
_NOT_NEGATIVE = ("lr", "eps", "weight_decay")
_FRACTIONS = ("alpha", "momentum", "dampening")
_SET_BY_TRAINER = ("capturable", "differentiable")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def check_seed(name: str, value: Any) -> None:
    """Reject anything that is not a random seed."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError(f"{name} must be an integer from 0 to {LARGEST}, got {value!r}")


def check_number(name: str, value: Any) -> None:
    """Reject anything that is not a finite number, or is too large for torch."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not is_number(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    if isinstance(value, int) and value > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, got {value}")


def check_names(place: str, names: Iterable[str], *functions: Callable[..., Any]) -> None:
    """Reject settings ``place.name`` that are not an optional argument of any of the functions."""
    parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
    known = [p.name for p in parameters if p.default is not inspect.Parameter.empty]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            instead = f"there are {', '.join(known) or 'none'}"
            if near:
                instead = f"did you mean {place}.{near[0]}?"
            raise ValueError(f"there is no setting '{place}.{name}'; {instead}")


def check_optimizer(options: Mapping[str, Any]) -> None:
    """Reject invalid values, many of which torch's classes accept."""
    for name in _SET_BY_TRAINER:
        if name in options:
            raise ValueError(f"optimizer.{name} cannot be set: the trainer sets it")
    for name in _BOOLEANS:
        if not isinstance(options.get(name, False), bool):
            raise ValueError(f"optimizer.{name} must be true or false, got {options[name]!r}")
    for name in (*_NOT_NEGATIVE, *_FRACTIONS):
        value = options.get(name, 0)
        check_number(f"optimizer.{name}", value)
        if value < 0:
            raise ValueError(f"optimizer.{name} must not be negative, got {value!r}")
        if name in _FRACTIONS and value > 1:
            raise ValueError(f"optimizer.{name} must be at most 1, got {value!r}")
        if value > LARGEST_RATE:
            raise ValueError(f"optimizer.{name} must be at most {LARGEST_RATE}, got {value!r}")
    betas = options.get("betas", (0, 0))
    pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not pair or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"optimizer.betas must be two numbers of at least 0 and below 1, got {betas!r}"
        )
