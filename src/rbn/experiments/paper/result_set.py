"""A folder of published results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rbn.experiments.paper import finding
from rbn.experiments.paper.curves import paper_lines
from rbn.experiments.paper.lines import Line
from rbn.experiments.paper.paper_tasks import PaperTask, paper_tasks
from rbn.experiments.paper.published import Result, read_results

COMPUTED = "figures"  # subfolder with the numbers of figures that need no training


@dataclass(frozen=True)
class ResultSet:
    """All results of a folder, read once.

    Attributes:
        folder: the folder.
        runs: the result of every training run.
        tasks: the paper's tasks, each of which selects its runs.
        quick: whether the runs use small embedded data, which the paper's curves do not compare to.
    """

    folder: Path
    runs: tuple[Result, ...]
    tasks: dict[str, PaperTask]
    quick: bool = False

    @staticmethod
    def read(folder: Path, quick: bool = False) -> ResultSet:
        """Read a folder of results."""
        return ResultSet(folder, tuple(read_results(folder)), paper_tasks(quick), quick)

    @property
    def has_content(self) -> bool:
        """Whether there is anything to show in tables, figures or findings."""
        trained = any(task.includes(run) for task in self.tasks.values() for run in self.runs)
        sweep = any(run.gamma_tag is not None for run in self.runs)
        computed = any(any((self.folder / n).glob("*")) for n in (COMPUTED, finding.FOLDER))
        return trained or sweep or computed

    def paper_lines(self, figure: str) -> dict[str, Line]:
        """The paper's curves, or none if they are not comparable."""
        return {} if self.quick else paper_lines(figure)
