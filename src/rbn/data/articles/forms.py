"""Matches short and long forms of a name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Form = tuple[str, ...]
_SKIPPED = frozenset(["of", "the", "and", "&", "-"])
_PLACE = frozenset(["in", "at", "near", "across", "outside", "inside"])


@dataclass
class Mention:
    """How a form of a name occurs in the document.

    Attributes:
        surface: the form as first written.
        first: its index among all mentions.
        count: how often it occurs.
        place: whether it follows a preposition of place such as "in".
        capitals: whether it is written in capitals only.
    """

    surface: str
    first: int
    count: int = 0
    place: bool = False
    capitals: bool = False


def form(tokens: Iterable[str]) -> Form:
    """The tokens of a name as they are compared: lower case, without periods."""
    return tuple(token.lower().replace(".", "") for token in tokens)


def is_place(before: str) -> bool:
    """Whether the word before a name indicates a place."""
    return before.lower() in _PLACE


def merged(mentions: dict[Form, Mention]) -> dict[Form, Form]:
    """Map each form to its long form, or to itself if it has none.

    A form is short for a longer one if it is the end of it (a surname) or skips words in its
    middle; if it is the first of two or three words (a first name) and nothing indicates a place;
    or if it consists of the initials. Of several long forms, the one mentioned first is used.
    """
    longest = sorted(mentions, key=lambda f: (-len(f), mentions[f].first))
    root: dict[Form, Form] = {}
    for short in longest:
        fits = {
            root[long]
            for long in root
            if len(long) > len(short) and _stands_for(short, long, mentions[short])
        }
        root[short] = min(fits, key=lambda f: mentions[f].first) if fits else short
    return root


def _stands_for(short: Form, long: Form, mention: Mention) -> bool:
    if short[-1] == long[-1]:
        rest = iter(long)
        return all(token in rest for token in short)
    if len(short) == 1 and len(long) <= 3 and short[0] == long[0]:
        return not mention.place and not _SKIPPED.intersection(long)
    if len(short) == 1 and mention.capitals:
        initials = "".join(token[0] for token in long if token not in _SKIPPED)
        return len(initials) > 1 and short[0] == initials
    return False
