"""``rbn data build-cloze``, ``rbn data questions`` and ``rbn ask``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rbn.cli.common import interrupted_code, stop

Articles = Annotated[
    Path,
    typer.Option(help="JSON lines with id, source, part, article and highlights; also .gz or .xz."),
]
Target = Annotated[Path, typer.Option(help="Folder for the questions, e.g. DATA/cnn-built.")]
Division = Annotated[
    str,
    typer.Option(
        help="source: train on the Daily Mail, validate and test on CNN. held-out: all three parts "
        "from the Daily Mail, CNN as a second test set (for DATA/dailymail-built)."
    ),
]
Processes = Annotated[
    int | None, typer.Option(help="Number of processes. Default: one per processor.")
]
DataDir = Annotated[
    Path | None, typer.Option(help="Data folder. Default: RBN_DATA, else ~/.cache/rbn/data.")
]
Sentences = Annotated[int, typer.Option(help="Sentences to keep of each document; 0 keeps all.")]


def build_cloze(
    articles: Articles, out: Target, split: Division = "source", processes: Processes = None
) -> None:
    """Build question files from news articles and their highlights."""
    from rbn.data.articles import build
    from rbn.data.errors import DataAltered
    from rbn.data.process_pool import WorkerLost

    if processes is not None and processes < 1:
        stop(f"processes must be at least 1, got {processes}", 2)
    try:
        built = build(articles, out, split=split, processes=processes, progress=_say)
    except (DataAltered, OSError, ValueError) as error:
        stop(str(error), 2)
    except WorkerLost as error:
        stop(f"{error}; run the same command to resume the build", 1)
    except KeyboardInterrupt as error:
        said = "interrupted; run the same command to resume the build"
        stop(said, interrupted_code(error))
    _end_line()
    for question in built.sample:
        typer.echo(f"\n{question.url}\n  ... {' '.join(question.document[:60])} ...")
        typer.echo(f"  question  {' '.join(question.question)}")
        surface = question.entities.get(question.answer, "")
        typer.echo(f"  answer    {question.answer} ({surface})")
    typer.echo("\npart         articles  questions")
    for part, count in built.articles.items():
        typer.echo(f"{part:<12} {count:>8,} {built.questions[part]:>10,}")
    typer.echo("\ndropped")
    for reason, count in built.dropped.most_common():
        typer.echo(f"{count:>9,}  {reason}")
    if not any(built.questions.values()):
        stop(f"no questions could be built from {articles}: fix it, remove {out} and retry", 1)


def questions(
    name: Annotated[
        str, typer.Argument(help="cnn, dailymail, cnn-built, dailymail-built or cloze.")
    ],
    sentences: Sentences = 4,
    min_count: Annotated[int, typer.Option(help="Replace rarer words by @unknown.")] = 1,
    words: Annotated[
        int | None,
        typer.Option(help="Keep only this many words, the most frequent ones. Default: all."),
    ] = None,
    data_dir: DataDir = None,
    processes: Processes = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the ceiling and the baselines to this JSON file, for the report."),
    ] = None,
) -> None:
    """Show sizes, lengths, the ceiling and the baselines of a set of questions.

    Preprocesses the question files the first time, and caches the result.
    """
    from rbn.data.cloze import cloze
    from rbn.data.cnn import QuestionBatches, baselines, load_questions
    from rbn.data.cnn.preprocess import Choice
    from rbn.data.cnn.shards import Reduction
    from rbn.data.process_pool import WorkerLost
    from rbn.experiments.paper.question_baselines import QuestionBaselines, write_counts
    from rbn.experiments.reading import PreprocessingProgress

    skipped: list[str] = []
    counts: list[QuestionBaselines] = []
    try:
        Choice(Reduction(sentences or None), min_count, words)  # rejects invalid numbers
        if name == "cloze":
            reading = cloze()
        else:
            report = PreprocessingProgress()
            reading, summary = load_questions(
                name,
                sentences=sentences or None,
                min_count=min_count,
                words=words,
                root=data_dir,
                processes=processes,
                progress=report,
            )
            report.close()
            skipped = [line for part in summary["parts"].values() for line in part["malformed"]]
    except (OSError, ValueError) as error:
        stop(str(error), 2)
    except WorkerLost as error:
        stop(f"{error}; run the same command to resume", 1)
    except KeyboardInterrupt as error:
        stop("interrupted; run the same command to resume", interrupted_code(error))
    vocabulary = reading.vocabulary
    typer.echo(f"{name}: {len(vocabulary):,} symbols, {vocabulary.entities} of them entities")
    typer.echo(
        "part      questions  document words (mean, median, longest)  question words  padding  "
        "ceiling  most frequent  not in question"
    )
    for part, passages in reading.parts.items():
        lengths, asked = passages.document_lengths.double(), passages.question_lengths.double()
        padding = ""
        if part == "train":
            padding = f"{QuestionBatches(passages, vocabulary, 64).padding_share:.1%}"
        values = baselines(passages, vocabulary)
        counts.append(QuestionBaselines(name, sentences or None, part, len(passages), **values))
        spread = f"{lengths.mean():.1f}, {lengths.median():.0f}, {lengths.max():.0f}"
        typer.echo(
            f"{part:<9} {len(passages):>9,}  {spread:>38}  {asked.mean():>14.1f}  "
            f"{padding:>7}  {values['ceiling']:>7.1%}  "
            f"{values['frequent']:>13.1%}  {values['frequent_unasked']:>15.1%}"
        )
    if out is not None:
        command = f"rbn data questions {name} --sentences {sentences} --min-count {min_count}"
        try:
            write_counts(counts, command if words is None else f"{command} --words {words}", out)
        except OSError as error:
            stop(str(error), 2)
    if skipped:
        typer.echo(f"{len(skipped):,} malformed files were skipped")
        for line in skipped[:10]:
            typer.echo(f"  {line}")


def ask(
    run: Annotated[Path, typer.Argument(help="Folder of a run on a reading task.")],
    document: Annotated[Path, typer.Option(help="A text file or a .question file.")],
    question: Annotated[
        str | None,
        typer.Option(help="Question with one @placeholder. Default: that of the .question file."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the attention to this HTML page.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Ask a trained reader about a document, and see what it attended to."""
    from rich.console import Console

    from rbn.experiments import attention_page, question_answering
    from rbn.training import CheckpointError
    from rbn.training.atomic_files import write_atomic

    try:
        answer = question_answering.ask(run, document, question, root=data_dir)
        if html is not None:
            write_atomic(html, attention_page.page(answer))
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        stop(str(error), 2)
    console = Console(highlight=False)
    console.print(attention_page.highlighted(answer))
    console.print(attention_page.looked_at(answer), markup=False)
    console.print(f"\n{' '.join(answer.question)}", markup=False)
    for name, chance in answer.candidates:
        console.print(f"{chance:>7.1%}  {name}", markup=False)
    if answer.right is not None:
        console.print(f"correct answer: {answer.right}", markup=False)
    if html is not None:
        console.print(f"page: {html}", markup=False)


def _say(what: str, done: int) -> None:
    """Print progress to standard error: one updating line in a terminal, else a line at times."""
    if sys.stderr.isatty():
        print(f"{what}: {done:,} articles", end="\r", file=sys.stderr, flush=True)
    elif done % 5000 < 200:
        print(f"{what}: {done:,} articles", file=sys.stderr, flush=True)


def _end_line() -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)
