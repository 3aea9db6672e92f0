"""`rbn data`: list, download and verify data sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rbn.cli.common import interrupted_code, stop
from rbn.data.cnn.sets import SETS
from rbn.data.download import Progress
from rbn.data.errors import DataAltered, DataNotFound
from rbn.data.files import data_folder, find, missing, read
from rbn.data.files import get as get_files
from rbn.data.sources import DATASETS, DataSet, Source, data_set

app = typer.Typer(name="data", help="List, download and verify data sets.", no_args_is_help=True)

_PACKAGES = {"sklearn": "scikit-learn", "pydoc_data": "Python"}

Names = Annotated[list[str], typer.Argument(metavar="NAME", help="Names of data sets.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Data folder. Default: RBN_DATA, else ~/.cache/rbn/data."),
]


@app.command("list")
def list_sets(data_dir: DataDir = None) -> None:
    """List all data sets with their description, download size and location."""
    rows = [("data set", "what it is", "download", "where")]
    for data in DATASETS.values():
        size = f"{data.download_size / 1e6:.1f} MB" if data.sources else "none"
        rows.append((data.name, data.about, size, _where(data, data_dir)))
    for questions in SETS.values():
        folder = data_folder(data_dir) / questions.name
        where = str(folder) if (folder / "questions").is_dir() else "missing"
        rows.append((questions.name, questions.about, "by hand", where))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, about, size, where in rows:
        columns = (name.ljust(widths[0]), about.ljust(widths[1]), size.rjust(widths[2]), where)
        typer.echo("  ".join(columns))


@app.command()
def get(names: Names, data_dir: DataDir = None) -> None:
    """Download the missing files of these data sets, and check all of their files."""
    for data in _chosen(names, data_dir):
        if not data.sources:
            typer.echo(f"{data.name} needs no download: it comes with {_package(data)}")
            continue
        folder = data_folder(data_dir) / data.folder
        try:
            for source in data.sources:
                if path := find(source, folder):
                    read(source, path)
            with _progress_bar() as progress:
                paths = get_files(data.name, data_dir, progress)
        except KeyboardInterrupt as error:
            stop("interrupted; run the same command to resume", interrupted_code(error))
        except (DataNotFound, DataAltered, OSError) as error:
            stop(str(error), 1)
        for path in paths:
            typer.echo(f"got {path}")
        if not paths:
            typer.echo(f"{data.name} is in {folder}")


@app.command()
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Names of data sets. Default: all."),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Check that the files of these data sets exist and are intact."""
    wrong = 0
    files = {}  # a dict, to check a file that two data sets share only once
    for data in _chosen(names or list(DATASETS), data_dir):
        if data.comes_with and find_spec(data.comes_with) is None:
            wrong += 1
            typer.echo(f"missing  {_package(data)}, which contains {data.name}")
        files.update(dict.fromkeys(data.sources, data_folder(data_dir) / data.folder))
    for source, folder in files.items():
        state = _state(source, folder)
        wrong += not state.startswith("ok")
        typer.echo(state)
    if wrong:
        stop(f"{wrong} missing or damaged", 1)


def _state(source: Source, folder: Path) -> str:
    path = find(source, folder)
    if path is None:
        return f"missing  {folder / source.published.name}"
    try:
        read(source, path)
    except (DataAltered, OSError) as error:
        return f"damaged  {error}"
    return f"ok       {path}"


def _chosen(names: list[str], root: Path | None) -> list[DataSet]:
    for name in names:
        if name in SETS:
            folder = data_folder(root) / name
            how = SETS[name].how.format(folder=folder)
            stop(f"{name} belongs in {folder}: {how}", 2)
    try:
        return [data_set(name) for name in names]
    except ValueError as error:
        stop(str(error), 2)


def _where(data: DataSet, root: Path | None) -> str:
    if not data.sources:
        installed = find_spec(data.comes_with) is not None
        return f"comes with {_package(data)}" if installed else f"missing: {_package(data)}"
    absent = missing(data, root)
    if not absent:
        return str(data_folder(root) / data.folder)
    if len(absent) == len(data.sources):
        return "missing"
    return f"missing: {', '.join(source.name for source in absent)}"


def _package(data: DataSet) -> str:
    return _PACKAGES[data.comes_with]


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """Inside the ``with`` block, show a progress bar for each file on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    tasks: dict[str, TaskID] = {}
    console = Console(stderr=True)
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def progress(name: str, done: int, size: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=size)
            bars.update(tasks[name], completed=done)

        yield progress
