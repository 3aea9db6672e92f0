"""The question sets by name: their files, and how to load them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rbn.data.cnn import store
from rbn.data.cnn.passages import Reading
from rbn.data.cnn.preprocess import Choice, Progress, prepared
from rbn.data.cnn.shards import Reduction
from rbn.data.errors import DataAltered, DataNotFound
from rbn.data.files import data_folder
from rbn.nn import checks

DONE = "build.json"  # what `rbn data build-cloze` writes last


@dataclass(frozen=True)
class QuestionSet:
    """A set of question files.

    Attributes:
        name: name of the set, and of its folder in the data folder.
        about: a short description.
        how: how to get it, in a sentence.
        built: whether `rbn data build-cloze` makes it.
    """

    name: str
    about: str
    how: str
    built: bool = False


_ARCHIVE = (
    "download the questions ({name}.tgz) by hand from https://cs.nyu.edu/~kcho/DMQA/ and unpack "
    "them with tar xzf {name}.tgz -C {{folder.parent}}; rbn knows no checksum to verify the archive"
)

SETS = {
    each.name: each
    for each in (
        QuestionSet("cnn", "questions about CNN articles", _ARCHIVE.format(name="cnn")),
        QuestionSet(
            "dailymail", "questions about Daily Mail articles", _ARCHIVE.format(name="dailymail")
        ),
        QuestionSet(
            "cnn-built",
            "questions made from articles",
            "make it with rbn data build-cloze --articles FILE --out {folder}",
            built=True,
        ),
        QuestionSet(
            "dailymail-built",
            "questions made from articles, all parts of one newspaper",
            "make it with rbn data build-cloze --articles FILE --out {folder} --split held-out",
            built=True,
        ),
    )
}


def question_set(name: str) -> QuestionSet:
    """Look up a question set by name. The `ValueError` for an unknown name lists all names."""
    if name not in SETS:
        raise ValueError(f"unknown question set {name!r}: choose from {', '.join(SETS)}")
    return SETS[name]


def load_questions(
    name: str,
    *,
    sentences: int | None = 4,
    renumber: bool = False,
    min_count: int = 1,
    words: int | None = None,
    root: str | Path | None = None,
    cache: str | Path | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> tuple[Reading, dict[str, Any]]:
    """A question set as arrays, and a summary (see `prepared`).

    The preprocessed arrays suffice: a machine that only trains needs no question files.

    Args:
        name: ``cnn``, ``dailymail``, ``cnn-built`` or ``dailymail-built``.
        sentences: keep this many sentences of each document, those most relevant to the question;
            None keeps the entire document.
        renumber: number the entities of each text from 0 on; otherwise keep the file's numbers.
        min_count: rarer words become ``@unknown``.
        words: keep at most this many words.
        root: the data folder; by default RBN_DATA, else ``~/.cache/rbn/data``.
        cache: folder for the preprocessed arrays; by default ``cache`` in the set's folder.
        processes: number of processes for preprocessing; by default one per processor.
        progress: called every few hundred files while preprocessing.

    Raises:
        DataNotFound: the set is missing; says how to get it.
    """
    chosen = question_set(name)
    folder = data_folder(root) / name
    if processes is not None:
        checks.positive_integer("processes", processes)
    choice = Choice(Reduction(sentences, renumber), min_count, words)
    files = folder / "questions"
    place = folder / "cache" if cache is None else Path(cache).expanduser()
    if not files.is_dir() and store.read_metadata(place / choice.key) is None:
        how = chosen.how.format(folder=folder)
        raise DataNotFound(f"{name} is not in {folder}: {how}")
    if files.is_dir() and chosen.built and not (folder / DONE).is_file():
        raise DataNotFound(
            f"the build of {files} did not finish: {chosen.how.format(folder=folder)}, which "
            "resumes it"
        )
    built = _built(folder / DONE) if files.is_dir() and chosen.built else None
    return prepared(files, place, choice, built=built, processes=processes, progress=progress)


def _built(path: Path) -> dict[str, int]:
    """The number of files in each folder of a built set; empty if an older version built it."""
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        intact = summary.pop("sha256", None) in (None, store.checksum(summary))
        files: dict[str, int] = summary.get("files", {})
    except (AttributeError, ValueError, RecursionError) as error:
        raise DataAltered(f"{path} is damaged: {error}") from error
    if not intact:
        raise DataAltered(f"{path} is damaged or was edited: its checksum does not match")
    return files
