"""The first 100 million characters of a cleaned Wikipedia."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from pathlib import Path

from rbn.data.files import load
from rbn.data.text import Text

SYMBOLS = " " + string.ascii_lowercase
SIZES = (90_000_000, 5_000_000, 5_000_000)  # train, valid, test


def text8(
    *,
    root: str | Path | None = None,
    download: bool = False,
    characters: Sequence[int] | None = None,
) -> Text:
    """The text8 corpus: space and the letters a to z; 90, 5 and 5 million characters.

    Takes about two seconds and temporarily half a gigabyte of memory.

    Args:
        root: the data folder; by default RBN_DATA, else ``~/.cache/rbn/data``.
        download: download missing files.
        characters: how many characters of the training, validation and test part to use, from the
            start of each; all by default.
    """
    characters = SIZES if characters is None else characters
    if (
        not isinstance(characters, list | tuple)
        or len(characters) != len(SIZES)
        or not all(isinstance(count, int) for count in characters)
        or not all(0 < count <= size for count, size in zip(characters, SIZES, strict=True))
    ):
        raise ValueError(
            "characters must be a list of three numbers (train, valid, test) from 1 to "
            f"{', '.join(f'{size:,}' for size in SIZES)}, got {characters!r}"
        )
    (content,) = load("text8", root, fetch=download)
    text = content.decode("ascii")
    starts = itertools.accumulate(SIZES[:-1], initial=0)
    train, valid, test = (text[i : i + n] for i, n in zip(starts, characters, strict=True))
    return Text.of(train, valid, test, SYMBOLS)
