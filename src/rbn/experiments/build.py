"""The data, model and optimiser of a config."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import rbn
from rbn import data
from rbn.data.cnn import Reading, Vocabulary
from rbn.experiments.config import Config
from rbn.experiments.reading import ReadingTask, build_reading, load_reading, make_reader
from rbn.experiments.tasks import Classification, NextSymbol
from rbn.models import LanguageModel, SequenceClassifier
from rbn.training import Adam, AdamW, Progress, Schedule, Trainer, make_fabric

if TYPE_CHECKING:
    from lightning.fabric import Fabric

CLASSES = 10
_LAYERS = {
    "lstm": rbn.LSTM,
    "bn-lstm": rbn.BatchNormLSTM,
    "ln-lstm": rbn.LayerNormLSTM,
    "bn-rnn": rbn.BatchNormRNN,
}
_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
# One pass over parameters and moments instead of ten.
_FUSED: dict[type, type] = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW}
_CHECKPOINT_SECONDS = 30.0
# How torch says that a tensor is too large.
_NO_MEMORY = ("not enough memory", "allocate memory", "out of memory", "overflow")
Loaded = data.Splits | data.Text | Reading


def recurrent_layer(config: Config, input_size: int) -> nn.Module:
    """The layer of a config, started as it says."""
    options: dict[str, Any] = dict(config.layer)
    if config.model in ("rnn", "irnn"):
        # Noise in the initial state is among the settings of some tasks; this model does without.
        absent = sorted(set(options) - {"hidden_noise"})
        if absent:
            raise ValueError(f"model {config.model} is torch.nn.RNN, which has no {absent[0]}")
        kind = "relu" if config.model == "irnn" else "tanh"
        layer: nn.Module = nn.RNN(input_size, config.hidden_size, nonlinearity=kind)
        if config.model == "irnn":  # Le et al. (2015)
            rbn.init.identity_recurrent_(layer)
            for name, parameter in layer.named_parameters():
                if name.startswith("bias"):
                    nn.init.zeros_(parameter)
        return layer
    if config.model.startswith("bn-"):
        options |= config.normalization
    layer = _LAYERS[config.model](input_size, config.hidden_size, **options)
    if config.start != "orthogonal":
        blocks: Any = config.start.removeprefix("identity-")
        rbn.init.identity_recurrent_(layer, blocks)
    return layer


def check(config: Config) -> None:
    """Find out with a tiny model whether model, optimiser and trainer take the options of a config.

    Raises:
        TypeError: for options that they do not have.
        ValueError: for values that they do not take.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            model = _tiny_model(config)
    except RuntimeError as error:  # torch's, of numbers that float32 does not have
        raise ValueError(f"the model's settings do not fit: {error}") from error
    make_optimizer(config, model)
    _schedule(config, 1, None)


def _tiny_model(config: Config) -> nn.Module:
    small = dataclasses.replace(config, hidden_size=2)
    if config.is_reading:
        return make_reader(small, Vocabulary(1, ()), (1, 1))
    model = recurrent_layer(small, 1)
    if not config.model.startswith("bn-"):  # which has no use for them, yet all models
        rbn.BatchNormLSTM(1, 2, **config.normalization)  # share a config
    return model


def load(config: Config, device: torch.device, root: Path | None = None) -> Loaded:
    """The data of a config, on a device."""
    if config.is_reading:
        return load_reading(config, root).to(device)
    options = config.data
    if config.is_text:
        loaders: dict[str, Any] = {"ptb": data.ptb, "text8": data.text8}
        text = (
            data.pydoc(**options)
            if config.task == "pydoc"
            else loaders[config.task](root=root, **options)
        )
        return data.Text(
            train=text.train.to(device),
            valid=text.valid.to(device),
            test=text.test.to(device),
            symbols=text.symbols,
        )
    if config.task == "digits":
        splits = data.digits(**options)
    else:
        loader: Any = data.pmnist if config.task == "pmnist" else data.mnist
        splits = loader(root=root, **options)
    parts = (splits.train, splits.valid, splits.test)
    return data.Splits(*(data.Split(p.inputs.to(device), p.labels.to(device)) for p in parts))


