"""One document and one question, anonymised as the questions of a set are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rbn.data.articles.names import Usage
from rbn.data.articles.questions import anonymised
from rbn.data.cnn.question import PLACEHOLDER, MalformedQuestion
from rbn.data.cnn.sentences import COMMON_WORDS

_GAP = "placeholdergap"  # a word of small letters that no text has


def anonymous(
    document: str, question: str, common: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Tokens of a document and a question, with what their entities stand for.

    Text that has ``@entity`` symbols already is taken as tokens separated by spaces.

    Args:
        document: running text.
        question: the same, with one ``@placeholder``.
        common: words that are no names though they may begin a sentence, besides the commonest.
    """
    if question.count(PLACEHOLDER) != 1:
        raise MalformedQuestion(
            f"the question must have one {PLACEHOLDER}, it has {question.count(PLACEHOLDER)}"
        )
    if "@entity" in document:
        return tuple(document.split()), tuple(question.split()), {}
    usage = Usage(Counter(dict.fromkeys((*common, *COMMON_WORDS), 1)), Counter())
    texts, entities = anonymised(document, [question.replace(PLACEHOLDER, _GAP)], usage)
    asked = tuple(PLACEHOLDER if token == _GAP else token for token in texts[1])
    return texts[0], asked, entities
