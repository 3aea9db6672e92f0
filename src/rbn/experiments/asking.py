"""Asking a trained reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rbn.data.articles.anonymous import anonymous, question_tokens
from rbn.data.cnn import MalformedQuestion, Vocabulary
from rbn.data.cnn.question import ENTITY
from rbn.data.cnn.question import read as read_question
from rbn.data.cnn.sentences import select
from rbn.data.cnn.shards import renumbering
from rbn.experiments.measured import has_statistics
from rbn.experiments.reading import VOCABULARY, ReadingTask, make_reader
from rbn.experiments.runs import opened
from rbn.experiments.trained import is_final, open_task, weights_of
from rbn.training import checkpoint
from rbn.training.atomic_files import read_checked

_OTHER = "an entity not in the texts"
_COMMON = 5000  # the most frequent words are no names at the beginning of a sentence


@dataclass(frozen=True)
class Answer:
    """What a reader says.

    Attributes:
        tokens: of the document as it was read, names in the place of entities.
        attention: the weight of each, from 0 to 1; they sum to 1.
        question: its tokens.
        candidates: answers and their probabilities, the best first.
        right: the answer, where it is known.
    """

    tokens: tuple[str, ...]
    attention: tuple[float, ...]
    question: tuple[str, ...]
    candidates: tuple[tuple[str, float], ...]
    right: str | None = None


def ask(
    run: Path, document: Path, question: str | None, most: int = 5, root: Path | None = None
) -> Answer:
    """The answer of a run's best model to a question about a document.

    Args:
        run: folder of a run on a reading task.
        document: a text file, or a ``.question`` file.
        question: with one ``@placeholder``; None takes that of a ``.question`` file.
        most: candidates to give.
        root: where the data are, which a run that is not finished needs for its statistics;
            ``RBN_DATA`` by default.
    """
    config, _ = opened(run)
    if not config.is_reading:
        raise ValueError(f"{run} is a run of {config.task}, which has no questions")
    vocabulary = read_vocabulary(run)
    text, asked, surface, right = _texts(document, question, vocabulary)
    sentences = config.data.get("sentences")
    if sentences is not None:
        text = select(text, asked, sentences)
    text = text[: config.data.get("longest")]
    # What entities are called does not matter; the first symbols are those the model knows best.
    new = renumbering((*text, *asked))
    if len(new) > vocabulary.entities:
        raise ValueError(
            f"the texts have {len(new)} entities, and the model knows {vocabulary.entities}"
        )
    names = {new[old]: surface.get(old, old) for old in new}

    def encoded(tokens: tuple[str, ...]) -> torch.Tensor:
        return torch.tensor(vocabulary.encode(new.get(token, token) for token in tokens))[:, None]

    model = make_reader(config, vocabulary)
    weights, _ = weights_of(run)
    checkpoint.fill(model, weights)
    if has_statistics(model) and not is_final(run):
        # The statistics kept with the best model so far lag behind it.
        _, task = open_task(run, torch.device("cpu"), root)
        assert isinstance(task, ReadingTask)
        task.estimate_population(config.population_batch)
        model.load_state_dict(task.reader.state_dict())
    model.eval()
    with torch.no_grad():
        logits, attention = model(encoded(text), encoded(asked))
    chances, classes = logits[0].softmax(dim=0).sort(descending=True)
    symbols = vocabulary.decode(model.symbols(classes).tolist())
    return Answer(
        tokens=tuple(surface.get(token, token) for token in text),
        attention=tuple(attention[:, 0].tolist()),
        question=tuple(surface.get(token, token) for token in asked),
        candidates=_candidates(symbols, chances.tolist(), names, most),
        right=None if right is None else surface.get(right, right),
    )


def _candidates(
    symbols: Sequence[str], chances: Sequence[float], names: Mapping[str, str], most: int
) -> tuple[tuple[str, float], ...]:
    """The most probable answers by name.

    Symbols of entities that are not in the texts stand for nothing there: they are one candidate.
    """
    found: dict[str, float] = {}
    for symbol, chance in zip(symbols, chances, strict=True):
        other = symbol not in names and ENTITY.fullmatch(symbol) is not None
        name = _OTHER if other else names.get(symbol, symbol)
        found[name] = found.get(name, 0.0) + chance
    best = sorted(found.items(), key=lambda item: -item[1])
    return tuple(best[:most])


def read_vocabulary(run: Path) -> Vocabulary:
    """The symbols of a run's model."""
    path = run / VOCABULARY
    try:
        found = read_checked(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no {VOCABULARY} in {run}") from error
    try:
        return Vocabulary(int(found["entities"]), tuple(map(str, found["words"])))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a vocabulary: {error}") from error


def _texts(
    document: Path, question: str | None, vocabulary: Vocabulary
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str], str | None]:
    """Document and question in tokens, what entities stand for, and the answer if it is known."""
    if document.suffix == ".question":
        found = read_question(document)
        if question is None:
            return found.document, found.question, found.entities, found.answer
        other = replace(found, question=question_tokens(question))
        return other.document, other.question, other.entities, None
    if question is None:
        raise ValueError("a question is needed: --question '... @placeholder ...'")
    try:
        content = document.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{document} is not UTF-8 text") from error
    text, asked, surface = anonymous(content, question, vocabulary.words[:_COMMON])
    if not text:
        raise MalformedQuestion(f"{document} is empty")
    return text, asked, surface, None
