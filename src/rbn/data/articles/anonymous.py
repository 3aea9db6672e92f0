"""Anonymises one document and one question, like the questions of a set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rbn.data.articles.names import Usage
from rbn.data.articles.questions import anonymised
from rbn.data.articles.tokens import plain
from rbn.data.cnn.question import PLACEHOLDER, MalformedQuestion
from rbn.data.cnn.sentences import COMMON_WORDS

_GAP = "placeholdergap"  # a word of small letters that no text has
_WHOLE = re.compile(rf"(?<![\w@]){PLACEHOLDER}(?!\w)")  # not a part of another word
_PIECE = re.compile(r"@\w+|'(?:s|ve|m|re|ll|d)\b|\w+|\.\.\.|--|[^\w\s]")


def anonymous(
    document: str, question: str, common: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Tokens of a document and a question, and the names of their entities.

    Text that has ``@entity`` symbols already is taken as tokens separated by spaces, but what is
    written close to the ``@placeholder``, such as a question mark, is split off.

    Args:
        document: running text.
        question: the same, with one ``@placeholder``.
        common: words that are no names though they may begin a sentence, besides the commonest.

    Raises:
        MalformedQuestion: the question has no ``@placeholder``, or several.
    """
    count, whole = question.count(PLACEHOLDER), len(_WHOLE.findall(question))
    if count != 1 or whole != 1:
        number = whole if count == 1 else count
        raise MalformedQuestion(f"the question must have one {PLACEHOLDER}, it has {number}")
    if "@entity" in document:
        return tuple(document.split()), question_tokens(question), {}
    usage = Usage(Counter(dict.fromkeys((*common, *COMMON_WORDS), 1)), Counter())
    texts, entities = anonymised(document, [_WHOLE.sub(f" {_GAP} ", question)], usage)
    asked = tuple(PLACEHOLDER if token == _GAP else token for token in texts[1])
    return texts[0], asked, entities


def question_tokens(question: str) -> tuple[str, ...]:
    """The tokens of a question, separated by spaces; the ``@placeholder`` stands alone."""
    tokens: list[str] = []
    for token in question.split():
        tokens += _PIECE.findall(plain(token)) if _WHOLE.search(token) else [token]
    return tuple(tokens)
