"""Options, errors and tables that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

_PIPED = 100_000  # characters, wider than any table
stopped = False  # whether `stop` has printed a reason
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto uses a GPU if available.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Data folder. Default: RBN_DATA, else ~/.cache/rbn/data.")
]
Run = Annotated[
    Path,
    typer.Argument(
        help="Folder of a run, or a model that comes with rbn: pretrained:digits, "
        "pretrained:pmnist or pretrained:pydoc."
    ),
]


class Stopped(Exception):
    """Ends a command with a message and an exit code."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason, code)  # both, so that it can be pickled
        self.reason, self.code = reason, code


def guarded(work: Callable[[], None]) -> None:
    """Run a command. Errors that a user can fix print one sentence instead of a traceback."""
    from rbn.data.process_pool import WorkerLost
    from rbn.training import CheckpointError, Diverged

    try:
        work()
    except (ImportError, OSError, ValueError) as error:
        stop(str(error), 2)
    except (CheckpointError, Diverged, WorkerLost) as error:
        stop(str(error), 1)
    except Stopped as error:
        stop(error.reason, error.code)
    except KeyboardInterrupt as error:
        stop("interrupted", interrupted_code(error))


def interrupted_code(error: KeyboardInterrupt) -> int:
    """The exit code after a signal: 130 for Ctrl-C, 143 for SIGTERM."""
    from rbn.training.interrupt import exit_signal

    return 128 + exit_signal(error)


def printable(text: str) -> str:
    """Replace control characters, which a terminal would interpret."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def stop(reason: str, code: int) -> NoReturn:
    """Print a reason and exit."""
    global stopped
    stopped = True
    typer.echo(f"rbn: {printable(reason)}", err=True)
    raise typer.Exit(code)


def make_table(*columns: str, title: str | None = None) -> Table:
    """An empty table that wraps text in a narrow terminal instead of truncating it."""
    from rich.table import Column, Table

    return Table(*(Column(column, overflow="fold") for column in columns), title=title)


def make_console() -> Console:
    """A console as wide as the terminal or COLUMNS. Without either, tables are never wrapped."""
    from rich.console import Console

    console = Console()
    # Check the file itself: with FORCE_COLOR, Rich treats a pipe as an 80-column terminal.
    piped = not console.file.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PIPED) if piped else console


def in_clone() -> bool:
    """Whether the current folder is in a clone of this project."""
    here = Path.cwd()
    return any((folder / "src/rbn/__init__.py").is_file() for folder in (here, *here.parents))


def default_folder(name: str, cloned: str | None = None) -> Path:
    """The default folder for some output, inside ``runs`` so that everything is in one place.

    A clone uses other folders, whose content is part of the project.

    Args:
        name: name of the folder in ``runs``.
        cloned: the folder to use in a clone, relative to its root; `name` by default.
    """
    return Path(cloned or name) if in_clone() else Path("runs") / name


def folder_of_run(run: Path) -> Path:
    """Resolve a run on the command line: its folder, or that of a pretrained model."""
    from rbn.pretrained_models import PREFIX, folder_of

    name = str(run)
    return folder_of(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else run


def check_out(out: Path | None) -> None:
    """Reject an empty --out, which Python treats as the current folder."""
    if out is not None and out == Path():
        raise ValueError("out must name a folder, got '' or '.'")


def check_minutes(minutes: float | None) -> None:
    """Reject a --max-minutes that is not positive."""
    if minutes is not None and not minutes > 0:
        raise ValueError(f"max-minutes must be positive, got {minutes}")


def device_of(name: str) -> torch.device:
    """Resolve a device name from the command line."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cpu" and device.index not in (None, 0):
        raise ValueError(f"there is no {name}: device cpu stands for all processors")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda needs a GPU, but PyTorch finds none")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no {name}: PyTorch finds {torch.cuda.device_count()} GPUs")
    return device
