"""The file format of the public question archives: one question about one document.

Five parts, separated by single blank lines::

    http://web.archive.org/web/...       the address of the article

    @entity1 won the cup . ...           the document, in one line of tokens

    @placeholder won the cup             the question

    @entity1                             the answer

    @entity1:Rovers                      one line for each entity
    @entity2:London
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

PLACEHOLDER = "@placeholder"
ENTITY = re.compile(r"@entity(0|[1-9][0-9]{0,4})")  # larger numbers are mistakes
_PARTS = ("address", "document", "question", "answer", "entities")


class MalformedQuestion(ValueError):
    """A file is not a valid question. Says why."""


@dataclass(frozen=True)
class Question:
    """A question with a gap, and a document.

    Attributes:
        url: address of the article.
        document: tokens, entities as ``@entityN``.
        question: tokens, one of them ``@placeholder``.
        answer: ``@entityN``.
        entities: the name behind each ``@entityN``.
    """

    url: str
    document: tuple[str, ...]
    question: tuple[str, ...]
    answer: str
    entities: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.document:
            raise MalformedQuestion("the document is empty")
        if self.question.count(PLACEHOLDER) != 1:
            count = self.question.count(PLACEHOLDER)
            raise MalformedQuestion(f"the question must have one {PLACEHOLDER}, got {count}")
        if not ENTITY.fullmatch(self.answer):
            raise MalformedQuestion(f"the answer must be an @entity, got {self.answer[:40]!r}")

    @property
    def answerable(self) -> bool:
        """Whether the answer is in the document."""
        return self.answer in self.document


def parse(text: str) -> Question:
    """Parse the content of a question file.

    Raises:
        MalformedQuestion: the content is invalid; says why.
    """
    parts = re.split(r"\n[ \t]*\n", text.replace("\r\n", "\n").strip("\n") + "\n", maxsplit=4)
    if len(parts) < len(_PARTS) - 1:
        raise MalformedQuestion(
            f"a question must have {len(_PARTS)} parts separated by blank lines, got {len(parts)}"
        )
    url, document, question, answer = (part.strip() for part in parts[:4])
    entities = {}
    for line in parts[4].splitlines() if len(parts) == len(_PARTS) else ():
        if not line.strip():
            continue
        name, colon, surface = line.partition(":")
        if not colon or not ENTITY.fullmatch(name):
            raise MalformedQuestion(f"an entity must look like @entity1:name, got {line[:40]!r}")
        entities[name] = surface
    return Question(url, tuple(document.split()), tuple(question.split()), answer, entities)


def render(question: Question) -> str:
    """The content of a question file; the inverse of `parse`.

    A missing address is written as a space, since a file must not begin with an empty line.
    """
    entities = "\n".join(f"{name}:{surface}" for name, surface in question.entities.items())
    parts = (
        question.url or " ",
        " ".join(question.document),
        " ".join(question.question),
        question.answer,
        entities,
    )
    return "\n\n".join(parts) + "\n"


def read(path: Path) -> Question:
    """Read a question file. Errors name the file."""
    try:
        return parse(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MalformedQuestion(f"{path.name}: not UTF-8 ({error.reason})") from error
    except MalformedQuestion as error:
        raise MalformedQuestion(f"{path.name}: {error}") from error