def build(
    config: Config,
    seed: int,
    device: torch.device,
    root: Path | None = None,
    loaded: Loaded | None = None,
) -> Classification | NextSymbol | ReadingTask:
    """The task of a run, its model's weights drawn from the seed.

    The process's random state is left where the run's own random numbers begin. loaded: what `load`
    returned, to share it among runs.
    """
    found = load(config, device, root) if loaded is None else loaded
    torch.manual_seed(seed)
    with _memory_for(config):
        task = _task(config, found, seed, device)
    if not isinstance(task, ReadingTask):  # whose batches must be many, to have all lengths
        task.population_batch = config.population_batch
    task.metric = f"valid_{config.select}"
    return task


def _task(
    config: Config, found: Loaded, seed: int, device: torch.device
) -> Classification | NextSymbol | ReadingTask:
    if isinstance(found, Reading):
        return build_reading(config, found, seed, device)
    if isinstance(found, data.Text):
        model: nn.Module = LanguageModel(
            recurrent_layer(config, len(found.symbols)), config.dropout
        )
        return NextSymbol(
            model.to(device), found, config.length, config.batch_size, seed, config.valid_windows
        )
    model = SequenceClassifier(recurrent_layer(config, 1), CLASSES, config.dropout)
    return Classification(model.to(device), found, config.batch_size, seed)


@contextlib.contextmanager
def _memory_for(config: Config) -> Iterator[None]:
    """Inside, a model that is too large for the memory is a setting that does not fit."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        said = str(error).lower()
        if isinstance(error, MemoryError) or any(words in said for words in _NO_MEMORY):
            raise ValueError(
                f"there is not enough memory for a model with hidden_size {config.hidden_size}"
            ) from error
        raise


def make_optimizer(config: Config, model: nn.Module, graph: bool = False) -> torch.optim.Optimizer:
    """The optimiser of a config; `graph`: one whose step a CUDA graph may hold."""
    options = dict(config.optimizer)
    name = options.pop("name")
    kind = _OPTIMIZERS[name]
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
        # Weights before a normalization may be of any size, so that decay only keeps their steps
        # from getting smaller beside them; gammas, betas and biases mean what they are.
        decayed = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        parameters = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    if "betas" in options:
        options["betas"] = tuple(map(float, options["betas"]))  # torch refuses a whole 0
    try:
        optimizer: torch.optim.Optimizer = kind(parameters, **options)
    except (AssertionError, LookupError, RuntimeError) as error:
        raise ValueError(f"the optimizer's settings do not fit: {error}") from error
    return optimizer


def make_trainer(
    config: Config,
    task: Classification | NextSymbol | ReadingTask,
    folder: Path,
    max_minutes: float | None = None,
    *,
    fabric: Fabric | None = None,
    graph: bool = False,
    on_step: Callable[[Progress], None] | None = None,
    on_record: Callable[[dict[str, float]], None] | None = None,
) -> Trainer:
    """A trainer that goes on from what is in the folder."""
    if graph and config.precision == "16-mixed":
        raise ValueError("graph cannot be had with 16-mixed, whose loss scale is set by the host")
    device = next(task.model.parameters()).device
    schedule = _schedule(config, task.batches_per_epoch, max_minutes)
    trainer = Trainer(
        task,
        make_optimizer(config, task.model, graph),
        schedule,
        folder,
        fabric=fabric or make_fabric(device, config.precision),
        graph=graph,
        on_step=on_step,
        on_record=on_record,
    )
    if isinstance(task, ReadingTask) and trainer.ranks.first:
        task.save_vocabulary(folder)
    return trainer


def _schedule(config: Config, epoch: int, max_minutes: float | None) -> Schedule:
    """When things happen, for epochs of so many steps."""
    return Schedule(
        steps=config.epochs * epoch,
        evaluate_every=epoch if config.evaluate_every is None else config.evaluate_every,
        checkpoint_every=max(1, min(1000, epoch)),
        patience=config.patience,
        clip=config.clip,
        decay_from=config.decay_from,
        average=config.average,
        checkpoint_seconds=_CHECKPOINT_SECONDS,
        max_minutes=max_minutes,
    )
