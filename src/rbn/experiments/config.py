"""The hyperparameters of a run, from a file and the command line."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"
READING = ("cloze", "cnn", "cnn-built", "dailymail-built")
TASKS = ("digits", "mnist", "pmnist", "ptb", "text8", "pydoc", *READING)
TEXTS = ("ptb", "text8", "pydoc")
MODELS = ("lstm", "bn-lstm", "ln-lstm", "bn-rnn", "rnn", "irnn")
READERS = ("lstm", "bi-lstm", "bn-lstm", "bn-everywhere", "bn-e*", "bn-e**")
_ALL_MODELS = ", ".join(dict.fromkeys((*MODELS, *READERS)))
STARTS = ("orthogonal", "identity-candidate", "identity-all")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
SELECTIONS = ("batch", "population")
OPTIMIZERS = ("adam", "adamw", "rmsprop", "sgd")
_MOST_NODES = 10_000  # values of a YAML file
LARGEST = 2**63 - 1  # whole number that torch takes
LARGEST_RATE = 1e30  # an optimiser's products with it are still float32 numbers
# Of an optimiser: what is true or false, what follows from how a run is trained, numbers of at
# least 0, and numbers from 0 to 1.
_SWITCHES = (
    *("fused", "foreach", "nesterov", "amsgrad", "centered", "maximize"),
    "decoupled_weight_decay",
)
_OF_TRAINER = ("capturable", "differentiable")
_AMOUNTS = ("lr", "eps", "weight_decay")
_SHARES = ("alpha", "momentum", "dampening")
_SYNONYMS = {"learning_rate": "lr", "rate": "lr"}
_OF_TASK = {"batch_first", "device", "dtype", "input_size", "hidden_size"}  # no options of a layer


@dataclass(frozen=True)
class Config:
    """One experiment, less the seed.

    Attributes:
        task: the data and what is asked of them.
        model: the recurrent layer.
        tag: a name for this variant, part of the run's.
        hidden_size: units of the layer.
        batch_size: sequences or windows of a minibatch.
        length: characters of a window, for texts.
        epochs: passes over the training data, at most.
        evaluate_every: steps between evaluations; None looks after every epoch.
        patience: evaluations without a better one before training stops; None never does.
        select: the statistics of the validation figure that names the best model.
        clip: largest global norm of the gradients; None leaves them alone.
        decay_from: the part of the steps after which the learning rate falls linearly to 0.
        average: decay of the running average of the parameters that is evaluated and kept; None
            evaluates the parameters themselves.
        dropout: of the layer's output on its way to the softmax; a reader's is among `layer`.
        precision: as Lightning Fabric names it.
        optimizer: its name, ``adam``, ``adamw``, ``rmsprop`` or ``sgd``, and arguments of torch's
            class. AdamW's ``weight_decay`` is of matrices alone.
        start: of the recurrent weights.
        layer: options of the layer that every model understands.
        normalization: options that batch-normalized layers have besides.
        data: options of the data set.
        valid_windows: validation windows to look at; None for all.
        population_batch: of the exact population statistics behind a reported number.
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
        self._check_kinds()
        models = READERS if self.is_reading else MODELS
        choices: dict[str, tuple[str, ...]]
        choices = {"task": TASKS, "model": models, "start": STARTS}
        choices |= {"precision": PRECISIONS, "select": SELECTIONS}
        for name, options in choices.items():
            value = getattr(self, name)
            if value not in options:
                raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}")
        if self.optimizer.get("name") not in OPTIMIZERS:
            choice = ", ".join(OPTIMIZERS[:-1]) + f" or {OPTIMIZERS[-1]}"
            raise ValueError(f"optimizer must be {choice}, got {self.optimizer.get('name')!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout!r}")
        if not self.is_text:
            for name, default in (("length", Config.length), ("valid_windows", None)):
                if getattr(self, name) != default:
                    raise ValueError(f"{name} is a setting of texts, which {self.task} is not")
        if self.is_reading and self.dropout:
            raise ValueError("a reader's dropout is set as layer.dropout")
        if self.is_text and self.model in ("rnn", "irnn"):
            raise ValueError(f"model {self.model} classifies sequences; {self.task} is a text")

    def _check_kinds(self) -> None:
        """Refuse words where numbers belong, and the like, which a file or a user may well have."""
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
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
            if value > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST}, got {value}")
        if self.population_batch == 1:
            raise ValueError("population_batch must be at least 2: one sequence has no variance")
        numbers = {"decay_from": self.decay_from, "dropout": self.dropout}
        numbers["clip"] = 0 if self.clip is None else self.clip
        numbers["average"] = 0 if self.average is None else self.average
        for name, value in numbers.items():
            _check_number(name, value)
        _check_optimizer(self.optimizer)
        if "seed" in self.data:
            check_seed("data.seed", self.data["seed"])
        if not isinstance(self.tag, str) or not re.fullmatch(r"(\w[\w.+-]*)?", self.tag):
            raise ValueError(
                f"tag must be a word of letters, digits and . _ + -, beginning with a letter or "
                f"digit, as it names files, got {self.tag!r}"
            )
        for place, options in (("layer", self.layer), ("normalization", self.normalization)):
            for name in _OF_TASK & set(options):
                raise ValueError(f"{place}.{name} cannot be set: it follows from the task")
        try:
            json.dumps(asdict(self))
        except (TypeError, ValueError, RecursionError) as error:
            said = f"settings must be words, numbers, lists and the like: {error}"
            raise ValueError(said) from error

    @property
    def is_text(self) -> bool:
        """Whether the task is to predict the next character."""
        return self.task in TEXTS

    @property
    def is_reading(self) -> bool:
        """Whether the task is to answer questions about documents."""
        return self.task in READING

    @property
    def name(self) -> str:
        """The model and its tag, for folders and tables; bn-e** is bn-e-star-star there."""
        model = self.model.replace("*", "-star")
        return f"{model}-{self.tag}" if self.tag else model

    def to_json(self) -> str:
        """All of it, for the run's folder."""
        return json.dumps(asdict(self), indent=2)


