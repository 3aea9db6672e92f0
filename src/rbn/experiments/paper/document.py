"""A page of headings, text, tables and figures, as HTML and as Markdown."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rbn.experiments.html_templates import render

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


@dataclass(frozen=True)
class Heading:
    """The heading of a section (level 2) or subsection (level 3)."""

    kind: ClassVar[str] = "heading"

    text: str
    level: int = 2

    @property
    def anchor(self) -> str:
        """The fragment that links to the heading."""
        return re.sub(r"[^a-z0-9]+", "-", self.text.lower()).strip("-")

    def markdown(self) -> str:
        """The block as Markdown."""
        return f"{'#' * self.level} {_plain(self.text)}"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    kind: ClassVar[str] = "paragraph"

    text: str

    def markdown(self) -> str:
        """The block as Markdown."""
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
        """The block as Markdown."""
        if self.code:
            return "\n".join(f"    {_one_line(text)}" for text in self.texts)
        return "\n".join(f"- {_plain(text)}" for text in self.texts)


@dataclass(frozen=True)
class Card:
    """Headline numbers of one task.

    Attributes:
        title: the task.
        unit: the unit of the numbers.
        rows: model, our number and the paper's.
        note: a restriction that a reader must know.
    """

    title: str
    unit: str
    rows: Sequence[tuple[str, str, str]]
    note: str = ""


@dataclass(frozen=True)
class Cards:
    """Headline numbers of several tasks."""

    kind: ClassVar[str] = "cards"

    cards: Sequence[Card]

    def markdown(self) -> str:
        """The block as Markdown: a sentence for each card."""
        lines = []
        for card in self.cards:
            numbers = ", ".join(
                f"{model} {ours} (paper {paper})" for model, ours, paper in card.rows
            )
            note = f" {card.note}" if card.note else ""
            lines.append(f"- {_plain(f'{card.title}, {card.unit}: {numbers}.{note}')}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Grid:
    """A table with a caption. A row of a single cell is the title of the rows below it.

    In Markdown, whose cells cannot span columns, every title starts a new table.
    """

    kind: ClassVar[str] = "table"

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The block as Markdown."""
        head = [f"| {' | '.join(map(_cell, self.columns))} |", "|" + "---|" * len(self.columns)]
        parts, lines = [f"**{_plain(self.caption)}**"], list(head)
        for row in self.rows:
            if len(row) == 1 < len(self.columns):
                parts += ["\n".join(lines)] * (lines != head) + [_plain(row[0])]
                lines = list(head)
            else:
                lines.append(f"| {' | '.join(map(_cell, row))} |")
        return "\n\n".join([*parts, "\n".join(lines)])


@dataclass(frozen=True)
class Image:
    """A figure with a caption; its files are in the page's folder.

    Attributes:
        svg: the picture, embedded in the page.
        table: the file with its numbers.
        title: a few words.
        caption: full sentences.
        large: whether it scrolls on a narrow screen instead of shrinking.
    """

    svg: Path
    table: Path
    title: str
    caption: str
    large: bool = False
    kind: ClassVar[str] = "image"

    @property
    def content(self) -> str:
        """The picture in base64, for a data URI."""
        return base64.b64encode(self.svg.read_bytes()).decode("ascii")

    def markdown(self) -> str:
        """The block as Markdown, with links to the files."""
        return (
            f"![{_plain(self.title)}]({self.svg.name})\n\n**{_plain(self.title)}.** "
            f"{_plain(self.caption)} ([numbers]({self.table.name}))"
        )


@dataclass(frozen=True)
class Fold:
    """Blocks that are hidden until the reader opens them."""

    kind: ClassVar[str] = "fold"

    summary: str
    blocks: Sequence[Block]

    def markdown(self) -> str:
        """The block as Markdown, with HTML's details element."""
        summary = html.escape(_one_line(self.summary))
        parts = (block.markdown() for block in self.blocks)
        inside = "\n\n".join([f"<summary>{summary}</summary>", *parts])
        return f'<details markdown="1">\n{inside}\n\n</details>'


Block = Heading | Paragraph | Items | Cards | Grid | Image | Fold


def html_page(title: str, blocks: Sequence[Block]) -> str:
    """The page as a single HTML file, with a table of contents."""
    headings = [block for block in blocks if isinstance(block, Heading)]
    return _printable(render("report.html", title=title, blocks=blocks, headings=headings))


def markdown_page(title: str, blocks: Sequence[Block]) -> str:
    """The page as Markdown, with the figures in files next to it."""
    return _printable(f"# {title}\n\n" + "\n\n".join(block.markdown() for block in blocks) + "\n")


def _printable(page: str) -> str:
    """Replace control characters, which a terminal that shows the page would interpret."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", page)


def _plain(text: str) -> str:
    """Escape Markdown's emphasis (as in BN-e**), HTML and links."""
    # Not every renderer honours a backslash before <: Python-Markdown still makes a tag of it.
    return re.sub(r"([*\[\]])", r"\\\1", _one_line(text)).replace("<", "&lt;")


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
