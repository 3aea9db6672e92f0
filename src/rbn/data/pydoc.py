"""A text that is on every machine with Python: the help on its language."""

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
    """The topics of Python's ``help()``: half a million characters of English, with code in it.

    Needs no download. The topics are joined in the order of their names; the first 90% of the
    characters are for training, the next 5% for validation, the last 5% for testing. The alphabet
    is the end of line and the 95 printable characters of ASCII, in any version of Python; the text
    differs a little from version to version. Typographic quotes, dashes and dots become those of
    ASCII, any other character a question mark.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ImportError(
            "the text is pydoc_data of Python's standard library, which this Python lacks"
        ) from error
    text = plain("\n".join(topics[name] for name in sorted(topics)))
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    return Text.of(text[:first], text[first:second], text[second:], SYMBOLS)


def plain(text: str) -> str:
    """The text in the alphabet of 96 symbols."""
    others = set(text) - set(SYMBOLS)
    return text.translate({ord(other): _LIKE.get(other, _UNKNOWN) for other in others})
