"""Anonymises one document and one question like those of a question set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rbn.data.articles.names import Usage
from rbn.data.articles.questions import anonymised
from rbn.data.articles.tokens import plain
from rbn.data.cnn.question import PLACEHOLDER, MalformedQuestion
from rbn.data.cnn.sentences import COMMON_WORDS

_GAP = "placeholdergap"  # a lower-case word that no text contains
_WORD = re.compile(rf"(?<![\w@]){PLACEHOLDER}(?!\w)")  # not a part of another word
_PIECE = re.compile(r"@\w+|'(?:s|ve|m|re|ll|d)\b|\w+|\.\.\.|--|[^\w\s]")


def anonymous(
    document: str, question: str, common: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Tokens of a document and a question, and the names of their entities.

    Text that already has ``@entity`` symbols is split at spaces, except that characters attached to
    the ``@placeholder``, such as a question mark, become tokens of their own.

    Args:
        document: running text.
        question: running text with one ``@placeholder``.
        common: words that are not names even if they begin a sentence, besides the most common.

    Raises:
        MalformedQuestion: the question has no ``@placeholder``, or several.
    """
    count, words = question.count(PLACEHOLDER), len(_WORD.findall(question))
    if count != 1 or words != 1:
        number = words if count == 1 else count
        raise MalformedQuestion(f"the question must have one {PLACEHOLDER}, got {number}")
    if "@entity" in document:
        return tuple(document.split()), question_tokens(question), {}
    usage = Usage(Counter(dict.fromkeys((*common, *COMMON_WORDS), 1)), Counter())
    texts, entities = anonymised(document, [_WORD.sub(f" {_GAP} ", question)], usage)
    asked = tuple(PLACEHOLDER if token == _GAP else token for token in texts[1])
    return texts[0], asked, entities


def question_tokens(question: str) -> tuple[str, ...]:
    """The tokens of a question, with the ``@placeholder`` separated from its neighbours."""
    tokens: list[str] = []
    for token in question.split():
        tokens += _PIECE.findall(plain(token)) if _WORD.search(token) else [token]
    return tuple(tokens)
