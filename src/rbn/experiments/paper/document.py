"""A page of headings, text, tables and pictures, as HTML and as Markdown."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rbn.experiments.html_templates import render


@dataclass(frozen=True)
class Heading:
    """The heading of a section."""

    kind: ClassVar[str] = "heading"

    text: str

    def markdown(self) -> str:
        """As Markdown."""
        return f"## {_plain(self.text)}"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    kind: ClassVar[str] = "paragraph"

    text: str

    def markdown(self) -> str:
        """As Markdown."""
        return _plain(self.text)


@dataclass(frozen=True)
class Items:
    """A list of sentences, or of commands if `code`."""

    texts: Sequence[str]
    code: bool = False

    @property
    def kind(self) -> str:
        """The kind of block in the HTML template."""
        return "commands" if self.code else "items"

    def markdown(self) -> str:
        """As Markdown."""
        if self.code:
            return "\n".join(f"    {_one_line(text)}" for text in self.texts)
        return "\n".join(f"- {_plain(text)}" for text in self.texts)


@dataclass(frozen=True)
class Grid:
    """A table with a caption."""

    kind: ClassVar[str] = "table"

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As Markdown."""
        lines = [f"| {' | '.join(map(_cell, row))} |" for row in (self.columns, *self.rows)]
        lines.insert(1, "|" + "---|" * len(self.columns))
        return f"**{_plain(self.caption)}**\n\n" + "\n".join(lines)


@dataclass(frozen=True)
class Image:
    """A picture with a caption; the files lie in the page's folder.

    Attributes:
        svg: drawn into the page.
        table: its numbers.
        title: in a few words.
        caption: in sentences.
        large: whether on a narrow screen it is better scrolled than made small.
    """

    svg: Path
    table: Path
    title: str
    caption: str
    large: bool = False
    kind: ClassVar[str] = "image"

    @property
    def content(self) -> str:
        """The picture's content, for a data URI."""
        return base64.b64encode(self.svg.read_bytes()).decode("ascii")

    def markdown(self) -> str:
        """As Markdown, with the files next to it."""
        return (
            f"![{_plain(self.title)}]({self.svg.name})\n\n**{_plain(self.title)}.** "
            f"{_plain(self.caption)} ([numbers]({self.table.name}))"
        )


Block = Heading | Paragraph | Items | Grid | Image


def html_page(title: str, blocks: Sequence[Block]) -> str:
    """The page as HTML, in a single file."""
    return render("report.html", title=title, blocks=blocks)


def markdown_page(title: str, blocks: Sequence[Block]) -> str:
    """The page as Markdown, with the pictures next to it."""
    return f"# {title}\n\n" + "\n\n".join(block.markdown() for block in blocks) + "\n"


def _plain(text: str) -> str:
    """Text in which Markdown sees no emphasis, such as the stars of BN-e**, no HTML, no links."""
    return re.sub(r"([*<\[\]])", r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
