"""``rbn reproduce`` and ``rbn report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rbn.cli.common import (
    DataDir,
    Device,
    default_folder,
    device_of,
    guarded,
    interrupted_code,
    make_console,
    make_table,
    stop,
)

if TYPE_CHECKING:
    from rich.console import Console

    from rbn.experiments.paper.reproduce import Reproduction
    from rbn.experiments.paper.result_set import ResultSet

Target = Annotated[
    str,
    typer.Argument(
        help="table1 to table4, fig1a, fig1b, fig2, fig3a, fig3b, fig4a, fig4b, fig5, fig6, "
        "shared-stats, small-gamma, no-noise, data-start, or all."
    ),
]
Seeds = Annotated[int | None, typer.Option(help="Runs per model. Default: 3, or 1 with --quick.")]
Minutes = Annotated[
    float | None, typer.Option(help="Save and stop after this many minutes in total.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Run everything on small built-in data.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only list the runs and their estimated time.")
]
Recipe = Annotated[
    str,
    typer.Option(help="short: fewer steps, decaying learning rate; paper: the paper's settings."),
]
Results = Annotated[
    Path | None,
    typer.Option(
        help="Folder of results. Default: results in a clone, else runs/results; with --quick "
        "runs/quick/results."
    ),
]
Runs = Annotated[
    Path | None, typer.Option(help="Folder of runs. Default: runs; with --quick runs/quick.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for figures. Default: reproduced in a clone, else runs/reproduced; with "
        "--quick runs/quick/out."
    ),
]
Questions = Annotated[
    str,
    typer.Option(help="Task of the readers: cnn-built, or cnn if you have the paper's archive."),
]
Precision = Annotated[str | None, typer.Option(help="32-true, bf16-mixed or 16-mixed.")]
Folder = Annotated[
    Path | None,
    typer.Option(help="Folder of results. Default: results in a clone, else runs/results."),
]
Report = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the page, the Markdown and the figures. Default: docs/report in a "
        "clone, else runs/report."
    ),
]
Compared = Annotated[
    Path | None,
    typer.Option(
        help="File of the fair comparison. Default: benchmarks/results/comparison.csv if it exists."
    ),
]


def reproduce(
    target: Target,
    seeds: Seeds = None,
    max_minutes: Minutes = None,
    quick: Quick = False,
    dry_run: DryRun = False,
    recipe: Recipe = "short",
    questions: Questions = "cnn-built",
    precision: Precision = None,
    results: Results = None,
    runs: Runs = None,
    out: Out = None,
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """Reproduce a table or figure of the paper: train missing runs, reuse the others.

    You can stop or kill it at any time; run the same command to resume.
    """
    from rbn.experiments.paper import plan
    from rbn.experiments.paper.reproduce import Reproduction
    from rbn.experiments.paper.result_set import ResultSet

    def work() -> None:
        if target != "all" and target not in plan.TARGETS:
            targets = ", ".join(plan.TARGETS)
            raise ValueError(f"target must be one of {targets} or all, got {target!r}")
        if recipe not in ("short", "paper"):
            raise ValueError(f"recipe must be short or paper, got {recipe!r}")
        base = Path("runs/quick") if quick else Path("runs")
        plain = default_folder("results")
        asked = Reproduction(
            plan.TARGETS if target == "all" else (target,),
            "quick" if quick else recipe,
            seeds if seeds is not None else (1 if quick else 3),
            results or (base / "results" if quick else plain),
            runs or base,
            device_of(device),
            data_dir,
            precision,
            max_minutes,
            questions,
        )
        console = make_console()
        if results is None and not quick and not plain.is_dir():
            said = f"The folder {plain} does not exist, so no run counts as done (see --results)."
            console.print(said, soft_wrap=True)
        if dry_run:
            _list(asked, console)
            return
        try:
            finished = asked.work(console)
        except KeyboardInterrupt as error:
            stop("interrupted; run the same command to resume", interrupted_code(error))
        result_set = ResultSet.read(asked.results, quick)
        figures = base / "out" if quick else default_folder("reproduced")
        _show(asked, result_set, out or figures, console)
        for note in asked.notes:
            console.print(note, soft_wrap=True, highlight=False, markup=False)
        if not finished:
            stop("out of time; run the same command to resume", 3)
        if asked.left_out:
            stop("some results were skipped, see above", 1)

    guarded(work)


def report(results: Folder = None, out: Report = None, comparison: Compared = None) -> None:
    """Write the report: an HTML page and a Markdown file, with all figures and numbers."""
    from rbn.experiments.paper.report import write_report
    from rbn.experiments.paper.result_set import ResultSet

    def work() -> None:
        source = default_folder("results") if results is None else results
        target = default_folder("report", "docs/report") if out is None else out
        if not source.is_dir():
            raise ValueError(
                f"the folder of results {source} does not exist: fill it with `rbn reproduce` or "
                "`rbn publish`, or name another with --results"
            )
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is a file, not a folder for the report")
        result_set = ResultSet.read(source)
        if not result_set.has_content:
            raise ValueError(
                f"no results of the paper's tasks in {source}: they are files such as "
                "mnist/lstm-seed1.json"
            )
        usual = Path("benchmarks/results/comparison.csv")
        if comparison is not None and not comparison.is_file():
            raise ValueError(f"the comparison file {comparison} does not exist")
        compared = comparison or (usual if usual.is_file() else None)
        for path in write_report(result_set, target, compared):
            typer.echo(str(path))

    guarded(work)


def _list(asked: Reproduction, console: Console) -> None:
    from rbn.experiments.paper.estimate import format_duration

    table = make_table("run", "state", "estimated time")
    rows, total = asked.listing()
    for row in rows:
        table.add_row(*row)
    console.print(table)
    todo = sum(1 for row in rows if row[1] != "done")
    console.print(
        f"{todo} of {len(rows)} to do, about {format_duration(total)} on {asked.device.type}."
    )
    for note in asked.notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def _show(asked: Reproduction, result_set: ResultSet, out: Path, console: Console) -> None:
    """Print tables to the terminal and write figures to files."""
    from rbn.experiments.paper import tables
    from rbn.experiments.paper.draw import draw
    from rbn.experiments.paper.figures import figure
    from rbn.experiments.paper.finding import read_findings
    from rbn.experiments.paper.numbers import TABLES
    from rbn.experiments.paper.plan import FIGURE_TARGETS

    for name in asked.targets:
        if name in TABLES:
            table = make_table(*tables.COLUMNS, title=f"{name}: {TABLES[name].title}")
            for row in tables.rows(TABLES[name], result_set.tasks, result_set.runs):
                table.add_row(*row.cells)
            console.print(table)
        if name in FIGURE_TARGETS:
            for path in draw(figure(name, result_set), out):
                console.print(str(path), soft_wrap=True, highlight=False, markup=False)
    for finding in read_findings(asked.results):
        if finding.name in asked.targets:
            said = f"{finding.name}: {finding.outcome}"
            console.print(said, soft_wrap=True, highlight=False, markup=False)
