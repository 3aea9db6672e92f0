"""The folder of a run: its settings, and the lock that keeps other processes out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rbn.data.file_lock import file_lock
from rbn.experiments.config import Config, flat, from_mapping
from rbn.training.atomic_files import read_checked, write_checked

_RUN_FILES = (
    *(f"{name}.safetensors" for name in ("last", "previous", "best", "final", "diverged")),
    *("metrics.jsonl", "result.json"),
)


def check_available(folder: Path, config: Config, seed: int) -> None:
    """Reject a folder that holds a different run, and a path that is not a folder."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file, not a folder; choose another one (--out)")
    if not (folder / "config.json").exists():
        left = [name for name in _RUN_FILES if (folder / name).exists()]
        if left:
            raise FileExistsError(
                f"{folder} holds {' and '.join(left)} of a run, but no config.json with its "
                "settings; remove the folder, or choose another one (--out)"
            )
    elif (existing := read_config(folder)) != (config, seed):
        raise FileExistsError(
            f"{folder} holds a run with other settings ({_differences(existing, (config, seed))}); "
            "choose another folder (--out, or --runs of rbn reproduce)"
        )


def _differences(there: tuple[Config, int], here: tuple[Config, int], limit: int = 3) -> str:
    """The settings in which two runs differ; at most `limit` of them."""
    theirs, ours = (
        {"seed": seed, **flat(json.loads(config.to_json()))} for config, seed in (there, here)
    )
    differ = [
        f"{key} {_format(theirs, key)} there, {_format(ours, key)} here"
        for key in dict.fromkeys((*theirs, *ours))
        if theirs.get(key) != ours.get(key)
    ]
    more = len(differ) - limit
    return "; ".join(differ[:limit]) + (f"; and {more} more" if more > 0 else "")


def _format(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings.get(key), ensure_ascii=False)


def create(folder: Path, config: Config, seed: int, command: str | None = None) -> None:
    """Create a run's folder with its settings.

    command: the command that reproduces the run, without the seed.
    """
    check_available(folder, config, seed)
    if (folder / "config.json").exists():
        return
    command = command or f"rbn train {config.task} --model {config.model}"
    content = {
        "seed": seed,
        "command": f"{command} --seed {seed}",
        "config": json.loads(config.to_json()),
    }
    write_checked(folder / "config.json", content)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside the ``with`` block, only this process can train the run in a folder.

    A killed process releases the lock.

    Raises:
        FileExistsError: another process is training the run.
    """

    def refuse() -> None:
        raise FileExistsError(f"{folder} is being trained by another process")

    with file_lock(folder / "run.lock", refuse):
        yield


def command_of(folder: Path) -> str:
    """The command that started the run in a folder."""
    return str(read_checked(folder / "config.json")["command"])


def read_config(folder: Path) -> tuple[Config, int]:
    """The config and seed of the run in a folder."""
    path = folder / "config.json"
    try:
        content = read_checked(path)
    except NotADirectoryError as error:
        raise NotADirectoryError(f"{folder} is a file, not the folder of a run") from error
    except FileNotFoundError as error:
        reason = f"it has no {path.name}" if folder.is_dir() else "the folder does not exist"
        raise FileNotFoundError(f"{folder} holds no run: {reason}") from error
    try:
        return from_mapping(content["config"]), int(content["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the config of a run: {error}") from error
