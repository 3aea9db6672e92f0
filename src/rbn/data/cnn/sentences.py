"""Selects the sentences of a document that are most relevant to a question."""

from __future__ import annotations

from collections.abc import Sequence

from rbn.data.cnn.question import PLACEHOLDER

_ENDS = frozenset(".?!")
_CLOSING = frozenset(["'", '"', "''", "”", "’", ")"])
# Words that do not show what a sentence is about.
_COMMON = """
a about after again all also an and any are as at be because been before being but by can could did
do does for from had has have he her here him his how i if in into is it its just may me more most
my new no not now of off on one only or other our out over said say says she should so some than
that the their them then there these they this those to too two under up us was we were what when
where which while who why will with would you your 's n't
"""
COMMON_WORDS = frozenset(_COMMON.split())


def split(document: Sequence[str]) -> list[tuple[str, ...]]:
    """Split a tokenised document into its sentences, without dropping a token."""
    sentences: list[tuple[str, ...]] = []
    begin, end = 0, 0
    while end < len(document):
        end += 1
        if document[end - 1] in _ENDS:
            while end < len(document) and document[end] in _CLOSING and _closes(document, end):
                end += 1
            sentences.append(tuple(document[begin:end]))
            begin = end
    if begin < len(document):
        sentences.append(tuple(document[begin:]))
    return sentences


def _closes(document: Sequence[str], at: int) -> bool:
    """Whether a quotation mark after a full stop ends the sentence rather than begins the next one.

    Opening and closing marks look the same; an opening mark follows an even number of marks.
    """
    mark = document[at]
    if mark in (")", "”", "’"):
        return True
    return document[:at].count(mark) % 2 == 1


def relevant(
    document: Sequence[str], question: Sequence[str], count: int = 4
) -> tuple[tuple[str, ...], ...]:
    """The sentences that share the most words with the question, in the document's order.

    A sentence scores one for each distinct word of the question in it, two for an entity. Common
    words and punctuation do not count. Ties go to the earlier sentence.

    Args:
        document: its tokens.
        question: its tokens.
        count: number of sentences to select; all if there are no more.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    sentences = split(document)
    if len(sentences) <= count:
        return tuple(sentences)
    words = {w for w in question if w != PLACEHOLDER and w not in COMMON_WORDS and _is_word(w)}
    scores = [
        sum(2 if word.startswith("@") else 1 for word in words.intersection(sentence))
        for sentence in sentences
    ]
    best = sorted(range(len(sentences)), key=lambda k: (-scores[k], k))[:count]
    return tuple(sentences[k] for k in sorted(best))


def select(document: Sequence[str], question: Sequence[str], count: int = 4) -> tuple[str, ...]:
    """The tokens of the relevant sentences, concatenated."""
    return tuple(token for sentence in relevant(document, question, count) for token in sentence)


def _is_word(token: str) -> bool:
    return any(character.isalnum() for character in token)
