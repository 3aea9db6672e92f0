"""The report: headline numbers, a fair comparison of the models, the paper's results and ours."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean

from rbn.experiments.config import flat
from rbn.experiments.paper import comparison, curves, differences, question_baselines, tables
from rbn.experiments.paper.document import (
    Block,
    Card,
    Cards,
    Fold,
    Grid,
    Heading,
    Image,
    Items,
    Paragraph,
    html_page,
    markdown_page,
)
from rbn.experiments.paper.draw import draw
from rbn.experiments.paper.figures import figure, note_on_rates
from rbn.experiments.paper.finding import read_findings
from rbn.experiments.paper.lines import Figure
from rbn.experiments.paper.numbers import NAMES, TABLES
from rbn.experiments.paper.plan import FIGURE_TARGETS, FINDING_TARGETS, QUESTIONS, Job, jobs
from rbn.experiments.paper.published import Result
from rbn.experiments.paper.result_set import ResultSet
from rbn.experiments.paper.tables import Row
from rbn.training.atomic_files import write_atomic

TITLE = "Recurrent Batch Normalization: the paper's results and ours"
_COLUMNS = ("model", "paper", "ours", "difference", "runs", "time of a run", "settings")
_PARTS = {"valid": "validation", "test": "test"}
_READER_FIGURES = {"cnn": "fig4a", "cnn-full": "fig4b"}


@dataclass(frozen=True)
class _Section:
    """A task's part of the report: its tables and folded figures."""

    title: str
    tables: tuple[str, ...]
    folded: tuple[str, ...] = ()


_SECTIONS = (
    _Section("Pixel-by-pixel MNIST", ("table1",)),
    _Section("Penn Treebank", ("table2",), folded=("fig3a", "fig3b")),
    _Section("text8", ("table3",)),
    _Section("Attentive Reader", ("fig4a", "table4"), folded=("fig4a", "fig4b")),
)
_FIRST_FIGURE = "fig2"
_OTHER_FIGURES = ("fig1a", "fig1b", "fig5", "fig6")


