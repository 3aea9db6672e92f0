"""What the documentation site needs besides MkDocs: links, generated parts, equations.

- Links to files outside `docs` lead to the repository, or become plain text without `repo_url`.
- `<!-- rbn: commands -->` and `<!-- rbn: configs -->` are replaced by what the code says.
- Equations become MathML, which browsers draw without a script.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).parent
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", flags=re.M | re.S)
EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\[(\[](?P<latex>.*?)\\[)\]]\s*</(?P=tag)>',
    flags=re.S,
)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Fill in the generated parts, and mend links that leave the site."""
    for name, make in (("commands", commands), ("configs", configs)):
        mark = f"<!-- rbn: {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    folder = Path(config.docs_dir, page.file.src_uri).parent
    mend = lambda match: outside(match, folder, Path(config.docs_dir), config.repo_url)  # noqa: E731
    parts, last = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(mend, markdown[last : fence.start()]), fence.group()]
        last = fence.end()
    return "".join((*parts, LINK.sub(mend, markdown[last:])))


def outside(match: re.Match[str], folder: Path, docs: Path, repository: str | None) -> str:
    """A link as it is, or, if it leaves `docs`, one into the repository or its text alone."""
    text, target = match.groups()
    if target.startswith("#") or re.match(r"[a-z]+:", target):
        return match.group()
    path = Path(os.path.normpath(folder / target.partition("#")[0]))
    if path.is_relative_to(docs):
        return match.group()
    if not path.exists():
        raise FileNotFoundError(f"{folder.name}: there is no {target}")
    if not repository:
        return text
    kind = "tree" if path.is_dir() else "blob"
    return f"[{text}]({repository.rstrip('/')}/{kind}/main/{path.relative_to(ROOT).as_posix()})"


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Turn the equations of a page into MathML."""
    return EQUATION.sub(mathml, html)


def mathml(match: re.Match[str]) -> str:
    """One equation: a block in a box that scrolls by itself, or part of a line."""
    block = match["tag"] == "div"
    found = convert(html.unescape(match["latex"]), display="block" if block else "inline")
    return f'<div class="equation">{found}</div>' if block else found


def commands() -> str:
    """Help of every command, by Typer."""
    import typer
    from typer.cli import get_docs_for_click

    from rbn.cli.app import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="rbn")
    text = get_docs_for_click(obj=command, ctx=context, name="rbn")
    return re.sub(r"^#(#*) ", r"#\1 ", text, flags=re.M)


def configs() -> str:
    """Name and purpose, the first comment, of every config that comes with the package."""
    from rbn.experiments.config import CONFIGS, names

    lines = ["| config | what it is |", "|---|---|"]
    for name in names():
        comment = []
        for line in (CONFIGS / f"{name}.yaml").read_text().splitlines():
            if not line.startswith("#"):
                break
            comment.append(line.lstrip("# "))
        lines.append(f"| `{name}` | {' '.join(comment)} |")
    return "\n".join(lines)
