"""The search space of a sweep: lists of values and ranges."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rbn.experiments.config import is_number

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Choices:
    """Values to choose from, in the order of the file."""

    values: tuple[Value, ...]

    @property
    def examples(self) -> tuple[Value, ...]:
        """The values that a config must accept."""
        return self.values


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; integers if both are integers.

    Attributes:
        low: smallest number.
        high: largest number.
        log: whether to sample on a logarithmic scale.
        step: distance between the numbers; None samples a continuous range.
    """

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    @property
    def is_integer(self) -> bool:
        """Whether the numbers are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def examples(self) -> tuple[Value, ...]:
        """The values that a config must accept."""
        return self.low, self.high


Parameter = Choices | Range
Space = dict[str, Parameter]


def parse(content: Any) -> tuple[Space, ...]:
    """Parse the search space of a file: one space, or a list of them."""
    several = content if isinstance(content, list) else [content]
    if not several:
        raise ValueError("space is empty")
    return tuple(_one(each) for each in several)


def _one(content: Any) -> Space:
    if not isinstance(content, dict) or not content:
        raise ValueError(
            f"space must name settings and the values to try, as in "
            f"'optimizer.lr: [0.01, 0.001]', got {content!r}"
        )
    return {str(key): _parameter(str(key), value) for key, value in content.items()}


def _parameter(key: str, content: Any) -> Parameter:
    if isinstance(content, list):
        return _choices(key, content)
    if isinstance(content, dict):
        return _range(key, content)
    raise ValueError(
        f"space: {key} must be a list of values or a range such as {{low: 0.001, high: 0.1}}, "
        f"got {content!r}"
    )


def _choices(key: str, values: list[Any]) -> Choices:
    if not values:
        raise ValueError(f"space: {key} has no values to choose from")
    for value in values:
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(
                f"space: {key} must have numbers, words, true, false or null to choose from, "
                f"got {value!r}"
            )
    if len(set(values)) < len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise ValueError(f"space: {key} has {twice!r} twice")
    return Choices(tuple(values))


def _range(key: str, content: Mapping[Any, Any]) -> Range:
    unknown = sorted(set(map(str, content)) - {"low", "high", "log", "step"})
    if unknown:
        raise ValueError(f"space: {key} has an unknown {unknown[0]!r}; a range has low, high, ...")
    log, step = content.get("log", False), content.get("step")
    if not isinstance(log, bool):
        raise ValueError(f"space: {key}: log must be true or false, got {log!r}")
    for name in ("low", "high", "step"):
        value = content.get(name)
        if name == "step" and value is None:
            continue
        if not is_number(value):
            raise ValueError(f"space: {key}: {name} must be a number, got {value!r}")
    low, high = content["low"], content["high"]
    if low > high:
        raise ValueError(f"space: {key}: low must be at most high, got {low} and {high}")
    if log and low <= 0:
        raise ValueError(f"space: {key}: with log, low must be positive, got {low}")
    if log and step is not None:
        raise ValueError(f"space: {key} cannot have both log and step")
    if step is not None and step <= 0:
        raise ValueError(f"space: {key}: step must be positive, got {step}")
    if not (isinstance(low, int) and isinstance(high, int)):
        low, high = float(low), float(high)
    elif isinstance(step, float):
        raise ValueError(f"space: {key}: step must be an integer like low and high, got {step}")
    return Range(low, high, log, step)


def grid(space: Space) -> list[dict[str, Value]]:
    """All combinations of a space's values; the last setting varies fastest."""
    for key, parameter in space.items():
        if isinstance(parameter, Range):
            raise ValueError(f"space: {key} is a range; a grid needs a list of values")
    lists = [parameter.examples for parameter in space.values()]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def merge(spaces: tuple[Space, ...]) -> Space:
    """Merge several spaces into one with all their values."""
    merged: Space = {}
    for key, parameter in (item for space in spaces for item in space.items()):
        before = merged.get(key)
        if isinstance(before, Choices) and isinstance(parameter, Choices):
            new = tuple(value for value in parameter.values if value not in before.values)
            parameter = Choices(before.values + new)
        merged[key] = parameter
    return merged


def format_value(value: Value) -> str:
    """A value as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def listed(parameters: Mapping[str, Value]) -> str:
    """Settings as one line."""
    return ", ".join(f"{key}={format_value(value)}" for key, value in parameters.items())
