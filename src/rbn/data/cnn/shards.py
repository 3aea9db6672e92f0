"""Converts a few hundred question files at a time into a shard of arrays."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rbn.data.cnn import store
from rbn.data.cnn.passages import tensor
from rbn.data.cnn.question import ENTITY, MalformedQuestion, read
from rbn.data.cnn.sentences import select
from rbn.data.cnn.vocabulary import normal
from rbn.data.errors import DataAltered
from rbn.nn import checks


@dataclass(frozen=True)
class Reduction:
    """Which part of a document is kept.

    Attributes:
        sentences: number of sentences, the most relevant ones; None keeps all.
        renumber: number the entities of each text from 0 on, in order of appearance; otherwise
            they keep the file's numbers.
    """

    sentences: int | None = 4
    renumber: bool = False

    def __post_init__(self) -> None:
        checks.boolean("renumber", self.renumber)
        if self.sentences == 0:
            raise ValueError("sentences must be at least 1, or None for whole documents, got 0")
        if self.sentences is not None:
            checks.positive_integer("sentences", self.sentences)


@dataclass(frozen=True)
class Job:
    """Files to read, the folder of the result, and a checksum of the files.

    named_by_content: the name of each file is the SHA-1 of its content, which is checked.
    """

    files: tuple[str, ...]
    folder: str
    reduction: Reduction
    sum: str
    named_by_content: bool = False


def make(job: Job) -> int:
    """Read the files of a job and write a shard. Returns the number of questions in it.

    A shard has its own numbering, with a list of its symbols, because the vocabulary is not known
    before all files are read. Words are counted in the entire documents.
    """
    numbers: dict[str, int] = {}
    counts: Counter[str] = Counter()
    flat = {"documents": array("i"), "questions": array("i"), "answers": array("i")}
    offsets = {"documents": array("q", [0]), "questions": array("q", [0])}
    malformed: list[str] = []
    answerable = kept = 0

    def encode(tokens: tuple[str, ...]) -> list[int]:
        return [numbers.setdefault(normal(token), len(numbers)) for token in tokens]

    for file in job.files:
        try:
            if job.named_by_content:
                _check_name(Path(file))
            question = read(Path(file))
        except (MalformedQuestion, OSError) as error:
            malformed.append(str(error))
            continue
        counts.update(map(normal, question.document))
        counts.update(map(normal, question.question))
        answerable += question.answerable
        document, asked, answer = question.document, question.question, question.answer
        if job.reduction.sentences is not None:
            document = select(document, asked, job.reduction.sentences)
        kept += answer in document
        if job.reduction.renumber:
            new = renumbering((*document, *asked, answer))
            document, asked, (answer,) = (
                tuple(new.get(token, token) for token in text)
                for text in (document, asked, (answer,))
            )
        flat["documents"].extend(encode(document))
        flat["questions"].extend(encode(asked))
        flat["answers"].extend(encode((answer,)))
        for name, ends in offsets.items():
            ends.append(len(flat[name]))
    total = len(flat["answers"])
    with store.Writer(Path(job.folder)) as writer:
        for name, values in flat.items():
            writer.append(name, tensor(values))
        for name, ends in offsets.items():
            writer.append(f"{name}_offsets", tensor(ends))
        writer.finish(
            {
                "files": job.files,
                "reduction": asdict(job.reduction),
                "sum": job.sum,
                "symbols": list(numbers),
                "counts": counts,
                "malformed": malformed,
                "questions": total,
                "answerable": answerable,
                "kept": kept,
            }
        )
    return total


def content_name(content: bytes) -> str:
    """The file name that `rbn data build-cloze` gives a question file."""
    return f"{hashlib.sha1(content).hexdigest()}.question"


def _check_name(path: Path) -> None:
    if content_name(path.read_bytes()) != path.name:
        raise DataAltered(
            f"{path} is damaged: its content does not match its name; remove the folder of this "
            "set and build it again"
        )


def renumbering(tokens: Iterable[str]) -> dict[str, str]:
    """New names for the entities of a text: ``@entity0``, ``@entity1``, in order of appearance."""
    new: dict[str, str] = {}
    for token in tokens:
        if ENTITY.fullmatch(token):
            new.setdefault(token, f"@entity{len(new)}")
    return new
