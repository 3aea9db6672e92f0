"""The Penn Treebank as characters."""

from __future__ import annotations

from pathlib import Path

from rbn.data.files import load
from rbn.data.text import Text

SYMBOLS = 50


def ptb(*, root: str | Path | None = None, download: bool = False) -> Text:
    """Mikolov's version of the Penn Treebank: streams of 5,059,550, 396,412 and 446,184 characters.

    In the files every line begins with a space; that one is dropped, as in the paper. What is left
    of a line ends with a space and the end of line, one of the 50 symbols.

    Args:
        root: the data folder; by default RBN_DATA, or else ``~/.cache/rbn/data``.
        download: load missing files from the web.
    """
    train, valid, test = map(without_first_spaces, load("ptb", root, fetch=download))
    return Text.of(train, valid, test)


def without_first_spaces(content: bytes) -> str:
    """The text, without one space at the start of each line."""
    return content.decode("ascii").replace("\n ", "\n").removeprefix(" ")
