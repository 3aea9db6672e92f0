"""Baselines for questions: the share that can be answered, and answers by counting."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rbn.training.atomic_files import write_atomic

COLUMNS = (
    *("task", "text", "part", "questions", "not in the text", "most frequent entity"),
    "most frequent not in the question",
)


@dataclass(frozen=True)
class QuestionBaselines:
    """Accuracies, from 0 to 1, on one part of a set of questions.

    Attributes:
        task: name of the set.
        sentences: kept of each document; None: all of it.
        part: ``"train"``, ``"valid"`` or ``"test"``.
        questions: how many.
        ceiling: the part of the questions whose answer is in the text.
        frequent: the answer is the entity mentioned most.
        frequent_unasked: the same among those that are not in the question.
    """

    task: str
    sentences: int | None
    part: str
    questions: int
    ceiling: float
    frequent: float
    frequent_unasked: float

    @property
    def cells(self) -> tuple[str, ...]:
        """As error rates in percent, one for each of `COLUMNS`."""
        text = "whole documents" if self.sentences is None else f"{self.sentences} sentences"
        rates = (self.ceiling, self.frequent, self.frequent_unasked)
        errors = (f"{100 * (1 - rate):.1f}" for rate in rates)
        return (self.task, text, self.part, f"{self.questions:,}", *errors)


def write_counts(counts: Iterable[QuestionBaselines], command: str, path: Path) -> None:
    """Write them as ``questions*.json`` into the folder of a task's results."""
    content = {"parts": [asdict(each) for each in counts], "command": command}
    write_atomic(path, json.dumps(content, indent=2) + "\n")


def read_counts(folder: Path) -> tuple[list[QuestionBaselines], list[str]]:
    """All counts in a folder of results, and the commands that made them."""
    counts: list[QuestionBaselines] = []
    commands = []
    for path in sorted(folder.glob("*/questions*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            counts += [QuestionBaselines(**each) for each in content["parts"]]
            commands.append(str(content["command"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold counts of questions: {error}") from error
    return counts, commands
