"""Resizes a model's statistics to match a checkpoint, for loaders that compare shapes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rbn.nn.statistics import PopulationStatistics

Checkpoint = Mapping[str, object] | str | os.PathLike[str]


def match_statistics(model: nn.Module, checkpoint: Checkpoint) -> int:
    """Resize a model's population statistics to the number of time steps in a checkpoint.

    Statistics have one row for each time step seen in training, so those of a new model have none.
    `load_state_dict` accepts any number of rows. Loaders that compare shapes do not, such as
    Accelerate's `load_checkpoint_and_dispatch`: call this before them. It reads only the shapes;
    the statistics have no estimates until the checkpoint is loaded. Statistics stay as they are if
    they already have as many rows as the checkpoint, have a `max_length`, or are not in the
    checkpoint.

    Args:
        model: any module, on any device, including `meta`.
        checkpoint: a state dict; a ``.safetensors`` file or one of `torch.save`; the ``.json``
            index of a sharded checkpoint; or a folder with one of these, as written by
            `save_pretrained` and `Accelerator.save_model`.

    Returns:
        How many statistics were resized.
    """
    rows = {
        name.removesuffix(".mean"): shape[0]
        for name, shape in _shapes(checkpoint).items()
        if name.endswith(".mean") and len(shape) == 2
    }
    changed = 0
    for name, statistics in model.named_modules():
        if not isinstance(statistics, PopulationStatistics) or statistics.max_length is not None:
            continue
        wanted = rows.get(name)
        if wanted is None:  # a wrapper or head may add a prefix, in the model or the checkpoint
            results = {
                size
                for other, size in rows.items()
                if other.endswith(f".{name}") or name.endswith(f".{other}")
            }
            wanted = results.pop() if len(results) == 1 else None
        if wanted is not None and wanted != len(statistics.count):
            with torch.inference_mode(False):
                statistics.mean = statistics.mean.new_zeros(wanted, statistics.features)
                statistics.var = statistics.var.new_zeros(wanted, statistics.features)
                statistics.count = statistics.count.new_zeros(wanted)
            changed += 1
    return changed


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a checkpoint, by name."""
    if isinstance(checkpoint, Mapping):
        return {name: _shape(value) for name, value in checkpoint.items() if _shape(value)}
    if not isinstance(checkpoint, str | os.PathLike):
        kind = type(checkpoint).__name__
        raise TypeError(f"checkpoint must be a state dict or the path of a file, got {kind}")
    path = Path(checkpoint)
    if path.is_dir():
        path = _file_in(path)
    elif not path.is_file():
        raise FileNotFoundError(f"checkpoint: no such file or folder: {path}")
    if path.name.endswith(".json"):
        shards = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        return {k: v for shard in sorted(shards) for k, v in _shapes(path.parent / shard).items()}
    if path.suffix == ".safetensors":
        return _safetensors_shapes(path)
    return _shapes(torch.load(path, map_location="meta", weights_only=True))


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of a slice of a safetensors file."""
    if hasattr(value, "get_shape"):
        return tuple(value.get_shape())
    return tuple(getattr(value, "shape", ()))


def _file_in(folder: Path) -> Path:
    for pattern in (
        "*.safetensors.index.json",
        "*.safetensors",
        "*.bin.index.json",
        "*.bin",
        "*.pt",
        "*.pth",
    ):
        result = sorted(folder.glob(pattern))
        if len(result) > 1:
            raise ValueError(
                f"checkpoint: {folder} has several {pattern} files: pass the path of one of them"
            )
        if result:
            return result[0]
    raise FileNotFoundError(f"checkpoint: no .safetensors, .bin, .pt or .pth file in {folder}")


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes from the file's header: its length in 8 bytes, then a JSON object."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
