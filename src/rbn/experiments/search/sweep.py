"""A sweep: a config, its search space, and how to search."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rbn.experiments import config as configs
from rbn.experiments.config import Config
from rbn.experiments.search.space import Choices, Parameter, Space, Value, merge


@dataclass(frozen=True)
class Method:
    """A sampler or pruner: its name in sweep files, and Optuna's options."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """The checked content of a sweep file.

    Attributes:
        name: name of the file, and of the study in the storage.
        source: the config's name or path.
        values: content of the config's file.
        model: the model, unless the search space names it.
        settings: settings of all trials, by key; they override the config's.
        spaces: the search spaces. A grid may have several, other samplers have one.
        sampler: chooses the settings of trials.
        pruner: stops unpromising trials.
        trials: number of trials.
        seed: random seed of every trial's weights and data order, and of the sampler.
        heartbeat: seconds between a worker's heartbeats.
        points: the trials of a grid in order, else None.
    """

    name: str
    source: str
    values: dict[str, Any]
    model: str
    settings: dict[str, Any]
    spaces: tuple[Space, ...]
    sampler: Method
    pruner: Method
    trials: int
    seed: int
    heartbeat: float
    points: tuple[dict[str, Value], ...] | None = None

    @property
    def space(self) -> Space:
        """All settings that are tried, with all their values."""
        return merge(self.spaces)

    @property
    def maximize(self) -> bool:
        """Whether a higher validation metric is better."""
        return self.config({}).kind.higher_is_better

    def config(self, parameters: Mapping[str, Value], number: int | None = None) -> Config:
        """The settings of a trial.

        Args:
            parameters: the chosen values, by key.
            number: number of the trial, for its tag; None keeps the config's tag.
        """
        changed = {**self.settings, **parameters}
        model = changed.pop("model", self.model)
        config = configs.from_mapping(configs.for_model(self.values, str(model)))
        if number is not None:
            changed["tag"] = f"{self.name}-{number}"
        return configs.with_values(config, changed)

    def command(self, parameters: Mapping[str, Value], number: int) -> str:
        """The command that repeats a trial, without the seed."""
        config = self.config(parameters, number)
        changed = {**self.settings, **parameters, "tag": config.tag}
        words = ["rbn", "train", config.task, "--model", config.model, "--config", self.source]
        for key, value in changed.items():
            if key != "model":
                text = value if isinstance(value, str) else json.dumps(value)
                words += ["--set", f"{key}={text}"]
        return shlex.join(words)

    def identity(self) -> dict[str, Any]:
        """What identifies the sweep in the storage, for JSON."""
        models = self.space.get("model", Choices((self.model,)))
        base = {str(m): asdict(self.config({"model": m})) for m in models.examples}
        return {
            "config": base,
            "space": [{k: _plain(v) for k, v in space.items()} for space in self.spaces],
            "sampler": asdict(self.sampler),
            "pruner": asdict(self.pruner),
            "seed": self.seed,
        }

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """The parts of another sweep's `identity` that differ from this one's."""
        mine: dict[str, Any] = json.loads(json.dumps(self.identity()))
        different = {name for name in mine if mine[name] != stored.get(name)}
        # An older version may lack settings, which then have their defaults.
        before = {k: configs.from_mapping(v) for k, v in stored.get("config", {}).items()}
        if before == {k: configs.from_mapping(v) for k, v in mine["config"].items()}:
            different.discard("config")
        return sorted(different)


def _plain(parameter: Parameter) -> Any:
    return list(parameter.values) if isinstance(parameter, Choices) else asdict(parameter)
