"""The first 100 million characters of a cleaned Wikipedia."""

from __future__ import annotations

from pathlib import Path

from rbn.data.files import load
from rbn.data.text import Text

SYMBOLS = 27
SIZES = (90_000_000, 5_000_000, 5_000_000)  # train, valid, test


def text8(*, root: str | Path | None = None, download: bool = False) -> Text:
    """The text8 corpus: the space and the letters a to z; 90, 5 and 5 million characters.

    Takes about two seconds and, for a moment, half a gigabyte of memory.

    Args:
        root: the data folder; by default RBN_DATA, or else ``~/.cache/rbn/data``.
        download: load missing files from the web.
    """
    (content,) = load("text8", root, fetch=download)
    text = content.decode("ascii")
    first, second, _ = SIZES
    return Text.of(text[:first], text[first : first + second], text[first + second :])