def write_report(results: ResultSet, folder: Path, compared: Path | None = None) -> list[Path]:
    """Write ``index.html``, ``report.md`` and the figures.

    Args:
        results: the published results.
        folder: output folder; created if needed.
        compared: the ``comparison.csv`` of ``benchmarks/compare_rates.py``.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = {n: tables.rows(t, results.tasks, results.runs) for n, t in TABLES.items()}
    figures = {name: figure(name, results) for name in FIGURE_TARGETS}
    written = [path for each in figures.values() if each.has_ours for path in draw(each, folder)]
    images = {n: _image(f, folder) for n, f in figures.items() if f.has_ours}
    blocks: list[Block] = [
        *_headline(rows, images.get(_FIRST_FIGURE)),
        *_fair_comparison(compared),
        *_paper_and_ours(results, rows, images),
        *_more(results, images),
        *_methods(results, rows, list(figures.values())),
    ]
    page, text = folder / "index.html", folder / "report.md"
    write_atomic(page, html_page(TITLE, blocks))
    write_atomic(text, markdown_page(TITLE, blocks))
    return [page, text, *written]


def _headline(rows: dict[str, list[Row]], first_figure: Image | None) -> list[Block]:
    """The introduction, the most important numbers and a figure.

    Leaves out readers of other data than the paper's: with the paper's learning rates, which
    differ, their order says nothing about normalization.
    """
    cards = []
    for table_rows in rows.values():
        tested = [row for row in table_rows if row.results and row.entry.field == "test"]
        for title, same in _by_title(tested).items():
            if not (same[0].task.stand_in or same[0].task.uses_paper_data(same[0].results)):
                continue
            chosen = _comparable(same)
            settings = dict.fromkeys(r.settings for r in chosen.values())
            own = {row.entry.task for row in chosen.values()}
            note = "" if own == set(settings) else f"Settings: {', '.join(settings)}."
            if all(len(row.results) == 1 for row in chosen.values()):
                note = f"One seed. {note}".strip()
            numbers = [
                (NAMES[model], chosen[model].summary, chosen[model].paper)
                for model in sorted(chosen, reverse=True)
            ]
            cards.append(Card(_sentence(title), same[0].table.unit, numbers, note))
    if not any(row.results for table_rows in rows.values() for row in table_rows):
        return [Paragraph("No run of the paper's tasks has been published yet.")]
    return [
        Paragraph(
            "We trained the models of Recurrent Batch Normalization (Cooijmans et al., ICLR 2017, "
            f"arXiv:1603.09025) again.{_wins(rows)} Test results, mean ± standard deviation of the "
            "seeds:"
        ),
        *([Cards(cards)] if cards else []),
        *([first_figure] if first_figure else []),
    ]


def _wins(rows: dict[str, list[Row]]) -> str:
    """A sentence that counts the tasks on which normalization helped, for the paper and for us."""
    ours, paper, tasks = 0, 0, 0
    for table_rows in rows.values():
        sign = 1 if "accuracy" in table_rows[0].table.unit else -1
        tested = [row for row in table_rows if row.results and row.entry.field == "test"]
        for same in _by_title(tested).values():
            chosen = _comparable(same)
            if {"lstm", "bn-lstm"} <= set(chosen) and same[0].task.uses_paper_data(same[0].results):
                plain, normalized = chosen["lstm"], chosen["bn-lstm"]
                tasks += 1
                ours += sign * (mean(normalized.values) - mean(plain.values)) > 0
                paper += sign * (normalized.entry.paper - plain.entry.paper) > 0
    if not tasks:
        return ""
    theirs = "as in the paper" if paper == ours else f"in the paper on {paper}"
    where = "the task" if tasks == 1 else f"all {tasks} tasks below"
    where = where if ours == tasks else f"{ours} of {tasks} tasks"
    return f" With the paper's data and recipe the BN-LSTM beats the LSTM on {where}, {theirs}."


def _by_title(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.task.title_of(row.results), []).append(row)
    return groups


def _comparable(rows: Sequence[Row]) -> dict[str, Row]:
    """The rows of a task to compare, by model."""
    if not rows:
        return {}
    results = [result for row in rows for result in row.results]
    models = dict.fromkeys(row.entry.model for row in rows)
    chosen = rows[0].task.comparable(results, models)
    return {
        row.entry.model: row for row in rows if row.settings == chosen[row.entry.model][0].settings
    }


def _fair_comparison(path: Path | None) -> list[Block]:
    rows = comparison.read_comparison(path) if path else []
    comparisons = comparison.compare(rows)
    if not comparisons:
        return []
    cells: list[Sequence[str]] = []
    for each in comparisons:
        cells += [(each.title,), *each.rows]
    blocks: list[Block] = [
        Heading("What does normalization buy you?"),
        Paragraph(
            "Here all models of a task train for equally many steps, each at the learning rate "
            "with the best validation result. All had the same grid of rates; where the choice was "
            "close, we added rates or seeds. Several runs shared the GPU, so compare times only "
            "within a task."
        ),
        Items([each.verdict for each in comparisons]),
        Grid("Fair comparison, test results", comparison.COLUMNS, cells),
    ]
    uncertain = comparison.exceptions(rows)
    if uncertain:
        blocks.append(Fold("Where the learning rate is uncertain", [Items(uncertain)]))
    details: list[Block] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        columns, grid = comparison.rate_table(rows, task)
        if grid:
            details.append(Grid(f"{comparison.task_title(task)}, by learning rate", columns, grid))
    if details:
        gpus = ", ".join(dict.fromkeys(row["gpu"] for row in rows if row.get("gpu")))
        versions = ", ".join(dict.fromkeys(row["torch"] for row in rows if row.get("torch")))
        commits = ", ".join(dict.fromkeys(row["commit"] for row in rows if row.get("commit")))
        note = f"Seed 1. {gpus}, torch {versions}, commits {commits}. On MNIST in order BN-LSTM "
        note += "and LN-LSTM have noise on the first hidden state, like the authors' BN-LSTM; on "
        note += "permuted MNIST the LN-LSTM has it, because its gradient overflows otherwise. "
        note += "Every run: benchmarks/results/comparison.csv."
        commands = comparison.commands(rows)
        details += [
            Paragraph(note),
            Paragraph("Reproduce:"),
            Items(commands, code=True),
        ]
        blocks.append(Fold("All learning rates and commands", details))
    return blocks


def _paper_and_ours(
    results: ResultSet, rows: dict[str, list[Row]], images: dict[str, Image]
) -> list[Block]:
    blocks: list[Block] = []
    for section in _SECTIONS:
        own = _section(section, results, rows, images)
        if own:
            blocks += [Heading(section.title, 3), *own]
    if not blocks:
        return []
    note = (
        "The tables show the settings closest to the paper's; the folded ones show all settings. "
        "In the figures, solid lines are ours and dashed lines the paper's, read from its figures. "
        "A band spans our seeds. The numbers of every line are in the figure's CSV file."
    )
    return [Heading("The paper and ours"), Paragraph(note), *blocks]


def _section(
    section: _Section, results: ResultSet, rows: dict[str, list[Row]], images: dict[str, Image]
) -> list[Block]:
    blocks: list[Block] = []
    folds: list[Block] = [
        Fold(images[name].title, [images[name]]) for name in section.folded if name in images
    ]
    for name in section.tables:
        table_rows = rows[name]
        if not any(row.results for row in table_rows):
            continue
        blocks += _main_tables(table_rows)
        table = TABLES[name]
        caption = f"{_label(name)}: {table.title}; {table.unit}"
        commands = dict.fromkeys(row.command for row in table_rows if row.results)
        folds.append(
            Fold(
                f"{_label(name)}: all settings and commands",
                [
                    Grid(caption, tables.COLUMNS, [row.cells for row in table_rows]),
                    Paragraph("Reproduce:"),
                    Items([*_reproduce_commands(name, table_rows), *commands], code=True),
                ],
            )
        )
    if "table4" in section.tables:
        folds += _baselines(results, rows)
    return [*blocks, *folds]


def _main_tables(rows: Sequence[Row]) -> list[Block]:
    """A table for each of the paper's tasks, with the settings to compare."""
    blocks: list[Block] = []
    table = rows[0].table
    both = len({row.entry.field for row in rows}) > 1
    for task in dict.fromkeys(row.entry.task for row in rows):
        cells: list[tuple[str, ...]] = []
        title, note = "", ""
        for field in dict.fromkeys(row.entry.field for row in rows):
            own = [row for row in rows if (row.entry.task, row.entry.field) == (task, field)]
            chosen = list(_comparable([row for row in own if row.results]).values())
            for row in (*chosen, *(row for row in own if not row.results)):
                model = NAMES[row.entry.model] + (f", {_PARTS[field]}" if both else "")
                cells.append((model, *row.cells[3:8], row.settings))
            for row in chosen[:1]:
                title = row.task.title_of(row.results)
                if not (row.task.stand_in or row.task.uses_paper_data(row.results)):
                    note = note_on_rates([result for each in chosen for result in each.results])
        if title:
            part = "" if both else f"{_PARTS[rows[0].entry.field]} "
            blocks.append(Grid(f"{_sentence(title)}: {part}{table.unit}", _COLUMNS, cells))
            blocks += [Paragraph(note)] if note else []
    return blocks


