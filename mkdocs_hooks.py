"""What the documentation site needs besides MkDocs: links, generated parts, equations.

- Links to files outside `docs` point to the repository, or become plain text without `repo_url`.
- `<!-- rbn: commands -->`, `<!-- rbn: configs -->` and `<!-- rbn: settings -->` are replaced by
  text generated from the code.
- Equations become MathML, which browsers render without a script.
- Names such as `rbn.fold` link to the reference.
"""

from __future__ import annotations

import dataclasses
import html
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

import rbn

ROOT = Path(__file__).parent
CLASSES = {name for name in rbn.__all__ if name[0].isupper()}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", flags=re.M | re.S)
EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\[(\[](?P<latex>.*?)\\[)\]]\s*</(?P=tag)>',
    flags=re.S,
)
# A name of the library, except in links, headings and code blocks.
NAME = re.compile(
    r"<(?P<tag>a|h[1-6]|pre)\b.*?</(?P=tag)>|<code>(?P<name>(?:rbn\.)?[A-Za-z][\w.]*)</code>",
    flags=re.S,
)
PERCENT = re.compile(r"(?<=\d) (?=%)")
NUMBERS = re.compile(r"<td>(?=(?:<strong>)?[-+]?\d[^<(]{0,19}(?:</strong>)?</td>)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Fill in the generated parts, and fix links that leave the site."""
    for name, make in (("commands", commands), ("configs", configs), ("settings", settings)):
        mark = f"<!-- rbn: {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    folder = Path(config.docs_dir, page.file.src_uri).parent

    def mend(match: re.Match[str]) -> str:
        return outside(match, folder, Path(config.docs_dir), config.repo_url)

    parts, last = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(mend, markdown[last : fence.start()]), fence.group()]
        last = fence.end()
    return "".join((*parts, LINK.sub(mend, markdown[last:])))


def outside(match: re.Match[str], folder: Path, docs: Path, repository: str | None) -> str:
    """Keep a link within `docs`. Others link to the repository, or keep only their text."""
    text, target = match.groups()
    if target.startswith("#") or re.match(r"[a-z]+:", target):
        return match.group()
    path = Path(os.path.normpath(folder / target.partition("#")[0]))
    if path.is_relative_to(docs):
        return match.group()
    if not path.exists():
        raise FileNotFoundError(f"{folder.name}: link target {target} does not exist")
    if not repository:
        return text
    kind = "tree" if path.is_dir() else "blob"
    return f"[{text}]({repository.rstrip('/')}/{kind}/main/{path.relative_to(ROOT).as_posix()})"


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Turn equations into MathML and names into links, and keep short numbers on one line."""
    in_reference = page.file.src_uri.startswith("reference/")

    def linked(match: re.Match[str]) -> str:
        name = match["name"] or ""
        if name in CLASSES and in_reference:
            name = f"rbn.{name}"
        if not name.startswith("rbn."):
            return match.group()
        return f'<autoref identifier="{name}" optional>{match.group()}</autoref>'

    html = PERCENT.sub("\N{NO-BREAK SPACE}", html)
    html = NUMBERS.sub('<td class="number">', html)
    return NAME.sub(linked, EQUATION.sub(mathml, html))


def mathml(match: re.Match[str]) -> str:
    """Convert one equation: a block that scrolls by itself, or part of a line."""
    block = match["tag"] == "div"
    converted = convert(html.unescape(match["latex"]), display="block" if block else "inline")
    return f'<div class="equation">{converted}</div>' if block else converted


def commands() -> str:
    """The help of every command, from Typer."""
    import typer
    from typer.cli import get_docs_for_click

    from rbn.cli.app import app

    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="rbn")
    text = get_docs_for_click(obj=command, ctx=context, name="rbn")
    text = text[text.index("\n## ") :]  # skip the list of commands, which truncates descriptions
    return re.sub(r"(?<=bn-e)\*+", lambda stars: stars[0].replace("*", r"\*"), text)


def settings() -> str:
    """A table of every setting of a config, with type, default and description."""
    from griffe import Docstring, DocstringSectionKind

    from rbn.experiments.config import Config

    (section,) = [
        section
        for section in Docstring(inspect.getdoc(Config)).parse("google", warnings=False)
        if section.kind is DocstringSectionKind.attributes
    ]
    described = {attribute.name: attribute.description for attribute in section.value}
    lines = ["| setting | type, default | what it is |", "|---|---|---|"]
    for field in dataclasses.fields(Config):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        shown = "required" if default is dataclasses.MISSING else f"`{json.dumps(default)}`"
        kind = f"{field.type}".replace("dict[str, Any]", "settings").replace(" | None", ", null")
        text = " ".join(described[field.name].split()).replace("None:", "null:")
        lines.append(f"| `{field.name}` | {kind}; {shown} | {text} |")
    return "\n".join(lines)


def configs() -> str:
    """A table of every config in the package, with its purpose from the first comment."""
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
