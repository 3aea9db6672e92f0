"""A reader's attention over a document, as an HTML page and for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rbn.experiments.html_templates import render
from rbn.experiments.question_answering import Answer

if TYPE_CHECKING:
    from rich.text import Text


def shades(answer: Answer) -> tuple[float, ...]:
    """The attention of each token relative to the largest, from 0 to 1."""
    largest = max(answer.attention)
    return tuple(weight / largest if largest > 0 else 0.0 for weight in answer.attention)


def page(answer: Answer) -> str:
    """The HTML page."""
    return render(
        "attention.html",
        title=answer.candidates[0][0],
        question=" ".join(answer.question),
        right=answer.right,
        candidates=answer.candidates,
        largest=max(answer.attention),
        words=list(zip(answer.tokens, answer.attention, shades(answer), strict=True)),
    )


def looked_at(answer: Answer, limit: int = 5) -> str:
    """The words with the most attention, in one line, for terminals without colours."""
    pairs = sorted(zip(answer.attention, answer.tokens, strict=True), key=lambda pair: -pair[0])
    return "looked at: " + ", ".join(f"{token} {weight:.1%}" for weight, token in pairs[:limit])


def highlighted(answer: Answer) -> Text:
    """The document for the terminal: the more attention, the more orange the background."""
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
