"""``rbn sweep`` and ``rbn sweep status``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rbn.cli.common import (
    DataDir,
    Device,
    check_minutes,
    check_out,
    device_of,
    guarded,
    interrupted_code,
    make_console,
    make_table,
    printable,
    stop,
)

if TYPE_CHECKING:
    from rich.console import Console

    from rbn.experiments.search.status import SweepStatus
    from rbn.experiments.search.worker import Job

_RUN = "run"
File = Annotated[str, typer.Argument(help="A sweep (YAML), or a name like ptb-table5.")]
Workers = Annotated[int, typer.Option(help="Number of processes; they share the machine's GPUs.")]
Storage = Annotated[
    str | None,
    typer.Option(
        help="Where trials are stored: a .db (SQLite) or .log (journal) file, or a database URL, "
        "such as postgresql+psycopg://user@host/name, for many machines. Default: sweep.db in "
        "--out."
    ),
]
Trials = Annotated[int | None, typer.Option(help="Number of trials, instead of the file's.")]
Minutes = Annotated[float | None, typer.Option(help="Save and stop after this many minutes.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Setting of all trials as key=value, such as epochs=5."),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the runs. Default: runs/NAME.")]
Plot = Annotated[Path | None, typer.Option(help="Draw a plot to this .svg, .png or .pdf file.")]


class FileOrCommand(TyperGroup):
    """A command group whose first word may be a file instead of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the hidden command if the arguments do not begin with a command."""
        if not args or args[0] not in self.commands:
            args = [_RUN, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Hide the name of the hidden command in usage lines."""
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == _RUN else name), command, rest


app = typer.Typer(
    name="sweep",
    cls=FileOrCommand,
    help="Search for settings: grid, random or TPE; 'sweep status' shows the state.",
)


@app.command(_RUN, hidden=True)
def run(
    file: File,
    workers: Workers = 1,
    storage: Storage = None,
    trials: Trials = None,
    set_: Settings = None,
    max_minutes: Minutes = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    out: Out = None,
) -> None:
    """Run the trials of a sweep, each in a run of its own.

    You can stop or kill it at any time; run the same command to resume. Several machines with the
    same --storage share the work.

    'rbn sweep status FILE' shows the state.
    """
    from rbn.experiments.search.sampling import need_optuna

    def work() -> None:
        need_optuna()
        from rbn.experiments.search import storage as storages
        from rbn.experiments.search import sweep_file
        from rbn.experiments.search.status import sweep_status
        from rbn.experiments.search.worker import Job

        sweep = sweep_file.read(file, set_ or [], trials)
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        check_minutes(max_minutes)
        check_out(out)
        folder = out or Path("runs") / sweep.name
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file, not a folder: choose another one (--out)")
        where = storage or storages.default(folder)
        until = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        job = Job(sweep, where, folder, device_of(device), data_dir, until)
        jobs = _jobs(job, workers, dealt=device == "auto" and job.device.type == "cuda")
        console = make_console()
        with _naming_storage(storages.redacted(where)):
            study, _ = storages.open_study(sweep, where)
            code, reason = _work(jobs, console)
            now = sweep_status(study)
            _report(now, folder, console)
        if code:
            stop(f"{reason}; run the same command to resume", code)
        if now.best is None:
            stop("no trial finished", 1)

    guarded(work)


@contextlib.contextmanager
def _naming_storage(name: str) -> Iterator[None]:
    """Inside the ``with`` block, a storage error ends the command with one line that names it."""
    from optuna.exceptions import OptunaError

    try:
        yield
    except OptunaError as error:
        cause = error.__cause__ or error
        reason = str(getattr(cause, "orig", cause)).strip().splitlines()[0]
        stop(f"the storage {name}: {reason}", 1)


