"""Checkpoints: one safetensors file each, written whole or not at all, read without pickle."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with the reason."""


def save(
    path: Path, tensors: dict[str, Tensor], facts: dict[str, Any], before: Path | None = None
) -> None:
    """Write tensors and facts (anything JSON can hold) to one file, atomically.

    The file appears under its name only when it is complete and on the disk; what was there under
    that name before stays until then.

    Args:
        path: of the file.
        tensors: by name.
        facts: whatever else there is to know.
        before: the name under which the file that is replaced stays, where the disk has links.
    """
    from safetensors.torch import save_file

    plain = {name: v.detach().cpu().contiguous() for name, v in tensors.items()}
    text = json.dumps(facts)
    metadata = {
        "facts": text,
        "facts_crc32": str(zlib.crc32(text.encode())),
        "crc32": str(_checksum(plain)),
    }
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # as other files of the user's have; safetensors makes its own
        save_file(plain, part, metadata=metadata)
        part.chmod(mode)
        _to_disk(part)
        if before is not None:
            with contextlib.suppress(OSError):
                before.unlink(missing_ok=True)
                os.link(path, before)
        os.replace(part, path)
        _to_disk(path.parent)
    except Exception as error:  # safetensors has errors of its own for a full disk
        with contextlib.suppress(OSError):
            part.unlink()
        raise CheckpointError(
            f"could not write {path}: {error}. The checkpoint before it is still good."
        ) from error


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save` wrote, on the CPU."""
    with _reading(path) as (file, facts, checksum):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _checksum(tensors) != checksum:
        raise CheckpointError(f"{path} is damaged: its numbers are not those that were written")
    return tensors, facts


def load_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint; its tensors are neither read nor checked."""
    with _reading(path) as (_, facts, _):
        return facts


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[tuple[Any, dict[str, Any], int]]:
    """The open file, its facts and the checksum that its tensors must have."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            text = metadata["facts"]
            if zlib.crc32(text.encode()) != int(metadata["facts_crc32"]):
                raise ValueError("its settings and progress are not those that were written")
            yield file, json.loads(text), int(metadata["crc32"])
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except Exception as error:
        raise CheckpointError(f"{path} is not a checkpoint, or damaged: {error}") from error


def _checksum(tensors: dict[str, Tensor]) -> int:
    value = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, value)
    return value


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive the machine's end."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What a training run consists of -----------------------------------------------------------------


# How an optimiser computes, which depends on the device and not on the run.
_OF_DEVICE = ("capturable", "foreach", "fused")
# Settings by which optimisers of different kinds can be told apart.
_OF_A_KIND = ("betas", "alpha", "dampening")


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Model, optimiser and random states as tensors, and what of them is no tensor."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    found = optimizer.state_dict()
    numbers: dict[str, dict[str, Any]] = {}
    for index, state in found["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                numbers.setdefault(str(index), {})[key] = value
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    groups = [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items()}
        for group in found["param_groups"]
    ]
    return tensors, {"groups": groups, "numbers": numbers}


def fill(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give a model parameters and statistics by name."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise CheckpointError(
            "the checkpoint does not fit the run's settings, which may have been changed: "
            + (lines[1] if len(lines) > 1 else lines[0]).strip()
        ) from error


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
) -> None:
    """Put back what `state_of` took."""
    fill(model, _under("model.", tensors))
    state: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in facts["numbers"].items()
    }
    for name, value in _under("optimizer.", tensors).items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    kinds = [
        [[name in group for name in _OF_A_KIND] for group in groups]
        for groups in (facts["groups"], optimizer.param_groups)
    ]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            "the checkpoint does not fit the run's settings, which may have been changed: it is of "
            f"another optimiser than {type(optimizer).__name__}, or with other groups of parameters"
        )
    groups = [
        {k: tuple(v) if k == "betas" else v for k, v in group.items()}
        | {k: v for k, v in own.items() if k in _OF_DEVICE}
        for group, own in zip(facts["groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(tensors["random.cpu"])
    if torch.cuda.is_available() and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
