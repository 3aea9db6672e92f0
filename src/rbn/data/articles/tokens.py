"""Splits running text into tokens and sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TITLES = "Mr|Mrs|Ms|Dr|St|Jr|Sr|Prof|Gen|Sen|Rep|Gov|Lt|Col|Sgt|Capt|Rev|Hon|No|vs"
_TOKEN = re.compile(
    rf"""
      (?:[A-Z]\.){{2,}}                      # U.S.
    | (?:{_TITLES})\.(?=\s)                  # Mr.
    | [A-Z]\.(?=\s+[A-Z])                    # the initial of a name
    | \d+(?:[.,:]\d+)*(?:st|nd|rd|th|s|m|bn|k|am|pm)?\b
    | [^\W\d_]+(?=n't\b) | n't\b             # do n't
    | '(?:s|ve|m|re|ll|d)\b                  # he 's
    | [A-Z]'[A-Z]\w+                         # O'Neill
    | \w+
    | \.\.\. | --
    | [^\w\s]
    """,
    re.VERBOSE,
)
_PLAIN = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "\u00a0": " ", "…": "..."}
)
_ENDS = frozenset([".", "?", "!"])
OPENING = frozenset(["'", '"', "(", ":", "-", "--", "[", "*", "..."])


@dataclass(frozen=True)
class Sentence:
    """The tokens of a sentence.

    Attributes:
        tokens: as written.
        glued: whether each token follows the previous one without a space.
    """

    tokens: tuple[str, ...]
    glued: tuple[bool, ...]


def plain(text: str) -> str:
    """Replace typographic quotes, dashes and ellipses by plain ones."""
    return text.translate(_PLAIN)


def sentences(text: str) -> list[Sentence]:
    """The sentences of a text, with typographic quotes and dashes replaced by plain ones."""
    sentences: list[Sentence] = []
    tokens: list[str] = []
    glued: list[bool] = []
    end = -1
    ended = False
    for match in _TOKEN.finditer(plain(text)):
        token, close = match.group(), match.start() == end
        # Quotes and brackets right after a full stop belong to the sentence it ends.
        if ended and not (close and token in ("'", '"', ")")):
            sentences.append(Sentence(tuple(tokens), tuple(glued)))
            tokens, glued = [], []
            ended = False
        tokens.append(token)
        glued.append(close)
        ended = ended or token in _ENDS
        end = match.end()
    if tokens:
        sentences.append(Sentence(tuple(tokens), tuple(glued)))
    return sentences
