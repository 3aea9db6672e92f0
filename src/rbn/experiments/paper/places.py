"""The results that belong to each of the paper's tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rbn.experiments.paper.plan import SHORT
from rbn.experiments.paper.published import Result

_PREFERRED = ("", *SHORT, "full")


@dataclass(frozen=True)
class Place:
    """The results that stand for one of the paper's tasks.

    Attributes:
        title: of its panels and rows.
        tasks: names of tasks, the first that has results counts. Those after the first are not the
            paper's own task and go by their names.
        tags: those that belong to it; None takes all but the sweep's.
        whole: of questions, whether documents are whole or cut to four sentences.
        stand_in: whether it is small embedded data in place of the paper's.
    """

    title: str
    tasks: tuple[str, ...]
    tags: tuple[str, ...] | None = None
    whole: bool | None = None
    stand_in: bool = False

    def holds(self, result: Result) -> bool:
        """Whether a result belongs here."""
        if result.task not in self.tasks:
            return False
        if self.tags is not None and result.tag not in self.tags:
            return False
        if self.tags is None and result.gamma_tag is not None:
            return False
        sentences = result.config.get("data", {}).get("sentences")
        return self.whole is None or self.whole == (sentences is None)

    def title_of(self, results: Sequence[Result]) -> str:
        """The title for these results; names the task if it is not the paper's."""
        if self.stand_in or not results or self.is_papers(results):
            return self.title
        _, _, rest = self.title.partition(", ")
        return f"{results[0].task}, {rest}"

    def is_papers(self, results: Sequence[Result]) -> bool:
        """Whether the results are on exactly the paper's task, so that numbers are comparable."""
        return not self.stand_in and all(r.task == self.tasks[0] for r in results)

    def groups(self, results: Iterable[Result], model: str) -> list[list[Result]]:
        """A model's results, grouped over seeds, the paper's own settings first."""
        groups: dict[tuple[int, int, str], list[Result]] = {}
        for result in results:
            if result.model == model and self.holds(result):
                known = result.tag in _PREFERRED
                rank = _PREFERRED.index(result.tag) if known else len(_PREFERRED)
                key = (self.tasks.index(result.task), rank, result.tag)
                groups.setdefault(key, []).append(result)
        return [sorted(groups[key], key=lambda r: r.seed) for key in sorted(groups)]

    def shown(self, results: Iterable[Result], models: Iterable[str]) -> dict[str, list[Result]]:
        """The results that are held against each other, by model; of a model without any, none.

        Of the settings nearest to the paper's among those with which all models were trained that
        have results; where they share none, of each model's own nearest, on the same data. Settings
        with which all runs of a model diverged are taken where there are no others.
        """
        known = list(results)
        groups = {model: _finishing(self.groups(known, model)) for model in models}
        trained = [{g[0].settings: g[0].task for g in each} for each in groups.values() if each]
        every = {name: task for each in trained for name, task in each.items()}
        taken = {name for name in every if all(name in each for each in trained)}
        if not taken:
            first = min((self.tasks.index(task) for task in every.values()), default=0)
            taken = {name for name, task in every.items() if task == self.tasks[first]}
        return {
            model: next((g for g in each if g[0].settings in taken), [])
            for model, each in groups.items()
        }


def _finishing(groups: list[list[Result]]) -> list[list[Result]]:
    """The groups with a run that did not diverge; all if there is none."""
    return [g for g in groups if any(r.diverged_at is None for r in g)] or groups


def places(quick: bool = False) -> dict[str, Place]:
    """The places by the names of the paper's tasks; quick: on data that need no download."""
    if quick:
        return {
            "mnist": Place("digits in order", ("digits",), ("quick",), stand_in=True),
            "pmnist": Place("digits, permuted", ("digits",), ("quick-permuted",), stand_in=True),
            "ptb": Place("Python's help", ("pydoc",), ("quick",), stand_in=True),
            "text8": Place("Python's help, larger", ("pydoc",), ("quick-large",), stand_in=True),
            "cnn": Place("made-up news", ("cloze",), ("quick",), stand_in=True),
            "cnn-full": Place("made-up news", ("cloze",), ("quick",), stand_in=True),
        }
    questions = ("cnn", "cnn-built")
    return {
        "mnist": Place("MNIST in order", ("mnist",)),
        "pmnist": Place("permuted MNIST", ("pmnist",)),
        "ptb": Place("Penn Treebank", ("ptb",)),
        "text8": Place("text8", ("text8",)),
        "cnn": Place("CNN, four sentences", questions, whole=False),
        "cnn-full": Place("CNN, whole documents", questions, whole=True),
    }
