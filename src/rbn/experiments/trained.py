"""Trained models, opened again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rbn.data.text import encode
from rbn.experiments import build, runs
from rbn.experiments.config import Config
from rbn.experiments.measured import has_statistics
from rbn.experiments.reading import ReadingTask
from rbn.experiments.tasks import Classification, NextSymbol
from rbn.models import LanguageModel
from rbn.training import CheckpointError, checkpoint, make_fabric


def weights_of(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model of a run: with exact statistics where it is finished, else the best so far.

    Before the first evaluation it is the model of the last checkpoint.
    """
    for name in ("final", "best", "last"):
        path = folder / f"{name}.safetensors"
        if path.exists():
            tensors, facts = checkpoint.load(path)
            kept = {k: v for k, v in tensors.items() if k.startswith("model.")}
            return {k.removeprefix("model."): v for k, v in kept.items()}, facts
    raise CheckpointError(f"{folder} has no trained model yet: there is no checkpoint")


def is_final(folder: Path) -> bool:
    """Whether a run's model has the exact statistics that it gets at the end."""
    return (folder / "final.safetensors").exists()


def open_task(
    folder: Path, device: torch.device, root: Path | None = None
) -> tuple[Config, Classification | NextSymbol | ReadingTask]:
    """A run's settings, and its task with the trained model."""
    config, seed = runs.opened(folder)
    weights, _ = weights_of(folder)
    task = build.build(config, seed, device, root)
    checkpoint.fill(task.model, weights)
    task.model = make_fabric(device, config.precision).setup_module(task.model)
    task.model.eval()
    return config, task


def evaluate(
    task: Classification | NextSymbol | ReadingTask,
    split: str = "test",
    statistics: str = "population",
    length: str | None = None,
    estimate: int | None = None,
) -> float:
    """The figure of a trained model.

    Args:
        task: from `open_task`.
        split: ``train``, ``valid`` or ``test``; ``test-cnn`` of questions that have a second test
            set.
        statistics: ``population`` or ``batch``.
        length: characters of a window, or ``full`` for the text as one sequence, which needs
            population statistics; the training's by default. For texts.
        estimate: first give the model statistics of its own, from minibatches of this size. The
            best model so far of a run that is not finished needs that: what was kept with it lags
            behind, and with `average` is of other parameters.
    """
    splits = tuple(task.parts) if isinstance(task, ReadingTask) else ("train", "valid", "test")
    for name, value, known in (
        ("split", split, splits),
        ("stats", statistics, ("population", "batch")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if length is not None:
        if not isinstance(task, NextSymbol):
            raise ValueError("length is for texts; here every sequence has the length it has")
        if length == "full" and statistics == "batch":
            raise ValueError("length full is a batch of one sequence: it needs stats population")
        check_length(length)
    if estimate is not None and statistics == "population" and has_statistics(task.model):
        task.estimate_population(estimate)
    if length is None or not isinstance(task, NextSymbol):
        return task.measure_with(split, statistics)
    if length == "full":
        return task.measure_whole(split)
    before, task.length = task.length, int(length)
    try:
        return task.measure_with(split, statistics)
    finally:
        task.length = before


def check_length(length: str) -> None:
    """Refuse what is no length of windows."""
    if length != "full" and (not length.isdecimal() or int(length) < 2):
        raise ValueError(f"length must be a number from 2 up or full, got {length!r}")


def open_language_model(folder: Path, device: torch.device) -> tuple[nn.Module, str]:
    """A run's language model and its symbols, without the data."""
    config, _ = runs.opened(folder)
    if not config.is_text:
        raise ValueError(f"{folder} is a run on {config.task}, which is no text")
    weights, facts = weights_of(folder)
    if "symbols" not in facts:
        raise ValueError(f"{folder} is not finished: finish it with rbn resume {folder}")
    model = LanguageModel(build.recurrent_layer(config, len(facts["symbols"])))
    checkpoint.fill(model, weights)
    return model.to(device).eval(), facts["symbols"]


@torch.no_grad()
def sample(
    model: nn.Module, symbols: str, prompt: str, length: int, temperature: float, seed: int
) -> Iterator[str]:
    """Text that goes on from a prompt, a character at a time.

    Args:
        model: from `open_language_model`.
        symbols: the alphabet.
        prompt: at least one character.
        length: characters to draw.
        temperature: 0 takes the most likely character, 1 draws as the model says.
        seed: of the draws.
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
            # The likeliest one's is 0, and no temperature makes that infinite.
            scores = (scores - scores.max()).double() / temperature
            chances = torch.softmax(scores, 0)
            number = int(torch.multinomial(chances, 1, generator=generator))
        yield symbols[number]
        character = torch.tensor([[number]], device=device)
        logits, states = model(character, states, start=position)
