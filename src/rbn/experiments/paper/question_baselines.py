"""Baselines for questions: how many are answerable, and answers by counting entities."""

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
    """Accuracies from 0 to 1 on one part of a set of questions.

    Attributes:
        task: name of the set.
        sentences: number of sentences per document; None means full documents.
        part: ``"train"``, ``"valid"`` or ``"test"``.
        questions: number of questions.
        ceiling: share of the questions whose answer is in the text.
        frequent: accuracy of the most frequent entity.
        frequent_unasked: accuracy of the most frequent entity that is not in the question.
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
        """The row as text, with error rates in percent; one cell for each of `COLUMNS`."""
        text = "whole documents" if self.sentences is None else f"{self.sentences} sentences"
        rates = (self.ceiling, self.frequent, self.frequent_unasked)
        errors = (f"{100 * (1 - rate):.1f}" for rate in rates)
        return (self.task, text, self.part, f"{self.questions:,}", *errors)


def write_counts(counts: Iterable[QuestionBaselines], command: str, path: Path) -> None:
    """Write baselines as ``questions*.json`` into the results folder of a task."""
    content = {"parts": [asdict(each) for each in counts], "command": command}
    write_atomic(path, json.dumps(content, indent=2) + "\n")


def read_counts(folder: Path) -> tuple[list[QuestionBaselines], list[str]]:
    """All baselines in a folder of results, and the commands that computed them."""
    counts: list[QuestionBaselines] = []
    commands = []
    for path in sorted(folder.glob("*/questions*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            counts += [QuestionBaselines(**each) for each in content["parts"]]
            commands.append(str(content["command"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not contain question baselines: {error}") from error
    return counts, commands
