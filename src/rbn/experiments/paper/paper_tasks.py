"""The paper's tasks, and which results belong to each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rbn.experiments.paper.plan import SHORT
from rbn.experiments.paper.published import Result

BEST_RATE = "best-rate"  # tag of runs at the best learning rate of a grid
_PREFERRED_TAGS = ("", *SHORT, "full", BEST_RATE)


@dataclass(frozen=True)
class PaperTask:
    """One of the paper's tasks. Selects the results that belong to it.

    Attributes:
        title: shown in panels and tables.
        tasks: names of tasks in order of preference. All but the first use other data than the
            paper and appear under their own names.
        tags: tags that belong to it; None accepts all except those of sweeps over gamma and of
            grids of learning rates.
        whole_documents: for questions, whether documents are complete or cut to four sentences;
            None accepts both.
        stand_in: whether small embedded data replace the paper's data.
    """

    title: str
    tasks: tuple[str, ...]
    tags: tuple[str, ...] | None = None
    whole_documents: bool | None = None
    stand_in: bool = False

    def includes(self, result: Result) -> bool:
        """Whether a result belongs to this task."""
        if result.task not in self.tasks:
            return False
        if self.tags is not None and result.tag not in self.tags:
            return False
        if self.tags is None and (result.gamma_tag is not None or result.tag.startswith("rate-")):
            return False
        sentences = result.config.get("data", {}).get("sentences")
        return self.whole_documents is None or self.whole_documents == (sentences is None)

    def title_of(self, results: Sequence[Result]) -> str:
        """The title for these results; names their task if it is not the paper's."""
        if self.stand_in or not results or self.uses_paper_data(results):
            return self.title
        _, _, rest = self.title.partition(", ")
        return f"{results[0].task}, {rest}"

    def uses_paper_data(self, results: Sequence[Result]) -> bool:
        """Whether the results use the paper's data, so that numbers are comparable."""
        return not self.stand_in and all(r.task == self.tasks[0] for r in results)

    def groups(self, results: Iterable[Result], model: str) -> list[list[Result]]:
        """A model's results, one group of seeds per settings, the paper's settings first."""
        groups: dict[tuple[int, int, str], list[Result]] = {}
        for result in results:
            if result.model == model and self.includes(result):
                known = result.tag in _PREFERRED_TAGS
                rank = _PREFERRED_TAGS.index(result.tag) if known else len(_PREFERRED_TAGS)
                key = (self.tasks.index(result.task), rank, result.tag)
                groups.setdefault(key, []).append(result)
        return [sorted(groups[key], key=lambda r: r.seed) for key in sorted(groups)]

    def comparable(
        self, results: Iterable[Result], models: Iterable[str]
    ) -> dict[str, list[Result]]:
        """The results to compare, by model. A model without results has an empty list.

        All models use the same settings: the ones closest to the paper's that every trained model
        has. If they have none in common, each model uses its own closest settings, on the same
        data. Settings where all runs of a model diverged count only if there are no others.
        """
        known = list(results)
        groups = {model: _with_finished_runs(self.groups(known, model)) for model in models}
        trained = [{g[0].settings: g[0].task for g in each} for each in groups.values() if each]
        every = {name: task for each in trained for name, task in each.items()}
        chosen = {name for name in every if all(name in each for each in trained)}
        if not chosen:
            first = min((self.tasks.index(task) for task in every.values()), default=0)
            chosen = {name for name, task in every.items() if task == self.tasks[first]}
        return {
            model: next((g for g in each if g[0].settings in chosen), [])
            for model, each in groups.items()
        }


def _with_finished_runs(groups: list[list[Result]]) -> list[list[Result]]:
    """The groups that have a run that did not diverge; all groups if there is none."""
    return [g for g in groups if any(r.diverged_at is None for r in g)] or groups


def paper_tasks(quick: bool = False) -> dict[str, PaperTask]:
    """The paper's tasks by name. With `quick`, on embedded data that need no download."""
    if quick:
        return {
            "mnist": PaperTask("digits in order", ("digits",), ("quick",), stand_in=True),
            "pmnist": PaperTask(
                "digits, permuted", ("digits",), ("quick-permuted",), stand_in=True
            ),
            "ptb": PaperTask("Python's help", ("pydoc",), ("quick",), stand_in=True),
            "text8": PaperTask(
                "Python's help, larger", ("pydoc",), ("quick-large",), stand_in=True
            ),
            "cnn": PaperTask("made-up news", ("cloze",), ("quick",), stand_in=True),
            "cnn-full": PaperTask("made-up news", ("cloze",), ("quick",), stand_in=True),
        }
    questions = ("cnn", "dailymail-built", "cnn-built")
    return {
        "mnist": PaperTask("MNIST in order", ("mnist",)),
        "pmnist": PaperTask("permuted MNIST", ("pmnist",)),
        "ptb": PaperTask("Penn Treebank", ("ptb",)),
        "text8": PaperTask("text8", ("text8",)),
        "cnn": PaperTask("CNN, four sentences", questions, whole_documents=False),
        "cnn-full": PaperTask("CNN, whole documents", questions, whole_documents=True),
    }
