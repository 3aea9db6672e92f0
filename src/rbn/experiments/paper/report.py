"""The report: the paper's tables and figures with ours, as HTML and Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean

from rbn.experiments.config import flat
from rbn.experiments.paper import curves, differences, question_baselines, tables
from rbn.experiments.paper.document import (
    Block,
    Grid,
    Heading,
    Image,
    Items,
    Paragraph,
    html_page,
    markdown_page,
)
from rbn.experiments.paper.draw import draw
from rbn.experiments.paper.figures import Shelf, figure
from rbn.experiments.paper.finding import read_findings
from rbn.experiments.paper.lines import Figure
from rbn.experiments.paper.numbers import NAMES, TABLES
from rbn.experiments.paper.plan import FIGURE_TARGETS, FINDING_TARGETS, QUESTIONS, Job, jobs
from rbn.experiments.paper.published import Result
from rbn.experiments.paper.tables import Row
from rbn.training.atomic_files import write_atomic

_CURVES = {"cnn": "fig4a", "cnn-full": "fig4b"}  # of the paper's readers
TITLE = "Recurrent Batch Normalization: the paper's results and ours"


def write_report(shelf: Shelf, folder: Path) -> list[Path]:
    """Write ``index.html``, ``report.md`` and the figures; lists what is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {n: tables.rows(t, shelf.places, shelf.results) for n, t in TABLES.items()}
    figures = [figure(name, shelf) for name in FIGURE_TARGETS]
    written = [path for each in figures if each.has_ours for path in draw(each, folder)]
    blocks: list[Block] = [
        *_summary(rows),
        *_tables(rows),
        *_baselines(shelf, rows),
        *_figures(figures, folder),
        *_findings(shelf),
        *_differences(shelf),
        *_missing(rows, figures, shelf),
        *_machines(shelf),
    ]
    page, text = folder / "index.html", folder / "report.md"
    write_atomic(page, html_page(TITLE, blocks))
    write_atomic(text, markdown_page(TITLE, blocks))
    return [page, text, *written]


def _summary(rows: dict[str, list[Row]]) -> list[Block]:
    sentences = []
    for table_rows in rows.values():
        trained: dict[str, list[Row]] = {}
        for row in table_rows:
            if row.results and row.entry.field == "test":
                trained.setdefault(row.place.title_of(row.results), []).append(row)
        for place, same in trained.items():
            first = _compared(same)
            ours = ", ".join(f"{NAMES[m]} {first[m].said}" for m in sorted(first, reverse=True))
            paper = ", ".join(
                f"{NAMES[m]} {first[m].entry.paper:g}" for m in sorted(first, reverse=True)
            )
            unit, row = same[0].table.unit, same[0]
            same_data = row.place.stand_in or row.place.is_papers(row.results)
            whose = "the paper" if same_data else "the paper, on other data"
            names = ", ".join(dict.fromkeys(row.settings for row in first.values()))
            sentences.append(f"{place} ({names}), {unit}: {ours} ({whose}: {paper}).")
    if not sentences:
        return [Paragraph("No run of the paper's tasks has been published yet.")]
    return [
        Paragraph(
            "Cooijmans et al., Recurrent Batch Normalization (ICLR 2017, arXiv:1603.09025), done "
            "again with rbn. Ours are means over seeds with their standard deviation, of two "
            "with their range, measured on the test set with population statistics. Runs that "
            "diverged do not count where others did not; they are named beside, with the best "
            "model they had before, or, where they have no file, in docs/experiments.md."
        ),
        Items(sentences),
    ]


def _compared(rows: Sequence[Row]) -> dict[str, Row]:
    """The rows of a task to compare, by model."""
    results = [result for row in rows for result in row.results]
    models = dict.fromkeys(row.entry.model for row in rows)
    shown = rows[0].place.shown(results, models)
    return {
        row.entry.model: row for row in rows if row.settings == shown[row.entry.model][0].settings
    }


def _tables(rows: dict[str, list[Row]]) -> list[Block]:
    blocks: list[Block] = [Heading("Tables")]
    for name, table_rows in rows.items():
        if not any(row.results for row in table_rows):
            continue
        table = TABLES[name]
        cells = [row.cells for row in table_rows]
        blocks.append(Grid(f"{_titled(name)}: {table.title}; {table.unit}", tables.COLUMNS, cells))
        commands = dict.fromkeys(row.command for row in table_rows if row.results)
        blocks += [
            Paragraph("Reproduce:"),
            Items([*_again(name, table_rows), *commands], code=True),
        ]
    return blocks


def _baselines(shelf: Shelf, rows: dict[str, list[Row]]) -> list[Block]:
    """The baselines for the readers' error rates."""
    counts, commands = question_baselines.read_counts(shelf.folder)
    if not counts:
        return []
    title = "Questions answered without reading; error rate, %"
    note = (
        "Of equally frequent entities the first is taken. No reader of the text can err less often "
        "than the answer is not in it; the paper's four sentences lack it in 43% of its questions."
    )
    return [
        Grid(title, question_baselines.COLUMNS, [each.cells for each in counts]),
        Paragraph(note + _unlearned(rows, counts)),
        Paragraph("Reproduce:"),
        Items(commands, code=True),
    ]


