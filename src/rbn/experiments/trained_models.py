"""Loads trained models, evaluates them, and samples text from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rbn.data.text import encode
from rbn.experiments import build, run_folder
from rbn.experiments.base_task import BaseTask, has_statistics
from rbn.experiments.config import Config
from rbn.experiments.recurrent_layers import recurrent_layer
from rbn.experiments.task_kinds import TEXT
from rbn.models import LanguageModel
from rbn.training import CheckpointError, checkpoint, make_fabric


def load_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and metadata of a run's model: final with exact statistics, or best so far.

    Before the first evaluation, they are those of the last checkpoint.
    """
    for name in ("final", "best", "last"):
        path = folder / f"{name}.safetensors"
        if path.exists():
            tensors, metadata = checkpoint.load(path)
            weights = {k: v for k, v in tensors.items() if k.startswith("model.")}
            return {k.removeprefix("model."): v for k, v in weights.items()}, metadata
    raise CheckpointError(f"{folder} has no trained model yet: there is no checkpoint")


def is_final(folder: Path) -> bool:
    """Whether a run is finished, so that its model has exact statistics."""
    return (folder / "final.safetensors").exists()


def open_task(
    folder: Path, device: torch.device, root: Path | None = None
) -> tuple[Config, BaseTask]:
    """A run's settings, and its task with the trained model."""
    config, seed = run_folder.read_config(folder)
    weights, _ = load_weights(folder)
    task = build.build(config, seed, device, root)
    checkpoint.fill(task.model, weights)
    task.model = make_fabric(device, config.precision).setup_module(task.model)
    task.model.eval()
    return config, task


def evaluate(
    task: BaseTask,
    split: str = "test",
    statistics: str = "population",
    length: str | None = None,
    estimate: int | None = None,
) -> float:
    """Evaluate a trained model.

    Args:
        task: result of `open_task`.
        split: one of the task's `split_names`.
        statistics: ``population`` or ``batch``.
        length: for texts: characters per window, or ``full`` for the text as one sequence, which
            needs population statistics; the training length by default.
        estimate: first estimate population statistics, from minibatches of this size. Needed
            for the best model of an unfinished run: the statistics saved with it lag behind, and
            with `average` belong to other parameters.
    """
    for name, value, known in (
        ("split", split, task.split_names),
        ("stats", statistics, ("population", "batch")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if length is not None:
        check_length(length)
        task.check_length(length, statistics)
    if estimate is not None and statistics == "population" and has_statistics(task.model):
        task.estimate_population(estimate)
    if length is None:
        return task.measure_with(split, statistics)
    return task.measure_at_length(split, statistics, length)


def check_length(length: str) -> None:
    """Reject anything that is not a window length."""
    if length != "full" and (not length.isdecimal() or int(length) < 2):
        raise ValueError(f"length must be an integer of at least 2, or full, got {length!r}")


def open_language_model(folder: Path, device: torch.device) -> tuple[nn.Module, str]:
    """A run's language model and its symbols, without the data."""
    config, _ = run_folder.read_config(folder)
    if config.kind is not TEXT:
        raise ValueError(f"{folder.name} is a run on {config.task}, which is not a text")
    weights, metadata = load_weights(folder)
    if "symbols" not in metadata:
        raise ValueError(f"{folder} is not finished: finish it with rbn resume {folder}")
    model = LanguageModel(recurrent_layer(config, len(metadata["symbols"])))
    checkpoint.fill(model, weights)
    return model.to(device).eval(), metadata["symbols"]


@torch.no_grad()
def sample(
    model: nn.Module, symbols: str, prompt: str, length: int, temperature: float, seed: int
) -> Iterator[str]:
    """Continue a prompt, a character at a time.

    Args:
        model: result of `open_language_model`.
        symbols: the alphabet.
        prompt: at least one character.
        length: characters to sample.
        temperature: 0 takes the most likely character, 1 samples from the model's distribution.
        seed: random seed of the samples.
    """
    if not prompt:
        raise ValueError("prompt must have at least one character")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a number of at least 0, got {temperature}")
    for name, value in (("length", length), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    device = next(model.parameters()).device
    read = encode(prompt, symbols).to(device=device, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    logits, states = model(read[:, None])
    for position in range(len(prompt), len(prompt) + length):
        scores = logits[-1, 0].float().cpu()
        if temperature == 0:
            number = int(scores.argmax())
        else:
            # The largest score is 0, so no temperature makes a score infinite.
            scores = (scores - scores.max()).double() / temperature
            chances = torch.softmax(scores, 0)
            number = int(torch.multinomial(chances, 1, generator=generator))
        yield symbols[number]
        character = torch.tensor([[number]], device=device)
        logits, states = model(character, states, start=position)
