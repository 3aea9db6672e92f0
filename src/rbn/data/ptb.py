"""The Penn Treebank as characters."""

from __future__ import annotations

from pathlib import Path

from rbn.data.files import load
from rbn.data.text import Text

SYMBOLS = 50


def ptb(*, root: str | Path | None = None, download: bool = False) -> Text:
    """Mikolov's version of the Penn Treebank: 5,059,550, 396,412 and 446,184 characters.

    Every line of the files begins with a space, which is dropped, as in the paper. The rest of a
    line ends with a space and a newline, one of the 50 symbols.

    Args:
        root: the data folder; by default RBN_DATA, else ``~/.cache/rbn/data``.
        download: download missing files.
    """
    train, valid, test = map(without_first_spaces, load("ptb", root, fetch=download))
    return Text.of(train, valid, test)


def without_first_spaces(content: bytes) -> str:
    """Drop one space at the start of each line."""
    return content.decode("ascii").replace("\n ", "\n").removeprefix(" ")
