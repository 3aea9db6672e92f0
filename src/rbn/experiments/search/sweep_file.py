"""Reads and checks sweep files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rbn.experiments import config as configs
from rbn.experiments.search import sampling
from rbn.experiments.search.space import Space, Value, grid, parse
from rbn.experiments.search.sweep import Method, Sweep

SWEEPS = Path(__file__).parents[1] / "sweeps"
KEYS = ("config", "model", "set", "space", "sampler", "pruner", "trials", "seed", "heartbeat")
_LARGEST_GRID = 10_000


def names() -> list[str]:
    """The sweeps that come with the package, such as ``ptb-table5``."""
    return sorted(path.stem for path in SWEEPS.glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a sweep: one of `names`, or a path."""
    if name in names():
        return SWEEPS / f"{name}.yaml"
    path = Path(name)
    if not path.exists():
        raise ValueError(f"there is no file {name}, and no such sweep: {', '.join(names())}")
    return path


def read(name: str, settings: Sequence[str] = (), trials: int | None = None) -> Sweep:
    """Read a sweep by name or path. Reports every mistake that can be found without the data.

    Args:
        name: one of `names`, or a path.
        settings: ``key=value`` pairs for all trials.
        trials: number of trials, instead of the file's.
    """
    path = find(name)
    try:
        return _checked(path, configs.read_yaml(path), configs.parse_settings(settings), trials)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if str(path) in text else f"{path}: {text}") from error


def _checked(
    path: Path, content: dict[str, Any], given: dict[str, Any], trials: int | None
) -> Sweep:
    unknown = sorted(set(map(str, content)) - set(KEYS))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; there are {', '.join(KEYS)}")
    for key in ("config", "space"):
        if key not in content:
            raise ValueError(f"{key} is missing")
    settings = content.get("set") or {}
    if not isinstance(settings, dict):
        raise ValueError(f"set must contain settings by name, got {settings!r}")
    settings = {str(key): value for key, value in settings.items()}
    source = _source(str(content["config"]), path)
    sweep = Sweep(
        name=path.stem,
        source=source,
        values=configs.read_yaml(configs.find(source)),
        model=str(content.get("model", "bn-lstm")),
        settings={**settings, **given},
        spaces=parse(content["space"]),
        sampler=_method("sampler", content.get("sampler", "tpe"), sampling.SAMPLERS),
        pruner=_method("pruner", content.get("pruner", "none"), sampling.PRUNERS),
        trials=0,
        seed=_seed(content.get("seed", 1)),
        heartbeat=_seconds(content.get("heartbeat", 15)),
    )
    for place, keys in (("set", sweep.settings), ("space", sweep.space)):
        if "task" in keys:
            raise ValueError(
                f"{place}: the task cannot be changed: the config sets it, and metrics of "
                "different tasks are not comparable"
            )
    twice = sorted(set(sweep.settings) & set(sweep.space))
    if twice:
        raise ValueError(f"{twice[0]} is both set and in the space")
    sweep.config({})
    for space in sweep.spaces:
        _check_values(sweep, space)
    sampling.check(sweep)
    wanted = content.get("trials") if trials is None else trials
    if sweep.sampler.name == "grid":
        points = _points(sweep)
        count = len(points) if wanted is None else _integer("trials", wanted, 1)
        if count > len(points):
            raise ValueError(f"trials must be at most the grid's {len(points)}, got {count}")
        return dataclasses.replace(sweep, points=points, trials=count)
    if len(sweep.spaces) > 1:
        raise ValueError(f"a list of spaces is for the sampler grid, not {sweep.sampler.name}")
    if wanted is None:
        raise ValueError(f"trials is missing: the number of trials for {sweep.sampler.name}")
    return dataclasses.replace(sweep, trials=_integer("trials", wanted, 1))


def _source(name: str, path: Path) -> str:
    """A config's name, or a path relative to the sweep's file."""
    return name if name in configs.names() else str(path.parent / name)


def _method(kind: str, content: Any, known: Sequence[str]) -> Method:
    options = dict(content) if isinstance(content, dict) else {"name": content}
    name = options.pop("name", None)
    name = "none" if name is None and content is None else name
    if name not in known:
        raise ValueError(f"{kind} must be one of {', '.join(known)}, got {name!r}")
    return Method(str(name), options)


def _integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def _seed(value: Any) -> int:
    configs.check_seed("seed", value)
    return int(value)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86400:
        raise ValueError(f"heartbeat must be a positive number of seconds, got {value!r}")
    return float(value)


def _check_values(sweep: Sweep, space: Space) -> None:
    """Check every value of every setting, with the first values of the settings before it."""
    from rbn.experiments import build  # slow to import, and only needed here

    first: dict[str, Value] = {}
    for key, parameter in space.items():
        for value in parameter.examples:
            try:
                build.check(sweep.config({**first, key: value}))
            except (TypeError, ValueError) as error:
                raise ValueError(f"space: {key}={value!r} is not valid: {error}") from error
        first[key] = parameter.examples[0]


def _points(sweep: Sweep) -> tuple[dict[str, Value], ...]:
    """The points of all grids, without duplicates."""
    unique: dict[str, dict[str, Value]] = {}
    for space in sweep.spaces:
        size = math.prod(len(parameter.examples) for parameter in space.values())
        if size > _LARGEST_GRID:
            raise ValueError(f"a grid of {size:,} is too large; the limit is {_LARGEST_GRID:,}")
        for point in grid(space):
            unique.setdefault(sweep.config(point).to_json(), point)
    return tuple(unique.values())
