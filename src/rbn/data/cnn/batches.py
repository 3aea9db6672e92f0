"""Batches of questions in a few shapes, gathered on the device of the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rbn.data.cnn import shuffle as names
from rbn.data.cnn.passages import Passages, gather
from rbn.data.cnn.shapes import padded_lengths
from rbn.data.cnn.vocabulary import Vocabulary
from rbn.data.epochs import epoch_generator
from rbn.nn import checks

_BLOCK = 1000  # batches drawn at a time


@dataclass(frozen=True)
class Batch:
    """B questions with their documents.

    Attributes:
        document: symbols, int64 ``[T, B]``, 0 where padded.
        question: symbols, int64 ``[S, B]``, 0 where padded.
        document_lengths: int64 ``[B]``.
        question_lengths: int64 ``[B]``.
        answers: symbols, int64 ``[B]``.
    """

    document: Tensor
    question: Tensor
    document_lengths: Tensor
    question_lengths: Tensor
    answers: Tensor

    @property
    def texts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The reader's inputs: everything except the answers."""
        return self.document, self.question, self.document_lengths, self.question_lengths


def check_options(
    *, rename: str | None = "text", padding: float = 0.12, longest: int | None = None
) -> None:
    """Check options of `QuestionBatches`, before any data exist.

    Raises:
        TypeError, ValueError: names the invalid option.
    """
    if rename is not None and rename not in names.KINDS:
        raise ValueError(f"rename must be one of {', '.join(names.KINDS)}, got {rename!r}")
    checks.probability("padding", padding)
    if longest is not None:
        checks.positive_integer("longest", longest)