def _unlearned(
    rows: dict[str, list[Row]], counts: Sequence[question_baselines.QuestionBaselines]
) -> str:
    """A sentence that names the readers with a higher error rate than counting."""
    named = []
    for row in (row for table_rows in rows.values() for row in table_rows if row.results):
        first, ours = row.results[0], mean(row.values)
        sentences = first.config.get("data", {}).get("sentences")
        for each in counts:
            if (each.task, each.sentences, each.part) == (first.task, sentences, row.entry.field):
                least = 100 * (1 - max(each.frequent, each.frequent_unasked))
                if ours > least:
                    theirs = curves.paper_lines(_CURVES[row.entry.place])
                    last = theirs[f"{row.cells[1]} valid"].x[-1]
                    steps = f"{first.values['steps']:,} steps, the paper's {last:,.0f}"
                    comparison = f"{ours:.1f} against {least:.1f}; {steps}"
                    named.append(f"{row.cells[1]} on {row.cells[0]} ({comparison})")
    return (
        f" Readers that err more often than the better of both: {'; '.join(named)}."
        if named
        else ""
    )


def _again(name: str, rows: Sequence[Row]) -> list[str]:
    """The commands that make rows of a recipe, in their precision where it is one.

    Rows with settings of their own are left to the commands of their results.
    """
    commands: dict[str, str] = {}  # by the settings of their rows
    for recipe, questions in product(("short", "paper"), QUESTIONS):
        made = {(job.model, job.base): job for job in jobs(name, recipe, questions)}
        results = [
            result
            for row in rows
            for result in row.results
            if (job := made.get((result.model, row.settings))) and _made_by(job, result)
        ]
        if not results:
            continue
        command = f"rbn reproduce {name}"
        command += " --recipe paper" if recipe == "paper" else ""
        command += f" --questions {questions}" if results[0].task == QUESTIONS[1] else ""
        shown = ", ".join(dict.fromkeys(result.settings for result in results))
        precisions = {str(result.config.get("precision")) for result in results}
        if len(precisions) > 1:
            shown += ", all in 32-true"
        elif precisions != {"32-true"}:
            command += f" --precision {precisions.pop()}"
        commands.setdefault(shown, f"{command}  # {shown}")
    return list(commands.values())


def _made_by(job: Job, result: Result) -> bool:
    """Whether a result has the settings of a recipe's job, in any precision."""
    theirs, ours = flat(json.loads(job.config().to_json())), flat(result.config)
    return all(ours.get(key) == theirs.get(key) for key in {*ours, *theirs} - {"precision"})


def _titled(name: str) -> str:
    kind = "Table" if name.startswith("table") else "Figure"
    return f"{kind} {name.removeprefix('table').removeprefix('fig')}"


def _figures(figures: Sequence[Figure], folder: Path) -> list[Block]:
    blocks: list[Block] = [
        Heading("Figures"),
        Paragraph(
            "Solid lines are ours, dashed ones the paper's, read from its figures; a band spans "
            "our seeds. The numbers of every line are in a CSV file of the figure's name."
        ),
    ]
    for each in figures:
        if each.has_ours:
            caption = each.caption
            if each.missing:
                caption += f" Not there yet: {'; '.join(each.missing)}."
            title = f"{_titled(each.name)}: {each.title}"
            paths = folder / f"{each.name}.svg", folder / f"{each.name}.csv"
            blocks.append(Image(*paths, title, caption, large=len(each.panels) > 1))
    return blocks


def _findings(shelf: Shelf) -> list[Block]:
    findings = read_findings(shelf.folder)
    if not findings:
        return []
    blocks: list[Block] = [Heading("Statements without a figure")]
    for each in findings:
        blocks.append(Grid(each.statement, each.columns, each.rows))
        details = f"{each.setup} {each.outcome} ({each.command}; {each.seconds:.0f} s, "
        blocks.append(Paragraph(f"{details}{each.versions}.)"))
    return blocks


def _differences(shelf: Shelf) -> list[Block]:
    own = [
        result
        for result in shelf.results
        if result.gamma_tag is not None or any(p.holds(result) for p in shelf.places.values())
    ]
    texts = [*differences.sentences(own), *differences.GENERAL]
    note = "Unless a model is named in parentheses, this holds for all models."
    return [Heading("What differs from the paper, and why"), Paragraph(note), Items(texts)]


def _missing(rows: dict[str, list[Row]], figures: Sequence[Figure], shelf: Shelf) -> list[Block]:
    texts = []
    for name, table_rows in rows.items():
        absent = [row for row in table_rows if not row.results]
        if absent and name not in FIGURE_TARGETS:  # those are named below
            of = ", ".join(
                dict.fromkeys(f"{NAMES[row.entry.model]} on {row.place.title}" for row in absent)
            )
            texts.append(f"{_titled(name)}: {of}. rbn reproduce {name}")
    for each in figures:
        if each.missing and not each.has_ours:
            few = "; ".join(each.missing[:4])
            more = f" and {len(each.missing) - 4} more" if len(each.missing) > 4 else ""
            texts.append(f"{_titled(each.name)}: {few}{more}. rbn reproduce {each.name}")
    done = {finding.name for finding in read_findings(shelf.folder)}
    texts += [f"The finding {n}. rbn reproduce {n}" for n in FINDING_TARGETS if n not in done]
    return [Heading("What is not there yet"), Items(texts)] if texts else []


def _machines(shelf: Shelf) -> list[Block]:
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for result in shelf.results:
        values = result.values
        device = str(values.get("gpu") or "CPU")
        commit = re.sub(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", str(values.get("commit")))
        setup = (device, str(values.get("versions")), commit)
        key = (*setup, str(values.get("date")))
        groups.setdefault(key, []).append(result.minutes)
    cells = [(*k, str(len(v)), f"{mean(v):.1f}") for k, v in groups.items()]
    columns = ("device", "versions", "commit", "date", "runs", "minutes of a run, mean")
    blocks: list[Block] = [Heading("Machines and versions")]
    if cells:
        blocks.append(Grid("Published runs", columns, cells))
    return [*blocks, Paragraph(f"The paper's lines: {curves.source()}")]
