"""A sweep: a config, what to try of its settings, and in which way."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rbn.experiments import config as configs
from rbn.experiments.config import Config
from rbn.experiments.search.space import Choices, Parameter, Space, Value, together


@dataclass(frozen=True)
class Method:
    """A sampler or pruner: its name in sweep files, and options as Optuna calls them."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """All that a sweep's file says, checked.

    Attributes:
        name: of the file, and of the study in the storage.
        source: the config's name or path.
        values: what the config's file says.
        model: where the search space does not name it.
        settings: that all trials have, by key, over those of the config.
        spaces: what is tried. A grid may have several; others have one.
        sampler: who chooses.
        pruner: who gives up trials that look bad.
        trials: how many there are to be.
        seed: of every trial's weights and order, and of the sampler.
        heartbeat: seconds between signs of life of a worker.
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
        return together(self.spaces)

    @property
    def maximize(self) -> bool:
        """Whether a higher validation metric is better."""
        return self.config({}).kind.higher_is_better

    def config(self, parameters: Mapping[str, Value], number: int | None = None) -> Config:
        """The settings of a trial.

        Args:
            parameters: what was chosen, by key.
            number: of the trial, for its tag; None leaves the config's.
        """
        changed = {**self.settings, **parameters}
        model = changed.pop("model", self.model)
        config = configs.from_mapping(configs.for_model(self.values, str(model)))
        if number is not None:
            changed["tag"] = f"{self.name}-{number}"
        return configs.with_values(config, changed)

    def command(self, parameters: Mapping[str, Value], number: int) -> str:
        """The command that repeats a trial, less the seed."""
        config = self.config(parameters, number)
        changed = {**self.settings, **parameters, "tag": config.tag}
        words = ["rbn", "train", config.task, "--model", config.model, "--config", self.source]
        for key, value in changed.items():
            if key != "model":
                text = value if isinstance(value, str) else json.dumps(value)
                words += ["--set", f"{key}={text}"]
        return shlex.join(words)

    def identity(self) -> dict[str, Any]:
        """What makes the trials those of this sweep, as JSON can hold it."""
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
        """Which parts of another sweep's `identity` are not this one's."""
        mine: dict[str, Any] = json.loads(json.dumps(self.identity()))
        different = {name for name in mine if mine[name] != stored.get(name)}
        # An older version may have known fewer settings: those have their defaults.
        before = {k: configs.from_mapping(v) for k, v in stored.get("config", {}).items()}
        if before == {k: configs.from_mapping(v) for k, v in mine["config"].items()}:
            different.discard("config")
        return sorted(different)


def _plain(parameter: Parameter) -> Any:
    return list(parameter.values) if isinstance(parameter, Choices) else asdict(parameter)