class QuestionBatches:
    """Random batches for training, and all questions in order for evaluation.

    Documents and questions are padded to a few lengths, chosen from the data such that documents
    have less padding than `padding`, and both together little more. Each training batch is from one
    bucket, i.e. one pair of padded lengths. A bucket is drawn with a probability proportional to
    its number of examples, and the examples with replacement, so that all examples are equally
    likely. A batch depends only on the seed and its number `step`.

    Args:
        passages: the data. Batches are on their device.
        vocabulary: tells which symbols are entities.
        batch_size: number of questions in a batch.
        seed: random seed of draws and of the entities' new names.
        rename: how to rename entities in every training example: ``"text"`` permutes the names in
            the text, as in the paper, ``"all"`` draws from all names, None keeps them.
        padding: largest share of padding in documents, from 0 to 1.
        longest: truncate documents to this many symbols; None does not.
    """

    def __init__(
        self,
        passages: Passages,
        vocabulary: Vocabulary,
        batch_size: int,
        *,
        seed: int = 0,
        rename: str | None = "text",
        padding: float = 0.12,
        longest: int | None = None,
    ) -> None:
        checks.positive_integer("batch_size", batch_size)
        check_options(rename=rename, padding=padding, longest=longest)
        if len(passages) == 0:
            raise ValueError("there are no questions")
        self.passages, self.vocabulary, self.batch_size = passages, vocabulary, batch_size
        self.seed, self.rename = seed, rename
        documents, questions = passages.document_lengths.cpu(), passages.question_lengths.cpu()
        self.documents = documents if longest is None else documents.clamp(max=longest)
        self.questions = questions
        self.document_shapes = padded_lengths(self.documents, padding)
        self.question_shapes = self._question_shapes(padding)
        self.shapes, self._buckets = self._make_buckets()
        self._shares = torch.tensor([len(rows) for rows in self._buckets], dtype=torch.double)
        self._block = -1
        self._which: list[int] = []
        self._rows = torch.empty(0)
        self._generator = torch.Generator(device=passages.answers.device)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches with as many examples as the training set."""
        return max(1, len(self.passages) // self.batch_size)

    @property
    def padding_share(self) -> float:
        """The share of padding among all training positions, from 0 to 1."""
        padded = sum(
            len(rows) * sum(shape) for rows, shape in zip(self._buckets, self.shapes, strict=True)
        )
        return 1 - (int(self.documents.sum()) + int(self.questions.sum())) / padded

    def batch(self, step: int) -> Batch:
        """Training batch number `step`, counted from 0, with renamed entities."""
        block, k = divmod(step, _BLOCK)
        if block != self._block:
            self._draw(block)
        batch = self.gather(self._rows[k], *self.shapes[self._which[k]])
        if self.rename is None:
            return batch
        self._generator.manual_seed(
            int(torch.randint(2**62, (), generator=epoch_generator(self.seed, step)))
        )
        first, count = self.vocabulary.first_entity, self.vocabulary.entities
        texts = (batch.document, batch.question, batch.answers[None])
        present = names.occurring(texts, first, count)
        table = names.entity_table(present, self._generator, self.rename)
        document, question, answers = (names.renamed(text, table, first) for text in texts)
        return Batch(document, question, batch.document_lengths, batch.question_lengths, answers[0])

    def in_order(self, batch_size: int | None = None, mixed: bool = False) -> Iterator[Batch]:
        """Yield all questions once, in batches of similar length.

        Batches are sorted by document length or, with `mixed`, in one random order. Their sizes are
        as equal as possible and at most `batch_size`. They are padded to the same few lengths.
        """
        order = self.documents.argsort(stable=True)
        parts = math.ceil(len(order) / (batch_size or self.batch_size))
        pieces = order.tensor_split(parts)
        turns = list(range(len(pieces)))
        if mixed:
            turns = torch.randperm(len(turns), generator=epoch_generator(self.seed, 0)).tolist()
        for turn in turns:
            rows = pieces[turn]
            shape = (
                smallest(self.document_shapes, int(self.documents[rows].max())),
                smallest(self.question_shapes, int(self.questions[rows].max())),
            )
            yield self.gather(rows.to(self.passages.answers.device), *shape)

    def gather(self, rows: Tensor, document_length: int, question_length: int) -> Batch:
        """Examples `rows`, padded to the given lengths, without renaming entities."""
        data = self.passages
        document, document_lengths = gather(
            data.documents, data.document_offsets, rows, document_length
        )
        question, question_lengths = gather(
            data.questions, data.question_offsets, rows, question_length
        )
        return Batch(
            document, question, document_lengths, question_lengths, data.answers[rows].long()
        )

    def _question_shapes(self, padding: float) -> tuple[int, ...]:
        """The fewest padded question lengths that keep the padding of all positions low."""
        documents = torch.tensor(self.document_shapes)
        padded = int(documents[torch.searchsorted(documents, self.documents)].sum())
        real = int(self.documents.sum()) + int(self.questions.sum())
        for limit in (0.3, 0.2, padding):
            shapes = padded_lengths(self.questions, limit)
            lengths = torch.tensor(shapes)
            total = padded + int(lengths[torch.searchsorted(lengths, self.questions)].sum())
            if 1 - real / total < padding + 0.01:
                break
        return shapes

    def _make_buckets(self) -> tuple[list[tuple[int, int]], list[Tensor]]:
        """The pairs of padded lengths, and the examples of each.

        A pair with fewer than two batches of examples joins the next longer question length, and
        after the longest the next longer document length: batches drawn from few examples would
        often repeat them.
        """
        document_bucket = torch.searchsorted(torch.tensor(self.document_shapes), self.documents)
        question_bucket = torch.searchsorted(torch.tensor(self.question_shapes), self.questions)
        shapes, buckets = [], []
        longest = torch.empty(0, dtype=torch.int64)  # moves on to the next document length
        for d, document_length in enumerate(self.document_shapes):
            waiting = torch.empty(0, dtype=torch.int64)
            for q, question_length in enumerate(self.question_shapes):
                rows = ((document_bucket == d) & (question_bucket == q)).nonzero()[:, 0]
                waiting = torch.cat([waiting, rows])
                if q == len(self.question_shapes) - 1:
                    waiting = torch.cat([longest, waiting])
                    longest = waiting[:0]
                if len(waiting) >= 2 * self.batch_size:
                    shapes.append((document_length, question_length))
                    buckets.append(waiting)
                    waiting = waiting[:0]
            longest = waiting
        if len(longest) > 0:
            shapes.append((self.document_shapes[-1], self.question_shapes[-1]))
            buckets.append(longest)
        return shapes, buckets

    def _draw(self, block: int) -> None:
        """Draw buckets and examples of `_BLOCK` batches, and move them to the device together."""
        generator = epoch_generator(self.seed, -1 - block)  # steps use the numbers from 0 on
        which = torch.multinomial(self._shares, _BLOCK, replacement=True, generator=generator)
        draws = torch.rand(_BLOCK, self.batch_size, generator=generator, dtype=torch.double)
        rows = torch.empty(_BLOCK, self.batch_size, dtype=torch.int64)
        for number, bucket in enumerate(self._buckets):
            mine = which == number
            rows[mine] = bucket[(draws[mine] * len(bucket)).long()]
        self._which = which.tolist()
        self._rows = rows.to(self.passages.answers.device)
        self._block = block


def smallest(shapes: tuple[int, ...], length: int) -> int:
    """The smallest of the padded lengths that fits a length, or the length itself if none does."""
    return next((shape for shape in shapes if shape >= length), length)
