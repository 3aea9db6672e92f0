"""Questions and their documents as integer tensors, concatenated without padding."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rbn.data.cnn.vocabulary import Vocabulary


@dataclass(frozen=True)
class Passages:
    """N questions, each with its document and answer.

    Attributes:
        documents: symbols of all documents, int32 ``[total]``.
        document_offsets: start of each document, and end of the last one, int64 ``[N + 1]``.
        questions: symbols of all questions, int32 ``[total]``.
        question_offsets: int64 ``[N + 1]``.
        answers: symbols, int32 ``[N]``.
    """

    documents: Tensor
    document_offsets: Tensor
    questions: Tensor
    question_offsets: Tensor
    answers: Tensor

    @classmethod
    def of(cls, examples: Iterable[tuple[Sequence[int], Sequence[int], int]]) -> Passages:
        """Build from (document, question, answer), all in numbers."""
        documents, questions, answers = array("i"), array("i"), array("i")
        document_offsets, question_offsets = array("q", [0]), array("q", [0])
        for document, question, answer in examples:
            documents.extend(document)
            questions.extend(question)
            answers.append(answer)
            document_offsets.append(len(documents))
            question_offsets.append(len(questions))
        return cls(
            *map(tensor, (documents, document_offsets, questions, question_offsets, answers))
        )

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def document_lengths(self) -> Tensor:
        """Symbols of each document, int64 ``[N]``."""
        return self.document_offsets.diff()

    @property
    def question_lengths(self) -> Tensor:
        """Symbols of each question, int64 ``[N]``."""
        return self.question_offsets.diff()

    def to(self, device: torch.device | str) -> Passages:
        """Copy to another device."""
        return Passages(*(getattr(self, f.name).to(device) for f in fields(self)))

    def example(self, k: int) -> tuple[list[int], list[int], int]:
        """Document, question and answer of one example, in numbers."""
        d, q = self.document_offsets[k : k + 2].tolist(), self.question_offsets[k : k + 2].tolist()
        return (
            self.documents[d[0] : d[1]].tolist(),
            self.questions[q[0] : q[1]].tolist(),
            int(self.answers[k]),
        )

    def first(self, count: int) -> Passages:
        """The first `count` examples, or all if there are fewer."""
        count = min(count, len(self))
        return Passages(
            self.documents[: int(self.document_offsets[count])],
            self.document_offsets[: count + 1],
            self.questions[: int(self.question_offsets[count])],
            self.question_offsets[: count + 1],
            self.answers[:count],
        )


@dataclass(frozen=True)
class Reading:
    """The three parts of a question set, and their vocabulary.

    Attributes:
        train: questions to train on.
        valid: questions to select the best model.
        test: questions to report.
        vocabulary: vocabulary of all parts.
        test_cnn: a second test set, from another newspaper than the other parts; None if the set
            has none.
    """

    train: Passages
    valid: Passages
    test: Passages
    vocabulary: Vocabulary
    test_cnn: Passages | None = None

    @property
    def parts(self) -> dict[str, Passages]:
        """The parts by their names in ``rbn evaluate --split``."""
        parts = {"train": self.train, "valid": self.valid, "test": self.test}
        return parts if self.test_cnn is None else {**parts, "test-cnn": self.test_cnn}

    def to(self, device: torch.device | str) -> Reading:
        """Copy all parts to another device."""
        train, valid, test, *second = (part.to(device) for part in self.parts.values())
        return Reading(train, valid, test, self.vocabulary, *second)


def tensor(values: array[int]) -> Tensor:
    """An array as a tensor, int32 or int64 like the array."""
    dtype = torch.int32 if values.itemsize == 4 else torch.int64
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)


def gather(flat: Tensor, offsets: Tensor, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Some of the sequences, padded with zeros: int64 ``[length, B]``, and their lengths ``[B]``.

    Truncates sequences longer than `length`. Copies no value to the host.
    """
    begin = offsets[rows]
    lengths = (offsets[rows + 1] - begin).clamp(max=length)
    steps = torch.arange(length, device=flat.device)[:, None]
    valid = steps < lengths
    index = torch.where(valid, begin + steps, 0)
    return torch.where(valid, flat[index], 0).long(), lengths
