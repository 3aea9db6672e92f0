"""The paper's tables with our numbers next to its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean, stdev

from rbn.experiments.paper.estimate import format_duration
from rbn.experiments.paper.numbers import NAMES, Entry, Table
from rbn.experiments.paper.places import Place
from rbn.experiments.paper.published import Result, finished

COLUMNS = ("task", "model", "settings", "paper", "ours", "difference", "runs", "time of a run")


@dataclass(frozen=True)
class Row:
    """One number of the paper and ours of one set of settings.

    Attributes:
        entry: the paper's.
        place: where ours are from.
        table: which it belongs to.
        results: of different seeds; none where nothing was trained.
    """

    entry: Entry
    place: Place
    table: Table
    results: tuple[Result, ...]

    @property
    def values(self) -> list[float]:
        """The value of each seed that counts, in the table's unit."""
        return [self._value(result) for result in finished(self.results)]

    @property
    def ours(self) -> str:
        """Mean and standard deviation over the seeds; those that diverged do not count.

        Of two seeds their range: they say nothing of a deviation.
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
    def said(self) -> str:
        """The same for a sentence, with the number of runs if not all count."""
        counted, every = len(self.values), len(self.results)
        if any(result.diverged_at is not None for result in finished(self.results)):
            return f"{self.ours} (before diverging)"
        return self.ours + (f" ({counted} of {every} runs)" if counted < every else "")

    @property
    def difference(self) -> str:
        """Ours minus the paper's, if both are on the same data."""
        if not self.results or self.place.stand_in:
            return ""
        if not self.place.is_papers(self.results):
            return "other data"
        digits = self.table.digits
        rounded = round(mean(self.values) - self.entry.paper, digits) + 0.0  # never -0.0
        return f"{rounded:+.{digits}f}"

    @property
    def settings(self) -> str:
        """The config's name."""
        return self.results[0].settings if self.results else ""

    @property
    def runs(self) -> str:
        """How many runs count; those that diverged, with their best value before."""
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
        """Mean wall time of a run, and its device."""
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
        """As text, one for each of `COLUMNS`."""
        part = "" if self.entry.field == "test" else f", {self.entry.field}"
        paper = "" if self.place.stand_in else f"{self.entry.paper:g}"
        name = NAMES[self.entry.model]
        title = self.place.title_of(self.results) + part
        return (
            *(title, name, self.settings, paper, self.ours, self.difference, self.runs),
            self.time,
        )


def rows(table: Table, places: dict[str, Place], results: Iterable[Result]) -> list[Row]:
    """A table's rows: one for each model and its settings."""
    table_rows, known = [], list(results)
    for entry in table.entries:
        place = places[entry.place]
        groups = place.groups(known, entry.model) or [[]]
        table_rows += [Row(entry, place, table, tuple(group)) for group in groups]
    return table_rows
