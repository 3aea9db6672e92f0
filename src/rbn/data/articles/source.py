"""Articles from a file of JSON lines."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rbn.data.articles.questions import Article
from rbn.data.errors import DataAltered

_PARTS = {
    "train": "training",
    "training": "training",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}
SPLITS = {
    "source": ("training", "validation", "test"),
    "held-out": ("training", "validation", "test", "test-cnn"),
}
"""The ways to split articles, and the parts that each produces."""
_HELD_OUT = 340  # of 10,000 Daily Mail articles, for validation and again for test


def lines(path: Path) -> Iterator[str]:
    """The lines of a file, which may be packed as .gz or .xz."""
    try:
        with _opened(path) as file:
            yield from file
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise DataAltered(f"{path} cannot be unpacked: {error}") from error


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def article(line: str, split: str = "source") -> Article:
    """Parse one line into an article, from the fields ``article``, ``highlights`` and ``id``.

    ``highlights`` is a list, or one text with a highlight per line. Optional fields: ``part`` is
    train, validation or test; a missing or empty ``url`` is replaced by source, part and id.

    Args:
        line: a JSON object.
        split: ``"source"`` puts all articles of the ``source`` dailymail into training and the
            others into their part. ``"held-out"`` draws validation and test from dailymail, 3.4 %
            each, by a hash of the text, so that equal articles stay together; all other articles
            become the second test set, ``test-cnn``.

    Raises:
        ValueError: the line is not an article; says why.
    """
    try:
        record: dict[str, Any] = json.loads(line)
        text, given = record["article"], record["highlights"]
        source, number = str(record.get("source", "articles")), str(record["id"])
        part = str(record.get("part", "train"))
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else "not a JSON object"
        raise ValueError(f"line that is not an article ({reason})") from error
    highlights = given.splitlines() if isinstance(given, str) else given
    listed = isinstance(highlights, list) and all(isinstance(h, str) for h in highlights)
    if not isinstance(text, str) or not listed:
        raise ValueError("line that is not an article (its text is not a string)")
    if source != "dailymail" and part not in _PARTS:
        raise ValueError(f"line that is not an article (part {part!r})")
    return Article(
        url=_first_line(record.get("url")) or _first_line(f"{source}/{part}/{number}"),
        part=_part(source, part, text, split),
        text=text,
        highlights=tuple(h for h in highlights if h.strip()),
    )


def _part(source: str, part: str, text: str, split: str) -> str:
    if split == "source":
        return "training" if source == "dailymail" else _PARTS[part]
    if source != "dailymail":
        return "test-cnn"
    draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 10_000
    if draw < _HELD_OUT:
        return "validation"
    return "test" if draw < 2 * _HELD_OUT else "training"


def _first_line(value: Any) -> str:
    """The first line of a value's text, stripped; empty if the value is None."""
    lines = ("" if value is None else str(value)).strip().splitlines()
    return lines[0].strip() if lines else ""
