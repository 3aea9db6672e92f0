"""A run from its config to its result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rbn
from rbn import data
from rbn.experiments.config import Config, from_mapping
from rbn.experiments.reading import ReadingTask, build_reading
from rbn.experiments.tasks import Classification, NextSymbol, has_statistics
from rbn.models import LanguageModel, SequenceClassifier
from rbn.training import Progress, Schedule, Trainer

CLASSES = 10
_LAYERS = {
    "lstm": rbn.LSTM,
    "bn-lstm": rbn.BatchNormLSTM,
    "ln-lstm": rbn.LayerNormLSTM,
    "bn-rnn": rbn.BatchNormRNN,
}
_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


def recurrent_layer(config: Config, input_size: int) -> nn.Module:
    """The layer of a config, started as it says."""
    options: dict[str, Any] = dict(config.layer)
    if config.model in ("rnn", "irnn"):
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


def build(
    config: Config, seed: int, device: torch.device, root: Path | None = None
) -> Classification | NextSymbol | ReadingTask:
    """The data and the model of a run, the model's weights drawn from the seed."""
    torch.manual_seed(seed)
    if config.is_reading:
        return build_reading(config, seed, device, root)
    if config.is_text:
        loaders: dict[str, Any] = {"ptb": data.ptb, "text8": data.text8}
        text = (
            data.pydoc(**config.data)
            if config.task == "pydoc"
            else loaders[config.task](root=root, **config.data)
        )
        model: nn.Module = LanguageModel(recurrent_layer(config, len(text.symbols)))
        text = data.Text(
            train=text.train.to(device),
            valid=text.valid.to(device),
            test=text.test.to(device),
            symbols=text.symbols,
        )
        return NextSymbol(
            model.to(device), text, config.length, config.batch_size, seed, config.valid_windows
        )
    if config.task == "digits":
        splits = data.digits(**config.data)
    else:
        loader: Any = data.pmnist if config.task == "pmnist" else data.mnist
        splits = loader(root=root, **config.data)
    model = SequenceClassifier(recurrent_layer(config, 1), CLASSES)
    splits = data.Splits(
        *(
            data.Split(s.inputs.to(device), s.labels.to(device))
            for s in (splits.train, splits.valid, splits.test)
        )
    )
    return Classification(model.to(device), splits, config.batch_size, seed)


def make_trainer(
    config: Config,
    task: Classification | NextSymbol | ReadingTask,
    folder: Path,
    max_minutes: float | None = None,
    on_step: Callable[[Progress, Tensor], None] | None = None,
    on_record: Callable[[dict[str, float]], None] | None = None,
) -> Trainer:
    """A trainer that goes on from what is in the folder."""
    if isinstance(task, ReadingTask):
        task.save_vocabulary(folder)
    options = dict(config.optimizer)
    optimizer = _OPTIMIZERS[options.pop("name")](task.model.parameters(), **options)
    epoch = task.batches_per_epoch
    schedule = Schedule(
        steps=config.epochs * epoch,
        evaluate_every=config.evaluate_every or epoch,
        checkpoint_every=max(1, min(1000, epoch)),
        patience=config.patience,
        clip=config.clip,
        max_minutes=max_minutes,
    )
    return Trainer(task, optimizer, schedule, folder, on_step=on_step, on_record=on_record)


def check_free(folder: Path, config: Config, seed: int) -> None:
    """Refuse a folder that holds another run than this one."""
    if (folder / "config.json").exists() and opened(folder) != (config, seed):
        raise FileExistsError(
            f"{folder} holds a run with other settings; name another folder with --out"
        )


def start(folder: Path, config: Config, seed: int) -> None:
    """Make a run's folder, from which it can be opened again."""
    check_free(folder, config, seed)
    content = {"seed": seed, "config": json.loads(config.to_json())}
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "config.json.part"
    part.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(part, folder / "config.json")


def opened(folder: Path) -> tuple[Config, int]:
    """The config and seed of the run in a folder."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
        return from_mapping(found["config"]), int(found["seed"])
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder} holds no run: there is no {path.name} in it") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the config of a run: {error}") from error


@torch.no_grad()
def exact_statistics(config: Config, task: Classification | NextSymbol | ReadingTask) -> None:
    """Population statistics of the training set at the model as it is, as the paper reports."""
    if has_statistics(task.model):
        batches = task.population_batches(config.population_batch)
        forward = task.forward if isinstance(task, ReadingTask) else None
        rbn.update_population_stats(task.model, batches, forward=forward)


def finish(config: Config, seed: int, trainer: Trainer, command: str) -> dict[str, Any]:
    """Test the best model with exact statistics, and write ``result.json``."""
    task, progress = trainer.task, trainer.progress
    assert isinstance(task, Classification | NextSymbol | ReadingTask)
    trainer.load_best()
    exact_statistics(config, task)
    metric = "bits per character, whole sequence" if isinstance(task, NextSymbol) else "accuracy"
    metric = "error rate" if isinstance(task, ReadingTask) else metric
    result = {
        "task": config.task,
        "model": config.model,
        "tag": config.tag,
        "seed": seed,
        "metric": metric,
        "valid": task.measure_with("valid", "population"),
        "test": (
            task.measure_whole("test")
            if isinstance(task, NextSymbol)
            else task.measure_with("test", "population")
        ),
        "stats": "population",
        "steps": progress.step,
        "best_step": progress.best_step,
        "seconds": round(progress.seconds, 1),
        "params": sum(p.numel() for p in task.model.parameters()),
        "config": asdict(config),
        "versions": f"rbn {rbn.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": commit(),
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
    }
    path = trainer.folder / "result.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def commit() -> str:
    """The state of the source that runs, as git describes it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