def _jobs(job: Job, workers: int, dealt: bool) -> list[Job]:
    """One job per worker. dealt: assign the machine's GPUs to them in turn."""
    import torch

    threads = None if workers == 1 else max(1, torch.get_num_threads() // workers)
    jobs = [replace(job, threads=threads) for _ in range(workers)]
    if not dealt:
        return jobs
    count = torch.cuda.device_count()
    return [replace(j, device=torch.device("cuda", k % count)) for k, j in enumerate(jobs)]


def _work(jobs: list[Job], console: Console) -> tuple[int, str]:
    """Run the jobs. Returns 0, or an exit code and the reason."""
    import torch

    from rbn.experiments import build
    from rbn.experiments.search import worker_processes
    from rbn.experiments.search.worker import TooManyFailed, Worker

    def say(line: str) -> None:
        _print_line(console, line)

    if len(jobs) == 1:
        try:
            bars = console if console.is_terminal else None
            return (0, "") if Worker(jobs[0], say, bars).work() else (3, "out of time")
        except KeyboardInterrupt as error:
            return interrupted_code(error), "stopped"
        except TooManyFailed as error:
            return 1, str(error)
    # Load once before starting workers, to report missing data and fill caches.
    build.load(jobs[0].sweep.config({}), torch.device("cpu"), jobs[0].root)
    codes = worker_processes.run(jobs, say)
    if 0 in codes:  # all trials are finished
        return 0, ""
    if max(codes) > 128:
        return max(codes), "stopped"
    if worker_processes.OUT_OF_TIME in codes:
        return 3, "out of time"
    return 1, "all workers have exited"


def _report(now: SweepStatus, folder: Path, console: Console) -> None:
    from rbn.experiments.search.space import listed

    lines = [now.summary()]
    if now.best is not None:
        lines.append(
            f"best: trial {now.best.number}, validation {now.figure} {now.best.best:.4f}, "
            f"{listed(now.best.parameters)}, in {folder / f'trial-{now.best.number:04d}'}"
        )
    for line in lines:
        _print_line(console, line)


def _print_line(console: Console, line: str) -> None:
    """Print a line that may contain text from the storage or from a file."""
    console.print(printable(line), soft_wrap=True, highlight=False, markup=False)


def _cell(text: str) -> str:
    """Text from the storage as a table cell: no terminal codes, no markup."""
    from rich.markup import escape

    return escape(printable(text))


@app.command()
def status(
    file: File,
    plot: Plot = None,
    storage: Storage = None,
    out: Out = None,
) -> None:
    """Show a table of a sweep's trials, and with --plot a plot."""
    from rbn.experiments.search.sampling import need_optuna

    def work() -> None:
        need_optuna()
        from rbn.experiments.search import plot as plots
        from rbn.experiments.search import storage as storages
        from rbn.experiments.search import sweep_file
        from rbn.experiments.search.space import format_value
        from rbn.experiments.search.status import sweep_status

        if plot is not None:
            plots.check(plot)
        name = sweep_file.find(file).stem
        folder = out or Path("runs") / name
        where = storage or storages.default(folder)
        with _naming_storage(storages.redacted(where)):
            now = sweep_status(storages.load_study(name, where))
        columns = ["trial", "state", *now.parameters, f"best {now.figure}", "steps", "minutes"]
        table = make_table(*map(_cell, columns))
        for row in now.rows:
            chosen = [format_value(row.parameters.get(name, "")) for name in now.parameters]
            best = "" if row.best is None else f"{row.best:.4f}"
            numbers = [best, f"{row.steps:,}", f"{row.seconds / 60:.1f}"]
            table.add_row(str(row.number), row.state, *map(_cell, chosen), *numbers)
        console = make_console()
        console.print(table)
        for row in now.rows:
            if row.remark:
                _print_line(console, f"trial {row.number}, {row.state}: {row.remark}")
        _report(now, folder, console)
        if plot is not None:
            plots.draw(now, plot)
            _print_line(console, str(plot))

    guarded(work)