def _sentence(text: str) -> str:
    """Text with a capital first letter, except for names of tasks such as text8."""
    return text if text.startswith(("text8", "cnn", "dailymail")) else text[:1].upper() + text[1:]


def _baselines(results: ResultSet, rows: dict[str, list[Row]]) -> list[Block]:
    """The baselines for the readers' error rates."""
    counts, commands = question_baselines.read_counts(results.folder)
    if not counts:
        return []
    title = "Baselines without reading; error rate, %"
    note = (
        "The most frequent entity is the first of those with the same count. No reader can have a "
        "lower error rate than the share of answers that are not in the text; in the paper's four "
        "sentences 43% of the answers are missing."
    )
    blocks: list[Block] = [
        Grid(title, question_baselines.COLUMNS, [each.cells for each in counts]),
        Paragraph(note + _worse_than_baseline(rows, counts)),
        Paragraph("Reproduce:"),
        Items(commands, code=True),
    ]
    return [Fold(title, blocks)]


def _worse_than_baseline(
    rows: dict[str, list[Row]], counts: Sequence[question_baselines.QuestionBaselines]
) -> str:
    """A sentence that names the readers with a higher error rate than the baselines."""
    named = []
    for row in (row for table_rows in rows.values() for row in table_rows if row.results):
        first, ours = row.results[0], mean(row.values)
        sentences = first.config.get("data", {}).get("sentences")
        for each in counts:
            if (each.task, each.sentences, each.part) == (first.task, sentences, row.entry.field):
                baseline = 100 * (1 - max(each.frequent, each.frequent_unasked))
                if ours > baseline:
                    paper = curves.paper_lines(_READER_FIGURES[row.entry.task])
                    last = paper[f"{row.cells[1]} valid"].x[-1]
                    steps = f"{first.values['steps']:,} steps, paper {last:,.0f}"
                    compared = f"{ours:.1f} against {baseline:.1f}; {steps}"
                    named.append(f"{row.cells[1]} on {row.cells[0]} ({compared})")
    if not named:
        return ""
    return f" Readers with a higher error rate than the better baseline: {'; '.join(named)}."


def _reproduce_commands(name: str, rows: Sequence[Row]) -> list[str]:
    """The ``rbn reproduce`` commands for the rows of a recipe, with their precision.

    Rows with other settings have commands of their own.
    """
    commands: dict[str, str] = {}  # by the settings of their rows
    for recipe, questions in product(("short", "paper"), QUESTIONS):
        recipe_jobs = {(job.model, job.base): job for job in jobs(name, recipe, questions)}
        results = [
            result
            for row in rows
            for result in row.results
            if (job := recipe_jobs.get((result.model, row.settings))) and _matches(job, result)
        ]
        if not results:
            continue
        command = f"rbn reproduce {name}"
        command += " --recipe paper" if recipe == "paper" else ""
        command += f" --questions {questions}" if results[0].task == QUESTIONS[1] else ""
        settings = ", ".join(dict.fromkeys(result.settings for result in results))
        precisions = {str(result.config.get("precision")) for result in results}
        if len(precisions) > 1:
            settings += ", all in 32-true"
        elif precisions != {"32-true"}:
            command += f" --precision {precisions.pop()}"
        commands.setdefault(settings, f"{command}  # {settings}")
    return list(commands.values())


