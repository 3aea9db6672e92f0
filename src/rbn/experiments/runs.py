"""The folder of a run: what was asked for, so that it can be gone on with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rbn.experiments.config import Config, flat, from_mapping
from rbn.training.atomic_files import read_checked, write_checked

_LEFT_BEHIND = (
    *(f"{name}.safetensors" for name in ("last", "previous", "best", "final", "diverged")),
    *("metrics.jsonl", "result.json"),
)


def check_free(folder: Path, config: Config, seed: int) -> None:
    """Refuse a folder that holds another run than this one, and what is no folder."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file, not a folder; name another (--out)")
    if not (folder / "config.json").exists():
        left = [name for name in _LEFT_BEHIND if (folder / name).exists()]
        if left:
            raise FileExistsError(
                f"{folder} holds {' and '.join(left)} of a run whose config.json is gone, so its "
                "settings are not known; remove the folder, or name another (--out)"
            )
    elif (found := opened(folder)) != (config, seed):
        raise FileExistsError(
            f"{folder} holds a run with other settings ({_others(found, (config, seed))}); name "
            "another folder (--out, or --runs of rbn reproduce)"
        )


def _others(there: tuple[Config, int], here: tuple[Config, int], most: int = 3) -> str:
    """What a run has there that is something else here."""
    theirs, ours = (
        {"seed": seed, **flat(json.loads(config.to_json()))} for config, seed in (there, here)
    )
    differ = [
        f"{key} {_shown(theirs, key)} there, {_shown(ours, key)} here"
        for key in dict.fromkeys((*theirs, *ours))
        if theirs.get(key) != ours.get(key)
    ]
    more = len(differ) - most
    return "; ".join(differ[:most]) + (f"; and {more} more" if more > 0 else "")


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings.get(key), ensure_ascii=False)


def start(folder: Path, config: Config, seed: int, command: str | None = None) -> None:
    """Make a run's folder, from which it can be opened again.

    command: with which it can be done again, less the seed.
    """
    check_free(folder, config, seed)
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
def held(folder: Path) -> Iterator[None]:
    """Inside, no other process can hold the run in a folder; a kill lets go of it.

    Where the system has no such locks, as Windows, it has no effect.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / "config.json").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"{folder} is being trained by another process") from None
        except OSError:  # a disk without locks
            pass
        yield


def command_of(folder: Path) -> str:
    """The command that began the run in a folder."""
    return str(read_checked(folder / "config.json")["command"])


def opened(folder: Path) -> tuple[Config, int]:
    """The config and seed of the run in a folder."""
    path = folder / "config.json"
    try:
        found = read_checked(path)
    except NotADirectoryError as error:
        raise NotADirectoryError(f"{folder} is a file, not the folder of a run") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder} holds no run: there is no {path.name} in it") from error
    try:
        return from_mapping(found["config"]), int(found["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the config of a run: {error}") from error
