"""A text that every Python installation contains: the help on the language."""

from __future__ import annotations

import string

from rbn.data.text import Text

SYMBOLS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
_LIKE = {
    "\t": " ",
    "\u00a0": " ",
    "\u2010": "-",
    "\u2011": "-",
    "\u2013": "-",
    "\u2014": "--",
    "\u2018": "'",
    "\u2019": "'",
    "\u201c": '"',
    "\u201d": '"',
    "\u2026": "...",
}
_UNKNOWN = "?"


def pydoc() -> Text:
    """The topics of Python's ``help()``: half a million characters of English mixed with code.

    Needs no download. The topics are joined in alphabetical order; the first 90% of the characters
    are for training, the next 5% for validation, the last 5% for testing. The alphabet is newline
    and the 95 printable ASCII characters, for any version of Python; the text differs slightly
    between versions. Typographic quotes, dashes and ellipses are replaced by ASCII, any other
    character by a question mark.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError(
            "the text is pydoc_data of Python's standard library, which this Python does not have"
        ) from error
    text = plain("\n".join(topics[name] for name in sorted(topics)))
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    return Text.of(text[:first], text[first:second], text[second:], SYMBOLS)


def plain(text: str) -> str:
    """Convert text to the alphabet of 96 symbols."""
    others = set(text) - set(SYMBOLS)
    return text.translate({ord(other): _LIKE.get(other, _UNKNOWN) for other in others})
