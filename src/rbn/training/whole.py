"""Atomic file writes, and JSON files with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SUM = "sha256"


def write_whole(path: Path, text: str) -> None:
    """Write a file that gets its name when all of it is written; a kill leaves what was there."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8", newline="\n")
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise OSError(error.errno, f"could not write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an error of the disk says which file could not be written."""
    try:
        yield
    except OSError as error:
        said = f"could not write {path}: {error.strerror or error}"
        raise OSError(error.errno, said) from error


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, with a checksum of its content under the key ``sha256``."""
    write_whole(path, json.dumps({**content, _SUM: _sum(content)}, indent=2) + "\n")


def read_checked(path: Path) -> dict[str, Any]:
    """The content of a file of `write_checked`, without the checksum.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what was written; names the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, it is not JSON: {error}") from error
    if not isinstance(found, dict) or _SUM not in found:
        raise ValueError(f"{path} has no checksum: it is damaged, or of an older version")
    if found.pop(_SUM) != _sum(found):
        raise ValueError(f"{path} is damaged or was edited: its checksum does not match")
    return found


def _sum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