def is_number(value: Any) -> bool:
    """Whether a value is a number, and finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def check_seed(name: str, value: Any) -> None:
    """Refuse what is no seed of random numbers."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ValueError(f"{name} must be a whole number from 0 to {LARGEST}, got {value!r}")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not is_number(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    if isinstance(value, int) and value > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, got {value}")


def _check_optimizer(options: Mapping[str, Any]) -> None:
    """Refuse values that no optimiser has a use for; torch's classes take many of them."""
    for name in _OF_TRAINER:
        if name in options:
            raise ValueError(
                f"optimizer.{name} cannot be set: it follows from how a run is trained"
            )
    for name in _SWITCHES:
        if not isinstance(options.get(name, False), bool):
            raise ValueError(f"optimizer.{name} must be true or false, got {options[name]!r}")
    for name in (*_AMOUNTS, *_SHARES):
        value = options.get(name, 0)
        _check_number(f"optimizer.{name}", value)
        if value < 0:
            raise ValueError(f"optimizer.{name} must not be negative, got {value!r}")
        if name in _SHARES and value > 1:
            raise ValueError(f"optimizer.{name} must be at most 1, got {value!r}")
        if value > LARGEST_RATE:
            raise ValueError(f"optimizer.{name} must be at most {LARGEST_RATE}, got {value!r}")
    betas = options.get("betas", (0, 0))
    pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not pair or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"optimizer.betas must be two numbers of at least 0 and below 1, got {betas!r}"
        )


