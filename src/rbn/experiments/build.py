"""The data, task and trainer of a config."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rbn.data import Splits, Text
from rbn.data.cnn import Reading
from rbn.experiments.base_task import BaseTask
from rbn.experiments.config import Config
from rbn.experiments.optimizers import make_optimizer
from rbn.experiments.reading import ReadingTask
from rbn.experiments.task_kinds import TaskKind
from rbn.experiments.tasks import Classification, NextSymbol
from rbn.training import Progress, Schedule, Trainer, make_fabric

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_CHECKPOINT_SECONDS = 30.0
_CLASSES: dict[TaskKind, type[BaseTask]] = {
    cls.kind: cls for cls in (Classification, NextSymbol, ReadingTask)
}
# Parts of torch's messages about a tensor that is too large.
_OUT_OF_MEMORY = ("not enough memory", "allocate memory", "out of memory", "overflow")
Loaded = Splits | Text | Reading


def task_class(config: Config) -> type[BaseTask]:
    """The class of a config's task."""
    return _CLASSES[config.kind]


def check(config: Config) -> None:
    """Check with a small model that model, optimiser and trainer accept a config's options.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option is unknown or its value is invalid.
    """
    small = dataclasses.replace(config, hidden_size=2)
    try:
        with torch.random.fork_rng(devices=[]):
            model = task_class(config).check_model(small)
    except RuntimeError as error:  # torch's, for numbers that do not fit into float32
        raise ValueError(f"the model's settings are not valid: {error}") from error
    make_optimizer(config, model)
    _schedule(config, 1, None)


def load(config: Config, device: torch.device, root: Path | None = None) -> Loaded:
    """The data of a config, on a device."""
    loaded: Loaded = task_class(config).load_data(config, root).to(device)
    return loaded


def build(
    config: Config,
    seed: int,
    device: torch.device,
    root: Path | None = None,
    loaded: Loaded | None = None,
) -> BaseTask:
    """The task of a run, its model initialized from the seed.

    Leaves the process's random state at the start of the run's own random numbers. loaded: the
    result of `load`, which several runs can share.
    """
    data = load(config, device, root) if loaded is None else loaded
    torch.manual_seed(seed)
    with _explain_out_of_memory(config):
        task = task_class(config).from_config(config, data, seed, device)
    task.metric = f"valid_{config.select}"
    return task


@contextlib.contextmanager
def _explain_out_of_memory(config: Config) -> Iterator[None]:
    """Inside the ``with`` block, running out of memory raises an error that names `hidden_size`."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:
        message = str(error).lower()
        if isinstance(error, MemoryError) or any(words in message for words in _OUT_OF_MEMORY):
            raise ValueError(
                f"there is not enough memory for a model with hidden_size {config.hidden_size}"
            ) from error
        raise


def make_trainer(
    config: Config,
    task: BaseTask,
    folder: Path,
    max_minutes: float | None = None,
    *,
    fabric: Fabric | None = None,
    graph: bool = False,
    on_step: Callable[[Progress], None] | None = None,
    on_record: Callable[[dict[str, float]], None] | None = None,
) -> Trainer:
    """Make a trainer, which resumes from a checkpoint in the folder. See `Trainer`."""
    if graph and config.precision == "16-mixed":
        raise ValueError("graph does not work with 16-mixed: the host sets its loss scale")
    device = next(task.model.parameters()).device
    trainer = Trainer(
        task,
        make_optimizer(config, task.model, graph),
        _schedule(config, task.batches_per_epoch, max_minutes),
        folder,
        fabric=fabric or make_fabric(device, config.precision),
        graph=graph,
        on_step=on_step,
        on_record=on_record,
    )
    if trainer.ranks.first:
        task.write_files(folder)
    return trainer


def _schedule(config: Config, epoch: int, max_minutes: float | None) -> Schedule:
    """The schedule of a config, for epochs of `epoch` steps."""
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
