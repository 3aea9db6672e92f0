"""The paper's tables with our numbers next to its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev

from rbn.experiments.paper.estimate import format_duration
from rbn.experiments.paper.numbers import NAMES, Entry, Table
from rbn.experiments.paper.paper_tasks import PaperTask
from rbn.experiments.paper.published import Result, finished

COLUMNS = ("task", "model", "settings", "paper", "ours", "difference", "runs", "time of a run")


@dataclass(frozen=True)
class Row:
    """A number of the paper next to ours with one set of settings.

    Attributes:
        entry: the paper's number.
        task: the paper's task.
        table: the table it belongs to.
        results: our runs, one for each seed; empty if nothing was trained.
    """

    entry: Entry
    task: PaperTask
    table: Table
    results: tuple[Result, ...]

    @property
    def values(self) -> list[float]:
        """The value of each run that counts, in the table's unit."""
        return [self._value(result) for result in finished(self.results)]

    @property
    def ours(self) -> str:
        """Mean and standard deviation over the runs that did not diverge.

        Two runs show their range instead of a standard deviation.
        """
        if not self.results:
            return "not trained yet"
        digits = self.table.digits
        text = f"{mean(self.values):.{digits}f}"
        if len(self.values) > 2:
            return f"{text} ± {stdev(self.values):.{digits}f}"
        if len(self.values) == 2:
            return f"{text} ({min(self.values):.{digits}f} to {max(self.values):.{digits}f})"
        return text

    @property
    def summary(self) -> str:
        """`ours`, with the number of runs if some of them diverged."""
        counted, every = len(self.values), len(self.results)
        if any(result.diverged_at is not None for result in finished(self.results)):
            return f"{self.ours} (before diverging)"
        return self.ours + (f" ({counted} of {every} runs)" if counted < every else "")

    @property
    def difference(self) -> str:
        """Ours minus the paper's, if both use the same data."""
        if not self.results or self.task.stand_in:
            return ""
        if not self.task.uses_paper_data(self.results):
            return "other data"
        digits = self.table.digits
        rounded = round(mean(self.values) - self.entry.paper, digits) + 0.0  # never -0.0
        return f"{rounded:+.{digits}f}"

    @property
    def paper(self) -> str:
        """The paper's number with the paper's decimals."""
        return f"{self.entry.paper:.{1 if self.table.percent else 2}f}"

    @property
    def settings(self) -> str:
        """The config's name."""
        return self.results[0].settings if self.results else ""

    @property
    def runs(self) -> str:
        """The number of runs that count, and the best values of those that diverged."""
        if not self.results:
            return ""
        counted = finished(self.results)
        left = [result for result in self.results if result not in counted]
        if not left:
            diverged = any(result.diverged_at is not None for result in counted)
            return str(len(counted)) + (" (diverged)" if diverged else "")
        before = ", ".join(f"{self._value(result):.{self.table.digits}f}" for result in left)
        return f"{len(counted)} ({len(left)} more diverged: {before})"

    @property
    def time(self) -> str:
        """Mean wall time of a run, with the device."""
        if not self.results:
            return ""
        seconds = mean(60 * result.minutes for result in finished(self.results))
        device = self.results[0].values.get("gpu") or "CPU"
        together = sorted({int(result.values.get("together") or 1) for result in self.results})
        ends = dict.fromkeys((together[0], together[-1]))
        shared = f", {' to '.join(map(str, ends))} at once" if together[-1] > 1 else ""
        return f"{format_duration(seconds)} ({device}{shared})"

    @property
    def command(self) -> str:
        """The command that reproduces these runs."""
        if not self.results:
            return ""
        seeds = ",".join(str(result.seed) for result in self.results)
        command = re.sub(r" --seeds? \S+", "", str(self.results[0].values["command"]))
        return f"{command} --seeds {seeds}"

    def _value(self, result: Result) -> float:
        return self.table.shown(float(result.values[self.entry.field]))

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, one cell for each of `COLUMNS`."""
        part = "" if self.entry.field == "test" else f", {self.entry.field}"
        paper = "" if self.task.stand_in else self.paper
        name = NAMES[self.entry.model]
        title = self.task.title_of(self.results) + part
        return (
            *(title, name, self.settings, paper, self.ours, self.difference, self.runs),
            self.time,
        )


def rows(table: Table, tasks: dict[str, PaperTask], results: Iterable[Result]) -> list[Row]:
    """The rows of a table, one for each model and settings."""
    table_rows, known = [], list(results)
    for entry in table.entries:
        task = tasks[entry.task]
        groups = task.groups(known, entry.model) or [[]]
        table_rows += [Row(entry, task, table, tuple(group)) for group in groups]
    return table_rows
