"""Names in running text: runs of capitalised words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rbn.data.articles.tokens import OPENING, Sentence

# Capitalised in English, but not names of the kind that the published set asks for.
_CAPITALISED = """
i january february march april may june july august september october november december monday
tuesday wednesday thursday friday saturday sunday mr mrs ms miss dr sir prof mr. mrs. ms. dr. prof.
am pm gmt est et bst under
"""
_NEVER = frozenset(_CAPITALISED.split())
_INSIDE = frozenset(
    ("of", "de", "la", "le", "del", "da", "di", "van", "von", "der", "den", "bin", "al", "el")
)
_LONGEST = 6  # tokens of a name; longer runs are headlines
_HEADLINE = 0.6  # share of capitalised words


@dataclass(frozen=True)
class Usage:
    """How words are written where only names are capitalised.

    Attributes:
        lower: how often each word is written in lower case.
        upper: how often it is capitalised inside a sentence.
    """

    lower: Counter[str]
    upper: Counter[str]

    def share(self, word: str) -> float | None:
        """The share of a word's uses, from 0 to 1, in which it is a name; None without uses."""
        upper, lower = self.upper[word], self.lower[word]
        return upper / (upper + lower) if upper + lower else None


@dataclass(frozen=True)
class Name:
    """A run of tokens in a sentence: from `begin` to before `end`."""

    begin: int
    end: int


def count_usage(texts: Iterable[Sentence]) -> Usage:
    """How each word is written, except at the beginning of sentences and in headlines."""
    usage = Usage(Counter(), Counter())
    for sentence in texts:
        if _is_headline(sentence):
            continue
        for at, token in enumerate(sentence.tokens):
            if not token[0].isalpha():
                continue
            if token[0].islower():
                usage.lower[token] += 1
            elif not _begins(sentence, at):
                usage.upper[token.lower()] += 1
    return usage


def find_names(sentence: Sentence, usage: Usage, known: frozenset[str] = frozenset()) -> list[Name]:
    """The names in a sentence, from left to right.

    The first word of a sentence, and any word of a headline, is always capitalised. It counts as a
    name only if it usually is one, or if it is `known`, alone or with the next word.

    Args:
        sentence: the sentence to search.
        usage: how words are written elsewhere.
        known: names of one word, and the first two words of longer ones, in lower case.
    """
    tokens, size = sentence.tokens, len(sentence.tokens)
    headline = _is_title(sentence, usage)
    wanted = [
        _may_name(token, following, headline or _begins(sentence, at), usage, known)
        for at, (token, following) in enumerate(zip(tokens, (*tokens[1:], ""), strict=True))
    ]
    names, at = [], 0
    while at < size:
        if not wanted[at]:
            at += 1
            continue
        end = at + 1
        while (step := _goes_on(sentence, wanted, end)) > 0:
            end += step
        if end - at <= _LONGEST and not _is_ordinary(tokens[at:end], usage, known):
            names.append(Name(at, end))
        at = end
    return names


def _may_name(
    token: str, following: str, forced: bool, usage: Usage, known: frozenset[str]
) -> bool:
    """Whether a token can be part of a name. forced: its position is always capitalised."""
    if not token[0].isupper() or token.lower() in _NEVER:
        return False
    if not forced or token.lower() in known:
        return True
    if following[:1].isupper() and f"{token} {following}".lower() in known:
        return True
    share = usage.share(token.lower())
    return share is None or share >= 0.5


def _goes_on(sentence: Sentence, wanted: list[bool], end: int) -> int:
    """How many more tokens belong to a name that so far ends before `end`."""
    tokens, glued = sentence.tokens, sentence.glued
    if end < len(tokens) and wanted[end] and not (glued[end] and tokens[end - 1] == "."):
        return 1
    if end + 1 >= len(tokens) or not wanted[end + 1]:
        return 0
    if tokens[end] == "-":  # Ward-Prowse
        return 2 if glued[end] and glued[end + 1] else 0
    return 2 if tokens[end] in _INSIDE or tokens[end] == "&" else 0


def _is_ordinary(tokens: tuple[str, ...], usage: Usage, known: frozenset[str]) -> bool:
    """Whether a run is a single word that is rarely a name."""
    if len(tokens) > 1 or tokens[0].lower() in known:
        return False
    share = usage.share(tokens[0].lower())
    return len(tokens[0]) == 1 or (share is not None and share < 0.15)


def _begins(sentence: Sentence, at: int) -> bool:
    """Whether a token begins a sentence, or a quotation or clause inside it."""
    tokens = sentence.tokens
    if at == 0 or tokens[at - 1] in (":", ")") or all(t in OPENING for t in tokens[:at]):
        return True
    return tokens[at - 1] in OPENING and not sentence.glued[at - 1]


def _is_title(sentence: Sentence, usage: Usage) -> bool:
    """Whether ordinary words are capitalised as well, as in titles or text in capitals."""
    words = [token for token in sentence.tokens if token[0].isalpha()]
    if len(words) >= 4 and all(word.isupper() for word in words):
        return True
    shares = ((word, usage.share(word.lower())) for word in words if len(word) > 3)
    ordinary = [word for word, share in shares if share is not None and share < 0.5]
    raised = sum(word[0].isupper() for word in ordinary)
    return len(ordinary) >= 3 and raised / len(ordinary) > 0.5


def _is_headline(sentence: Sentence) -> bool:
    """Like `_is_title` before ordinary words are known: whether most words are capitalised."""
    words = [token for token in sentence.tokens if token[0].isalpha()]
    raised = sum(token[0].isupper() for token in words)
    return len(words) >= 4 and raised / len(words) >= _HEADLINE
