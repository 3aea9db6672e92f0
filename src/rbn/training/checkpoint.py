"""Checkpoints: safetensors files with metadata and checksums, written atomically."""

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

_METADATA, _METADATA_CRC = "facts", "facts_crc32"  # keys in the files of all versions


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. Says why."""


def save(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any], previous: Path | None = None
) -> None:
    """Write tensors and metadata to one file, atomically.

    The file gets its name only when it is completely on the disk; the old one stays until then.

    Args:
        path: the file to write.
        tensors: tensors by name.
        metadata: any JSON object.
        previous: keeps the old file under this name, on disks that support hard links.
    """
    from safetensors.torch import save_file

    plain = {name: v.detach().cpu().contiguous() for name, v in tensors.items()}
    text = json.dumps(metadata)
    header = {
        _METADATA: text,
        _METADATA_CRC: str(zlib.crc32(text.encode())),
        "crc32": str(_checksum(plain)),
    }
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # the user's default; safetensors sets a stricter one
        save_file(plain, part, metadata=header)
        part.chmod(mode)
        _sync(part)
        if previous is not None:
            with contextlib.suppress(OSError):
                previous.unlink(missing_ok=True)
                os.link(path, previous)
        os.replace(part, path)
        _sync(path.parent)
    except Exception as error:  # safetensors has its own exceptions for a full disk
        with contextlib.suppress(OSError):
            part.unlink()
        raise CheckpointError(
            f"could not write {path}: {error}. The previous checkpoint is intact."
        ) from error


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, on the CPU, and metadata that `save` wrote."""
    with _open(path) as (file, metadata, checksum):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _checksum(tensors) != checksum:
        raise CheckpointError(f"{path} is damaged: the checksum of its tensors does not match")
    return tensors, metadata


def load_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a checkpoint. Neither reads nor checks its tensors."""
    with _open(path) as (_, metadata, _):
        return metadata


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[Any, dict[str, Any], int]]:
    """The open file, its metadata and the expected checksum of its tensors."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            text = header[_METADATA]
            if zlib.crc32(text.encode()) != int(header[_METADATA_CRC]):
                raise ValueError("the checksum of its settings and progress does not match")
            yield file, json.loads(text), int(header["crc32"])
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


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The state of a training run ---------------------------------------------------------------------


# Options that depend on the device, not on the run.
_DEVICE_OPTIONS = ("capturable", "foreach", "fused")
# Options that tell Adam, RMSprop and SGD apart.
_KIND_OPTIONS = ("betas", "alpha", "dampening")


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a model, its optimiser and the random state, and the optimiser's other options."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    saved = optimizer.state_dict()
    numbers: dict[str, dict[str, Any]] = {}
    for index, state in saved["state"].items():
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
        for group in saved["param_groups"]
    ]
    return tensors, {"groups": groups, "numbers": numbers}


def fill(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load a model's parameters and statistics."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise CheckpointError(
            "the checkpoint does not match the run's settings, which may have changed: "
            + (lines[1] if len(lines) > 1 else lines[0]).strip()
        ) from error


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    options: dict[str, Any],
) -> None:
    """Load what `state_of` returned."""
    fill(model, _with_prefix("model.", tensors))
    state: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in options["numbers"].items()
    }
    for name, value in _with_prefix("optimizer.", tensors).items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    kinds = [
        [[name in group for name in _KIND_OPTIONS] for group in groups]
        for groups in (options["groups"], optimizer.param_groups)
    ]
    if kinds[0] != kinds[1]:
        raise CheckpointError(
            "the checkpoint does not match the run's settings, which may have changed: it has "
            f"another optimiser than {type(optimizer).__name__}, or other parameter groups"
        )
    groups = [
        {k: tuple(v) if k == "betas" else v for k, v in group.items()}
        | {k: v for k, v in own.items() if k in _DEVICE_OPTIONS}
        for group, own in zip(options["groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(tensors["random.cpu"])
    if torch.cuda.is_available() and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"])


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