def from_mapping(values: Mapping[str, Any]) -> Config:
    """A config from a file's content; unknown names are refused."""
    known = {f.name for f in fields(Config)}
    unknown = sorted(set(values) - known, key=str)
    if unknown:
        raise ValueError(f"unknown setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    if "task" not in values:
        raise ValueError("a config must name its task")
    return Config(**values)


def for_model(values: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The settings of a file for one model: those that its ``variants`` name for it override."""
    if not isinstance(model, str):  # a file's may be anything
        raise ValueError(f"model must be one of {_ALL_MODELS}, got {model!r}")
    found = dict(values)
    variants = found.pop("variants", None) or {}
    if not isinstance(variants, Mapping) or not all(
        isinstance(each, Mapping) for each in variants.values()
    ):
        raise ValueError(f"variants must hold settings by model, got {variants!r}")
    for name, settings in variants.items():
        if name not in (*MODELS, *READERS):
            raise ValueError(f"variants must be of {_ALL_MODELS}, got {name!r}")
        for key in ("task", "model", "variants"):
            if key in settings:
                raise ValueError(f"variants: {name} cannot have a {key} of its own")
    return {**found, **variants.get(model, {}), "model": model}


def read(path: Path) -> dict[str, Any]:
    """The settings of a YAML file."""
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "configs need PyYAML: pip install 'recurrent-batchnorm[train]'"
        ) from error
    try:
        found = parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter of dates that are none
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold settings by name")
    return found


def parsed(text: str) -> Any:
    """What a YAML text says, where 1e-3 is a number, as in YAML 1.2; to PyYAML it is a word."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {"construct_mapping": _without_twins})
    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    reader = loader(text)
    try:
        node = reader.get_single_node()
        if _expanded(node, {}) > _MOST_NODES:
            raise ValueError(f"its aliases stand for more than {_MOST_NODES:,} values")
        return None if node is None else reader.construct_document(node)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    finally:
        reader.dispose()


def _expanded(node: Any, known: dict[int, int]) -> int:
    """How many values a YAML node has where every alias is a copy."""
    import yaml

    if node is None or isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = _MOST_NODES  # an alias for what it is part of
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


def _without_twins(loader: Any, node: Any, deep: bool = False) -> dict[Any, Any]:
    """A mapping whose keys differ; PyYAML takes the last of equal ones."""
    import yaml

    seen: set[Any] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is there twice", key.start_mark
                )
            seen.add(key.value)
    found: dict[Any, Any] = yaml.SafeLoader.construct_mapping(loader, node, deep=deep)
    return found


def published(task: str) -> dict[str, Any]:
    """The paper's settings of a task."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    return read(CONFIGS / f"{task}.yaml")


def names() -> list[str]:
    """The configs that come with the package, such as ``mnist-code`` or ``beyond/ptb``."""
    return sorted(str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.rglob("*.yaml"))


def find(name: str) -> Path:
    """The file of a config: one of `names`, or a path."""
    own = CONFIGS / f"{name}.yaml"
    if name in names() and own.exists():
        return own
    if "." not in name and not Path(name).exists():
        raise ValueError(f"there is no file {name}, and no such config: {', '.join(names())}")
    return Path(name)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by the keys that ``rbn train --set`` has for them."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found


def with_settings(config: Config, settings: Sequence[str]) -> Config:
    """A config with ``key=value`` pairs put in; ``optimizer.lr=0.01`` reaches inside.

    Values are read as YAML: numbers, true, null, lists and text mean what they look like.
    """
    return with_values(config, pairs(settings))


def pairs(settings: Sequence[str]) -> dict[str, Any]:
    """What ``key=value`` pairs say, by key."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"a setting must look like key=value, got {setting!r}")
        try:
            found[key.strip()] = parsed(text)
        except Exception as error:  # YAML's, which does not come with the core
            raise ValueError(f"the value of {setting!r} is not YAML") from error
    return found


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A config with values put in, by keys such as ``hidden_size`` or ``optimizer.lr``."""
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
    """What to say of a setting that is not there, with those it may be meant for."""
    inner = [f"{a}.{b}" for a, v in settings.items() if isinstance(v, dict) for b in v]
    near = [name for name in inner if name.endswith(f".{key}")]
    near = near or [f"{a}.{_SYNONYMS[b]}" for a, _, b in [key.partition(".")] if b in _SYNONYMS]
    near = near or difflib.get_close_matches(key, [*settings, *inner], 1)
    instead = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(settings)}"
    return ValueError(f"there is no setting {key!r}{instead}")
