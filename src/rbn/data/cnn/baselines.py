"""Baselines that answer by counting, without reading."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rbn.data.cnn.passages import Passages, gather
from rbn.data.cnn.shuffle import occurring
from rbn.data.cnn.vocabulary import Vocabulary

_CHUNK = 256


def baselines(passages: Passages, vocabulary: Vocabulary) -> dict[str, float]:
    """Accuracies, from 0 to 1, of answers by counting. Ties go to the entity mentioned first.

    Returns:
        ``frequent``: the entity that the document mentions most often; ``frequent_unasked``: the
        same, among entities that are not in the question; ``ceiling``: the share of questions whose
        answer is in the document at all.
    """
    right = dict.fromkeys(("frequent", "frequent_unasked", "ceiling"), 0)
    for document, question, answers in _chunks(passages):
        counts, first = _mentions(document, vocabulary)
        asked = occurring((question,), vocabulary.first_entity, vocabulary.entities)
        answer = (answers - vocabulary.first_entity)[:, None]
        right["ceiling"] += int((counts.gather(1, answer) > 0).sum())
        for name, open_ in (("frequent", counts > 0), ("frequent_unasked", (counts > 0) & ~asked)):
            # More mentions first, then the earlier mention; -1 if no entity is left.
            score = torch.where(open_, counts * (len(document) + 1) - first, -1)
            best, at = score.max(dim=1)
            right[name] += int(((at == answer[:, 0]) & (best >= 0)).sum())
    return {name: count / len(passages) for name, count in right.items()}


def _chunks(passages: Passages) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Documents ``[T, B]``, questions ``[S, B]`` and answers ``[B]``, of similar length."""
    lengths, asked = passages.document_lengths, passages.question_lengths
    for rows in lengths.argsort(stable=True).split(_CHUNK):
        document, _ = gather(
            passages.documents, passages.document_offsets, rows, int(lengths[rows].max())
        )
        question, _ = gather(
            passages.questions, passages.question_offsets, rows, int(asked[rows].max())
        )
        yield document, question, passages.answers[rows].long()


def _mentions(document: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """How often and where first each entity is mentioned: int64 ``[B, E]`` each."""
    count = vocabulary.entities
    number = document - vocabulary.first_entity
    number = torch.where((number >= 0) & (number < count), number, count).t()  # [B, T]
    shape = (number.shape[0], count + 1)
    ones = torch.ones_like(number)
    counts = torch.zeros(shape, dtype=torch.int64).scatter_add_(1, number, ones)
    places = torch.arange(number.shape[1]).expand_as(number)
    first = torch.full(shape, number.shape[1]).scatter_reduce_(1, number, places, "amin")
    return counts[:, :count], first[:, :count]
