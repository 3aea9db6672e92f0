"""Atomic file writes, and JSON files with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHECKSUM = "sha256"


def write_atomic(path: Path, text: str) -> None:
    """Write a text file atomically: a kill leaves the old file or the new one."""
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
def naming_file(path: Path) -> Iterator[None]:
    """Inside the ``with`` block, an OSError names the file that could not be written."""
    try:
        yield
    except OSError as error:
        message = f"could not write {path}: {error.strerror or error}"
        raise OSError(error.errno, message) from error


def write_checked(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically, with a checksum of its content under the key ``sha256``."""
    write_atomic(path, json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=2) + "\n")


def read_checked(path: Path) -> dict[str, Any]:
    """Read a file of `write_checked`, without the checksum.

    Raises:
        OSError: the file cannot be read.
        ValueError: the content does not match the checksum; names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: not JSON ({error})") from error
    if not isinstance(content, dict) or _CHECKSUM not in content:
        raise ValueError(f"{path} has no checksum: it is damaged, or from an older version")
    if content.pop(_CHECKSUM) != _checksum(content):
        raise ValueError(f"{path} is damaged or was edited: its checksum does not match")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
