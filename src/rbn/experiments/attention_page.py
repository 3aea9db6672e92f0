"""Attention over a document, as a page and for the terminal."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from rbn.experiments.question_answering import Answer

if TYPE_CHECKING:
    from rich.text import Text

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 1.05rem/1.8 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto;
  padding: 0 1rem; color: #222; background: #fff; }}
.question {{ font-weight: 600; }}
mark {{ color: inherit; border-radius: .2em; padding: .1em 0; }}
td, th {{ padding: .1rem 1rem .1rem 0; text-align: left; font-variant-numeric: tabular-nums; }}
</style>
<h1>{title}</h1>
<p class="question">{question}</p>
{right}
<table><tr><th>answer</th><th>probability</th></tr>
{rows}
</table>
<p>The more a word counted for the answer, the darker it is; the darkest has {most} of the
attention.</p>
<p>{document}</p>
</html>
"""


def shades(answer: Answer) -> tuple[float, ...]:
    """The attention of each token as a part of the largest, from 0 to 1."""
    most = max(answer.attention)
    return tuple(weight / most if most > 0 else 0.0 for weight in answer.attention)


def page(answer: Answer) -> str:
    """An HTML page; every word is escaped."""
    words = []
    pairs = zip(answer.tokens, answer.attention, shades(answer), strict=True)
    for token, weight, shade in pairs:
        color = f"background: rgba(255, 150, 0, {shade:.3f})"
        words.append(f'<mark style="{color}" title="{weight:.4f}">{escape(token)}</mark>')
    rows = "\n".join(
        f"<tr><td>{escape(name)}</td><td>{chance:.1%}</td></tr>"
        for name, chance in answer.candidates
    )
    right = "" if answer.right is None else f"<p>The right answer: {escape(answer.right)}</p>"
    return _PAGE.format(
        title=escape(answer.candidates[0][0]),
        question=escape(" ".join(answer.question)),
        right=right,
        rows=rows,
        most=f"{max(answer.attention):.1%}",
        document=" ".join(words),
    )


def looked_at(answer: Answer, most: int = 5) -> str:
    """The words with most of the attention, in one line, also for where there are no colours."""
    pairs = sorted(zip(answer.attention, answer.tokens, strict=True), key=lambda pair: -pair[0])
    return "looked at: " + ", ".join(f"{token} {weight:.1%}" for weight, token in pairs[:most])


def highlighted(answer: Answer) -> Text:
    """The document for the terminal, on backgrounds from none to orange."""
    from rich.text import Text

    text = Text()
    for token, shade in zip(answer.tokens, shades(answer), strict=True):
        style = ""
        if shade >= 0.05:
            red, green, blue = (round(255 - shade * (255 - full)) for full in (255, 150, 0))
            style = f"black on rgb({red},{green},{blue})"
        text.append(token, style)
        text.append(" ")
    return text
