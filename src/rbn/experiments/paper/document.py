"""A page of headings, text, tables and pictures, as HTML and as Markdown."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template


@dataclass(frozen=True)
class Heading:
    """A title of a part."""

    text: str

    def html(self) -> str:
        """As HTML."""
        return f"<h2>{escape(self.text)}</h2>"

    def markdown(self) -> str:
        """As Markdown."""
        return f"## {_plain(self.text)}"


@dataclass(frozen=True)
class Paragraph:
    """Sentences."""

    text: str

    def html(self) -> str:
        """As HTML."""
        return f"<p>{escape(self.text)}</p>"

    def markdown(self) -> str:
        """As Markdown."""
        return _plain(self.text)


@dataclass(frozen=True)
class Items:
    """Sentences, each for itself; commands among them where `code`."""

    texts: Sequence[str]
    code: bool = False

    def html(self) -> str:
        """As HTML."""
        if self.code:
            return f"<pre>{escape(chr(10).join(self.texts))}</pre>"
        return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in self.texts) + "</ul>"

    def markdown(self) -> str:
        """As Markdown."""
        if self.code:
            return "\n".join(f"    {_one_line(text)}" for text in self.texts)
        return "\n".join(f"- {_plain(text)}" for text in self.texts)


@dataclass(frozen=True)
class Grid:
    """A table with a caption."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def html(self) -> str:
        """As HTML; on a narrow screen the table scrolls, not the page."""
        head = "".join(f"<th>{escape(text)}</th>" for text in self.columns)
        body = "\n".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        caption = f"<caption>{escape(self.caption)}</caption>"
        return (
            f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody></table></div>"
        )

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

    def html(self) -> str:
        """As HTML that needs no other file."""
        content = base64.b64encode(self.svg.read_bytes()).decode("ascii")
        return (
            f'<figure id="{escape(self.svg.stem)}">'
            f'<div class="wide{" large" if self.large else ""}">'
            f'<img src="data:image/svg+xml;base64,{content}" alt="{escape(self.title)}"></div>'
            f"<figcaption><strong>{escape(self.title)}.</strong> {escape(self.caption)}"
            "</figcaption></figure>"
        )

    def markdown(self) -> str:
        """As Markdown, with the files next to it."""
        return (
            f"![{_plain(self.title)}]({self.svg.name})\n\n**{_plain(self.title)}.** "
            f"{_plain(self.caption)} ([numbers]({self.table.name}))"
        )


Block = Heading | Paragraph | Items | Grid | Image


def html_page(title: str, blocks: Sequence[Block]) -> str:
    """The whole page in one file."""
    template = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    body = "\n".join(block.html() for block in blocks)
    return template.substitute(title=escape(title), body=body)


def markdown_page(title: str, blocks: Sequence[Block]) -> str:
    """The same as text."""
    return f"# {title}\n\n" + "\n\n".join(block.markdown() for block in blocks) + "\n"


def _plain(text: str) -> str:
    """Text in which Markdown sees no emphasis, such as the stars of BN-e**, no HTML, no links."""
    return re.sub(r"([*<\[\]])", r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
