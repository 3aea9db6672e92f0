"""Folders of integer arrays with checksums, which are memory-mapped when read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rbn.data.errors import DataAltered

MANIFEST = "manifest.json"
_SUM = "sha256"
_METADATA = "facts"  # the key in the files of all versions
_TYPES = {"int32": torch.int32, "int64": torch.int64}


class Writer:
    """Writes arrays piece by piece. The folder gets its final name when it is complete.

    A context manager, which closes the files.

    Args:
        folder: the folder to write; replaces an existing one.
    """

    def __init__(self, folder: Path) -> None:
        if sys.byteorder != "little":
            raise RuntimeError("arrays are stored little-endian, but this machine is big-endian")
        self.folder = folder
        self.part = folder.with_name(folder.name + ".part")
        shutil.rmtree(self.part, ignore_errors=True)
        self.part.mkdir(parents=True)
        self._files: dict[str, IO[bytes]] = {}
        self._sums: dict[str, Any] = {}
        self._arrays: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, name: str, values: Tensor) -> None:
        """Append to an array, int32 or int64 ``[n]``."""
        kind = str(values.dtype).removeprefix("torch.")
        if kind not in _TYPES:
            raise TypeError(f"values must be int32 or int64, got {values.dtype}")
        if name not in self._files:
            self._files[name] = (self.part / f"{name}.{kind}").open("wb")
            self._sums[name] = hashlib.sha256()
            self._arrays[name] = {"type": kind, "length": 0}
        content = bytes(values.contiguous().view(torch.uint8).numpy().data) if len(values) else b""
        self._files[name].write(content)
        self._sums[name].update(content)
        self._arrays[name]["length"] += len(values)

    def finish(self, metadata: dict[str, Any]) -> None:
        """Write the metadata, any JSON value, and give the folder its final name."""
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._arrays[name]["sha256"] = self._sums[name].hexdigest()
        manifest: dict[str, Any] = {"arrays": self._arrays, _METADATA: metadata}
        manifest[_SUM] = checksum(manifest)
        with (self.part / MANIFEST).open("w", encoding="utf-8") as text:
            json.dump(manifest, text)
            text.flush()
            os.fsync(text.fileno())
        shutil.rmtree(self.folder, ignore_errors=True)
        os.replace(self.part, self.folder)


def read_metadata(folder: Path) -> dict[str, Any] | None:
    """The metadata of a folder of arrays; None if there is no such folder."""
    manifest = _manifest(folder)
    return None if manifest is None else manifest[_METADATA]


def _manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, after checking it."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        intact = manifest.pop(_SUM) == checksum(manifest)
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataAltered(f"{path} is damaged: remove {folder}") from error
    if not intact:
        raise DataAltered(f"{path} is damaged (its checksum does not match): remove {folder}")
    return manifest


def checksum(content: dict[str, Any]) -> str:
    """The SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the arrays, memory-mapped, and the metadata.

    Raises:
        DataAltered: a file is missing, or its size or SHA-256 does not match; names it.
    """
    manifest = _manifest(folder)
    if manifest is None:
        raise DataAltered(f"no {MANIFEST} in {folder}")
    arrays = {}
    for name, about in manifest["arrays"].items():
        dtype = _TYPES[about["type"]]
        path = folder / f"{name}.{about['type']}"
        size = about["length"] * dtype.itemsize
        if not path.is_file() or path.stat().st_size != size:
            raise DataAltered(f"{path} is missing or truncated: remove {folder}")
        if _sha256(path) != about["sha256"]:
            raise DataAltered(f"{path} is damaged: remove {folder}")
        arrays[name] = (
            torch.from_file(str(path), shared=False, size=about["length"], dtype=dtype)
            if size
            else torch.empty(0, dtype=dtype)
        )
    return arrays, manifest[_METADATA]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
