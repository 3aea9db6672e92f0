"""Makes the questions of one article."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rbn.data.articles import forms, names
from rbn.data.articles.forms import Form, Mention
from rbn.data.articles.names import Name, Usage
from rbn.data.articles.tokens import Sentence, sentences
from rbn.data.cnn.question import PLACEHOLDER, Question

_LEAST, _MOST = 5, 60  # words of a question, including the gap


@dataclass(frozen=True)
class Article:
    """A news article.

    Attributes:
        url: its address, or any other name.
        part: ``training``, ``validation``, ``test`` or ``test-cnn``.
        text: its text.
        highlights: the sentences that summarise it.
    """

    url: str
    part: str
    text: str
    highlights: tuple[str, ...]


@dataclass(frozen=True)
class _Marked:
    """A sentence with its names."""

    sentence: Sentence
    names: tuple[Name, ...]


def make(article: Article, usage: Usage, dropped: Counter[str]) -> list[Question]:
    """One question for each highlight and each of its entities that is also in the document.

    Args:
        article: the article to ask about.
        usage: how words are written in all articles.
        dropped: counts, by reason, of what does not become a question.
    """
    if not article.highlights:
        dropped["article without highlights"] += 1
        return []
    (document, *texts), entities = anonymised(article.text, article.highlights, usage)
    if not document:
        dropped["article without text"] += 1
        return []
    inside = set(document)
    questions: dict[tuple[tuple[str, ...], str], Question] = {}
    for text in texts:
        for question, answer in _gaps(text, inside, dropped):
            key = (question, answer)
            if key in questions:
                dropped["the same question twice"] += 1
            else:
                questions[key] = Question(article.url, document, question, answer, entities)
    return list(questions.values())


def anonymised(
    text: str, others: Sequence[str], usage: Usage
) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Tokenise and anonymise a document, and other texts about it.

    Args:
        text: text of the document.
        others: sentences about it.
        usage: how words are written elsewhere.

    Returns:
        The tokens of the document and then of each other text, with names as ``@entityN`` in order
        of appearance; and the name behind each symbol.
    """
    body = _marked(sentences(text), usage)
    known = frozenset(
        " ".join(m.sentence.tokens[n.begin : min(n.end, n.begin + 2)]).lower()
        for m in body
        for n in m.names
    )
    marked = [
        _marked([m.sentence for m in body], usage, known),
        *(_marked(sentences(other), usage, known) for other in others),
    ]
    mentions = _mentions([m for one in marked for m in one])
    root = forms.merged(mentions)
    numbers: dict[Form, str] = {}
    texts = [tuple(t for m in one for t in _anonymous(m, root, numbers)) for one in marked]
    return texts, {symbol: mentions[form].surface for form, symbol in numbers.items()}


def _gaps(
    text: tuple[str, ...], inside: set[str], dropped: Counter[str]
) -> list[tuple[tuple[str, ...], str]]:
    """A highlight with each of its entities left out in turn, and that entity."""
    if text and text[-1] == ".":
        text = text[:-1]
    words = sum(token[0].isalnum() or token[0] == "@" for token in text)
    if words < _LEAST or words > _MOST:
        few = words < _LEAST
        reason = f"fewer than {_LEAST}" if few else f"more than {_MOST}"
        dropped[f"highlight of {reason} words"] += 1
        return []
    entities = list(dict.fromkeys(token for token in text if token.startswith("@entity")))
    if not entities:
        dropped["highlight without an entity"] += 1
    gaps = []
    for entity in entities:
        if entity not in inside:
            dropped["entity that is not in the document"] += 1
        elif text.count(entity) > 1:
            dropped["entity that is twice in the highlight"] += 1
        else:
            gaps.append((tuple(PLACEHOLDER if t == entity else t for t in text), entity))
    return gaps


def _marked(
    sentences: Sequence[Sentence], usage: Usage, known: frozenset[str] = frozenset()
) -> list[_Marked]:
    return [_Marked(s, tuple(names.find_names(s, usage, known))) for s in sentences]


def _mentions(marked: Sequence[_Marked]) -> dict[Form, Mention]:
    """Every form of every name, in the order of their first mention."""
    mentions: dict[Form, Mention] = {}
    for m in marked:
        tokens = m.sentence.tokens
        for name in m.names:
            written = tokens[name.begin : name.end]
            key = forms.form(written)
            mention = mentions.setdefault(key, Mention(" ".join(written), len(mentions)))
            mention.count += 1
            mention.capitals = mention.capitals or "".join(written).replace(".", "").isupper()
            if name.begin > 0 and forms.is_place(tokens[name.begin - 1]):
                mention.place = True
    return mentions


def _anonymous(m: _Marked, root: dict[Form, Form], numbers: dict[Form, str]) -> list[str]:
    """The tokens of a sentence in lower case, with names as ``@entityN`` in order of appearance."""
    tokens, at = [], 0
    for name in m.names:
        tokens += [token.lower() for token in m.sentence.tokens[at : name.begin]]
        key = root[forms.form(m.sentence.tokens[name.begin : name.end])]
        tokens.append(numbers.setdefault(key, f"@entity{len(numbers)}"))
        at = name.end
    return tokens + [token.lower() for token in m.sentence.tokens[at:]]
