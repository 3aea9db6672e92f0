"""Overridden settings: ``key=value`` pairs of ``rbn train --set``, and values by dotted key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rbn.experiments.config.settings import Config, from_mapping
from rbn.experiments.config.yaml_loader import parse_yaml

_SYNONYMS = {"learning_rate": "lr", "rate": "lr"}


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by their keys in ``rbn train --set``, such as ``optimizer.lr``."""
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            settings |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            settings[name] = value
    return settings


def with_settings(config: Config, settings: Sequence[str]) -> Config:
    """Override settings of a config, such as ``optimizer.lr=0.01``; the values are YAML."""
    return with_values(config, parse_settings(settings))


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse ``key=value`` pairs into values by key."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"a setting must look like key=value, got {setting!r}")
        try:
            values[key.strip()] = parse_yaml(text)
        except Exception as error:  # PyYAML's own class, which is not imported here
            raise ValueError(f"the value of {setting!r} is not YAML") from error
    return values


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Override values of a config, by keys such as ``hidden_size`` or ``optimizer.lr``."""
    changed: dict[str, Any] = asdict(config)
    for key, value in values.items():
        *path, last = key.split(".")
        place = changed
        for part in path:
            if not isinstance(place.get(part), dict):
                raise _unknown(key, asdict(config))
            place = place[part]
        if (not path and last not in changed) or (path == ["optimizer"] and last in _SYNONYMS):
            raise _unknown(key, asdict(config))
        place[last] = value
    return from_mapping(changed)


def _unknown(key: str, settings: Mapping[str, Any]) -> ValueError:
    """The error for an unknown setting, with the most likely intended one."""
    inner = [f"{a}.{b}" for a, v in settings.items() if isinstance(v, dict) for b in v]
    near = [name for name in inner if name.endswith(f".{key}")]
    near = near or [f"{a}.{_SYNONYMS[b]}" for a, _, b in [key.partition(".")] if b in _SYNONYMS]
    near = near or difflib.get_close_matches(key, [*settings, *inner], 1)
    instead = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(settings)}"
    return ValueError(f"there is no setting {key!r}{instead}")
