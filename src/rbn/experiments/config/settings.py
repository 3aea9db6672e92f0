"""`Config`: the hyperparameters of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rbn.experiments.config.validation import (
    LARGEST,
    check_number,
    check_optimizer,
    check_seed,
)
from rbn.experiments.task_kinds import TASK_KINDS, TASKS, TaskKind

STARTS = ("orthogonal", "identity-candidate", "identity-all")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
SELECTIONS = ("batch", "population")
OPTIMIZERS = ("adam", "adamw", "rmsprop", "sgd")
_SET_BY_TASK = {"batch_first", "device", "dtype", "input_size", "hidden_size"}


@dataclass(frozen=True)
class Config:
    """The settings of a run, without its seed.

    Attributes:
        task: name of the task, one of `TASKS`.
        model: the recurrent layer, or the variant of the reader.
        tag: name of this variant, part of the run's name.
        hidden_size: units of the layer.
        batch_size: sequences or windows per minibatch.
        length: characters per window, for texts.
        epochs: largest number of passes over the training data.
        evaluate_every: steps between evaluations; None: one per epoch.
        patience: evaluations without improvement before training stops; None: no early stopping.
        select: the statistics, ``batch`` or ``population``, with which the validation metric
            chooses the best model.
        clip: largest global norm of the gradients; None: no clipping.
        decay_from: fraction of the steps after which the learning rate decays linearly to 0.
        average: decay of a running average of the parameters, which is then evaluated and kept;
            None: the parameters themselves.
        dropout: between the layer's output and the softmax; readers have ``layer.dropout``.
        precision: a precision of Lightning Fabric, one of `PRECISIONS`.
        optimizer: its name, ``adam``, ``adamw``, ``rmsprop`` or ``sgd``, and arguments of torch's
            class. AdamW's ``weight_decay`` applies to matrices only.
        start: initialization of the recurrent weights.
        layer: options of the layer that every model has.
        normalization: further options of batch-normalized layers.
        data: options of the data set.
        valid_windows: number of validation windows to evaluate; None: all.
        population_batch: batch size for the exact population statistics behind a reported number.
    """

    task: str
    model: str = "bn-lstm"
    tag: str = ""
    hidden_size: int = 100
    batch_size: int = 100
    length: int = 100
    epochs: int = 10
    evaluate_every: int | None = None
    patience: int | None = None
    select: str = "population"
    clip: float | None = 1.0
    decay_from: float = 1.0
    average: float | None = None
    dropout: float = 0.0
    precision: str = "32-true"
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adam", "lr": 0.001})
    start: str = "orthogonal"
    layer: dict[str, Any] = field(default_factory=dict)
    normalization: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    valid_windows: int | None = None
    population_batch: int = 1000

    def __post_init__(self) -> None:
        self._check_types()
        self._check_choice("task", TASKS)
        self._check_choice("model", self.kind.models)
        self._check_choice("start", STARTS)
        self._check_choice("precision", PRECISIONS)
        self._check_choice("select", SELECTIONS)
        if self.optimizer.get("name") not in OPTIMIZERS:
            choice = ", ".join(OPTIMIZERS[:-1]) + f" or {OPTIMIZERS[-1]}"
            raise ValueError(f"optimizer must be {choice}, got {self.optimizer.get('name')!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout!r}")
        if self.batch_normalized and self.batch_size == 1:
            raise ValueError(
                f"batch_size must be at least 2 for {self.model}: one sequence has no variance"
            )
        for name, reason in self.kind.other_settings.items():
            if getattr(self, name) != getattr(Config, name):
                raise ValueError(f"{name} is not a setting of {self.task}: {reason}")

    def _check_choice(self, name: str, options: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in options:
            raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}")

    def _check_types(self) -> None:
        """Reject values of the wrong type, such as words instead of numbers."""
        for name in ("layer", "normalization", "data", "optimizer"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise ValueError(f"{name} must be settings by name, got {value!r}")
        sizes = ("hidden_size", "batch_size", "length", "epochs", "population_batch")
        for name in (*sizes, "evaluate_every", "patience", "valid_windows"):
            value = getattr(self, name)
            if value is None and name not in sizes:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
            if value > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST}, got {value}")
        if self.population_batch == 1:
            raise ValueError("population_batch must be at least 2: one sequence has no variance")
        numbers = {"decay_from": self.decay_from, "dropout": self.dropout}
        numbers["clip"] = 0 if self.clip is None else self.clip
        numbers["average"] = 0 if self.average is None else self.average
        for name, value in numbers.items():
            check_number(name, value)
        check_optimizer(self.optimizer)
        if "seed" in self.data:
            check_seed("data.seed", self.data["seed"])
        if not isinstance(self.tag, str) or not re.fullmatch(r"(\w[\w.+-]*)?", self.tag):
            raise ValueError(
                f"tag must be a word of letters, digits and . _ + - that starts with a letter or "
                f"digit, because it is part of file names, got {self.tag!r}"
            )
        for place, options in (("layer", self.layer), ("normalization", self.normalization)):
            for name in _SET_BY_TASK & set(options):
                raise ValueError(f"{place}.{name} cannot be set: it follows from the task")
        try:
            json.dumps(asdict(self))
        except (TypeError, ValueError, RecursionError) as error:
            message = f"settings must be strings, numbers, booleans, lists or mappings: {error}"
            raise ValueError(message) from error

    @property
    def kind(self) -> TaskKind:
        """Metric, units and models of the task."""
        return TASK_KINDS[self.task]

    @property
    def batch_normalized(self) -> bool:
        """Whether the model normalizes over minibatches."""
        return self.model.startswith("bn-")

    def statistics(self, kind: str = "population") -> str | None:
        """``kind``, or None if the model has no statistics."""
        return kind if self.batch_normalized else None

    @property
    def name(self) -> str:
        """The model and its tag, for folders and tables; bn-e** becomes bn-e-star-star."""
        model = self.model.replace("*", "-star")
        return f"{model}-{self.tag}" if self.tag else model

    def to_json(self) -> str:
        """The settings as JSON, for the run's folder."""
        return json.dumps(asdict(self), indent=2)


def from_mapping(values: Mapping[str, Any]) -> Config:
    """Make a config from settings by name. Rejects unknown names."""
    known = {f.name for f in fields(Config)}
    unknown = sorted(set(values) - known, key=str)
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    if "task" not in values:
        raise ValueError("a config must name its task")
    return Config(**values)