def _matches(job: Job, result: Result) -> bool:
    """Whether a result has the settings of a job, in any precision."""
    theirs, ours = flat(json.loads(job.config().to_json())), flat(result.config)
    return all(ours.get(key) == theirs.get(key) for key in {*ours, *theirs} - {"precision"})


def _label(name: str) -> str:
    kind = "Table" if name.startswith("table") else "Figure"
    return f"{kind} {name.removeprefix('table').removeprefix('fig')}"


def _image(drawn: Figure, folder: Path) -> Image:
    caption = drawn.caption
    if drawn.missing:
        caption += f" Still missing: {'; '.join(drawn.missing)}."
    title = f"{_label(drawn.name)}: {drawn.title}"
    paths = folder / f"{drawn.name}.svg", folder / f"{drawn.name}.csv"
    return Image(*paths, title, caption, large=len(drawn.panels) > 1)


def _more(results: ResultSet, images: dict[str, Image]) -> list[Block]:
    """The paper's other figures, and its claims without a figure."""
    folds: list[Block] = [
        Fold(images[name].title, [images[name]]) for name in _OTHER_FIGURES if name in images
    ]
    for each in read_findings(results.folder):
        time = f"{each.seconds:.0f} s, " if each.seconds else ""
        about = f"({each.command}; {time}{each.versions}.)"
        text = Paragraph(f"{each.setup} {each.outcome} {about}")
        table = Grid(each.statement, each.columns, each.rows)
        folds.append(Fold(f"Claim: {each.statement}", [table, text]))
    return [Heading("More from the paper"), *folds] if folds else []


def _methods(
    results: ResultSet, rows: dict[str, list[Row]], figures: Sequence[Figure]
) -> list[Block]:
    return [
        Heading("Methods and provenance"),
        Paragraph(
            "Numbers with ± are the mean and standard deviation of three or more seeds; two seeds "
            "have their range in parentheses. The BN-LSTM is tested with population statistics. "
            "Diverged runs do not count if other seeds finished: the tables list them with their "
            "best result before diverging, and docs/lab-notes/experiments.md those without a file."
        ),
        _differences(results),
        *_missing(rows, figures, results),
        _machines(results),
        Paragraph(f"The paper's lines: {curves.source()}"),
    ]


def _differences(results: ResultSet) -> Block:
    own = [
        run
        for run in results.runs
        if run.gamma_tag is not None or any(t.includes(run) for t in results.tasks.values())
    ]
    texts = [*differences.sentences(own), *differences.GENERAL]
    note = "Unless a model is named in parentheses, this holds for all models."
    return Fold("What differs from the paper, and why", [Paragraph(note), Items(texts)])


def _missing(
    rows: dict[str, list[Row]], figures: Sequence[Figure], results: ResultSet
) -> list[Block]:
    texts = []
    for name, table_rows in rows.items():
        absent = [row for row in table_rows if not row.results]
        if absent and name not in FIGURE_TARGETS:  # figures are listed below
            of = ", ".join(
                dict.fromkeys(f"{NAMES[row.entry.model]} on {row.task.title}" for row in absent)
            )
            texts.append(f"{_label(name)}: {of}. rbn reproduce {name}")
    for each in figures:
        if each.missing and not each.has_ours:
            few = "; ".join(each.missing[:4])
            more = f" and {len(each.missing) - 4} more" if len(each.missing) > 4 else ""
            texts.append(f"{_label(each.name)}: {few}{more}. rbn reproduce {each.name}")
    done = {finding.name for finding in read_findings(results.folder)}
    texts += [f"The finding {n}. rbn reproduce {n}" for n in FINDING_TARGETS if n not in done]
    return [Fold("What is still missing", [Items(texts)])] if texts else []


def _machines(results: ResultSet) -> Block:
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for run in results.runs:
        device = str(run.values.get("gpu") or "CPU")
        commit = re.sub(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", str(run.values.get("commit")))
        key = (device, str(run.values.get("versions")), commit, str(run.values.get("date")))
        groups.setdefault(key, []).append(run.minutes)
    cells = [(*k, str(len(v)), f"{mean(v):.1f}") for k, v in groups.items()]
    columns = ("device", "versions", "commit", "date", "runs", "minutes per run, mean")
    return Fold("Machines and versions", [Grid("Published runs", columns, cells)])
