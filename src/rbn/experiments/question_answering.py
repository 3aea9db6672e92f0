"""Asks a trained reader a question about a document."""

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
from rbn.experiments.base_task import has_statistics
from rbn.experiments.reading import VOCABULARY, make_reader
from rbn.experiments.run_folder import read_config
from rbn.experiments.task_kinds import QUESTIONS
from rbn.experiments.trained_models import is_final, load_weights, open_task
from rbn.training import checkpoint
from rbn.training.atomic_files import read_checked

_OTHER = "an entity not in the texts"
_COMMON = 5000  # the most frequent words, which are not names when they start a sentence


@dataclass(frozen=True)
class Answer:
    """A reader's answer.

    Attributes:
        tokens: tokens of the document, with names in place of entities.
        attention: the weight of each token, from 0 to 1; they sum to 1.
        question: its tokens.
        candidates: answers and their probabilities, the best first.
        right: the correct answer, if it is known.
    """

    tokens: tuple[str, ...]
    attention: tuple[float, ...]
    question: tuple[str, ...]
    candidates: tuple[tuple[str, float], ...]
    right: str | None = None


def ask(
    run: Path, document: Path, question: str | None, limit: int = 5, root: Path | None = None
) -> Answer:
    """Ask a run's best model a question about a document.

    Args:
        run: folder of a run on a reading task.
        document: a text file, or a ``.question`` file.
        question: question with one ``@placeholder``; None uses that of the ``.question`` file.
        limit: largest number of candidates.
        root: the data folder, which an unfinished run needs for its statistics; ``RBN_DATA`` by
            default.
    """
    config, _ = read_config(run)
    if config.kind is not QUESTIONS:
        raise ValueError(f"{run} is a run on {config.task}, which has no questions")
    vocabulary = read_vocabulary(run)
    text, asked, surface, right = _texts(document, question, vocabulary)
    sentences = config.data.get("sentences")
    if sentences is not None:
        text = select(text, asked, sentences)
    text = text[: config.data.get("longest")]
    # The symbols of entities are arbitrary; the model has seen the first ones most often.
    new = renumbering((*text, *asked))
    if len(new) > vocabulary.entities:
        raise ValueError(
            f"the texts have {len(new)} entities, but the model knows only {vocabulary.entities}"
        )
    names = {new[old]: surface.get(old, old) for old in new}

    def encoded(tokens: tuple[str, ...]) -> torch.Tensor:
        return torch.tensor(vocabulary.encode(new.get(token, token) for token in tokens))[:, None]

    model = make_reader(config, vocabulary)
    weights, _ = load_weights(run)
    checkpoint.fill(model, weights)
    if has_statistics(model) and not is_final(run):
        # The statistics saved with the best model so far lag behind it.
        _, task = open_task(run, torch.device("cpu"), root)
        task.estimate_population(config.population_batch)
        model.load_state_dict(task.model.state_dict())
    model.eval()
    with torch.no_grad():
        logits, attention = model(encoded(text), encoded(asked))
    chances, classes = logits[0].softmax(dim=0).sort(descending=True)
    symbols = vocabulary.decode(model.symbols(classes).tolist())
    return Answer(
        tokens=tuple(surface.get(token, token) for token in text),
        attention=tuple(attention[:, 0].tolist()),
        question=tuple(surface.get(token, token) for token in asked),
        candidates=_candidates(symbols, chances.tolist(), names, limit),
        right=None if right is None else surface.get(right, right),
    )


def _candidates(
    symbols: Sequence[str], chances: Sequence[float], names: Mapping[str, str], limit: int
) -> tuple[tuple[str, float], ...]:
    """The most probable answers by name.

    Adds up the symbols of all entities that are not in the texts into one candidate.
    """
    probabilities: dict[str, float] = {}
    for symbol, chance in zip(symbols, chances, strict=True):
        other = symbol not in names and ENTITY.fullmatch(symbol) is not None
        name = _OTHER if other else names.get(symbol, symbol)
        probabilities[name] = probabilities.get(name, 0.0) + chance
    best = sorted(probabilities.items(), key=lambda item: -item[1])
    return tuple(best[:limit])


def read_vocabulary(run: Path) -> Vocabulary:
    """The symbols of a run's model."""
    path = run / VOCABULARY
    try:
        content = read_checked(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no {VOCABULARY} in {run}") from error
    try:
        return Vocabulary(int(content["entities"]), tuple(map(str, content["words"])))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a vocabulary: {error}") from error


def _texts(
    document: Path, question: str | None, vocabulary: Vocabulary
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str], str | None]:
    """The tokens of document and question, the names of entities, and the answer if known."""
    if document.suffix == ".question":
        example = read_question(document)
        if question is None:
            return example.document, example.question, example.entities, example.answer
        other = replace(example, question=question_tokens(question))
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
