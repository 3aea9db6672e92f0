"""The demo's terminal output: progress bars, and a table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rbn.experiments.demo.result import THRESHOLDS, Record, Result
from rbn.experiments.demo.summary import headline, outcome, percent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


NOTE = (
    "The BN-LSTM is evaluated with population statistics, re-estimated from the training images at "
    "the current weights."
)


class Bar:
    """The progress bar of one model."""

    def __init__(self, progress: Progress, name: str, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=steps, speed="", accuracy="")

    def on_step(self, step: int) -> None:
        """Show a step."""
        speed = self._progress.tasks[self._task].speed
        shown = f"{speed:.1f} steps/s" if speed else ""
        self._progress.update(self._task, completed=step, speed=shown)

    def on_record(self, record: Record) -> None:
        """Show the latest accuracy."""
        text = f"validation {percent(record.valid_population)}"
        self._progress.update(self._task, accuracy=text)


@contextmanager
def progress_bars(console: Console) -> Iterator[Progress]:
    """Inside the ``with`` block, show progress bars on the console."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:>12}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[accuracy]:>17}"),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        yield progress


def show(result: Result, console: Console) -> None:
    """Print the table and the outcome."""
    from rich.table import Table

    table = Table(title=f"{result.settings.task}, seed {result.settings.seed}")
    table.add_column("model")
    for title in column_titles():
        table.add_column(title, justify="right")
    for row in rows(result):
        table.add_row(*row)
    console.print(table)
    console.print(NOTE, style="dim", highlight=False)
    console.print(f"[bold]{headline(result)}.[/bold]", highlight=False)
    for sentence in outcome(result):
        console.print(sentence, highlight=False)


def column_titles() -> list[str]:
    """The column titles of the table, without that of the model."""
    steps = (f"steps to {100 * t:.0f}%" for t in THRESHOLDS)
    return ["best validation", "test", *steps, "time"]


def rows(result: Result) -> list[list[str]]:
    """A row for each model, as text."""
    table = []
    for model in result.models:
        reached = (model.reached(t) for t in THRESHOLDS)
        table.append(
            [
                model.name,
                percent(model.best.valid_population),
                percent(model.test_accuracy),
                *("not reached" if r is None else str(r.step) for r in reached),
                f"{model.last.seconds:.0f} s",
            ]
        )
    return table
