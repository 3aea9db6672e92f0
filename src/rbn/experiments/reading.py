"""The reading tasks: answering questions about a document."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rbn.data.cloze import cloze
from rbn.data.cnn import Batch, QuestionBatches, Reading, Vocabulary, load_questions
from rbn.data.cnn.batches import check_options
from rbn.experiments.config import Config
from rbn.experiments.measured import Measured, Measurement
from rbn.experiments.tasks import right_and_nats
from rbn.models import AttentiveReader
from rbn.training import Ranks
from rbn.training.atomic_files import write_checked

VOCABULARY = "vocabulary.json"
_BATCHING = ("rename", "padding", "longest")


class ReadingTask(Measured):
    """Questions about documents; measured by the error rate, from 0 to 1, as in Figure 4.

    Args:
        model: the reader.
        reading: the data, on the model's device.
        batch_size: of training and of evaluation.
        seed: of the draws and of the entities' names.
        options: of `QuestionBatches`.
    """

    higher_is_better = False
    row_dims = (1, 1, 0, 0, 0)

    def __init__(
        self, model: AttentiveReader, reading: Reading, batch_size: int, seed: int, **options: Any
    ) -> None:
        self.model: nn.Module = model
        self.reader = model
        self.reading, self.batch_size = reading, batch_size
        self.parts = {
            part: QuestionBatches(passages, reading.vocabulary, batch_size, seed=seed, **options)
            for part, passages in reading.parts.items()
        }
        self.batches = self.parts["train"]

    @property
    def batches_per_epoch(self) -> int:
        """Minibatches that show as many questions as there are to train on."""
        return self.batches.batches_per_epoch

    @property
    def items_per_step(self) -> int:
        """Questions of a minibatch."""
        return self.batches.batch_size

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Texts, lengths and answers of minibatch number `step`, as in `Batch`.

        Its padded lengths are one of `self.batches.shapes`.
        """
        found = self.batches.batch(step)
        return (*found.texts, found.answers)

    def loss(
        self,
        document: Tensor,
        question: Tensor,
        document_lengths: Tensor,
        question_lengths: Tensor,
        answers: Tensor,
    ) -> Tensor:
        """Cross-entropy, in nats."""
        logits, _ = self.model(document, question, document_lengths, question_lengths)
        return F.cross_entropy(logits.float(), self.reader.classes(answers))

    def measure(self, part: str) -> Measurement:
        """The part of the questions, from 0 to 1, that is answered wrongly; the cross-entropy."""
        batches = self.parts[part]
        sums = torch.zeros(2, dtype=torch.float64, device=batches.passages.answers.device)
        ranks = Ranks.here()
        for batch in ranks.share(batches.in_order()):
            logits, _ = self.model(*batch.texts)
            sums += right_and_nats(logits, self.reader.classes(batch.answers))
        right, nats = ranks.total(*sums.tolist())
        count = len(batches.passages)
        return Measurement(1 - right / count, nats / count)

    def population_batches(self, batch_size: int) -> Iterator[Batch]:
        """The training questions once, for exact population statistics.

        Batches of all lengths are mixed, so that the first few stand for all.
        """
        return self.batches.in_order(batch_size, mixed=True)

    def save_vocabulary(self, folder: Path) -> None:
        """Write the symbols into a run's folder: the model can be asked without the data then."""
        vocabulary = self.reading.vocabulary
        content = {"entities": vocabulary.entities, "words": vocabulary.words}
        write_checked(folder / VOCABULARY, content)

    @staticmethod
    def forward(model: nn.Module, batch: Batch) -> object:
        """Run the model on a batch, for `rbn.update_population_stats`."""
        return model(*batch.texts)


def load_reading(config: Config, root: Path | None = None) -> Reading:
    """The questions of a config."""
    check_options(**{k: v for k, v in config.data.items() if k in _BATCHING})
    options = {k: v for k, v in config.data.items() if k not in _BATCHING}
    if config.task == "cloze":
        return cloze(**options)
    report = Reporter()
    reading, facts = load_questions(config.task, root=root, progress=report, **options)
    report.close()
    for part, found in facts["parts"].items():
        if found["malformed"] and Ranks.here().first:
            some = "; ".join(found["malformed"][:3])
            print(
                f"{len(found['malformed'])} {part} files are no questions and were skipped: {some}",
                file=sys.stderr,
            )
    return reading


def make_reader(
    config: Config, vocabulary: Vocabulary, longest: tuple[int, int] | None = None
) -> AttentiveReader:
    """The model of a config.

    Args:
        config: what to make.
        vocabulary: says which symbols there are.
        longest: steps of the longest padded document and question, for population statistics; None
            takes as many as a checkpoint has.
    """
    return AttentiveReader(
        len(vocabulary),
        vocabulary.entities,
        vocabulary.first_entity,
        config.hidden_size,
        config.model,
        max_document=longest and longest[0],
        max_question=longest and longest[1],
        **config.layer,
        **config.normalization,
    )


def build_reading(config: Config, reading: Reading, seed: int, device: torch.device) -> ReadingTask:
    """The task of a run on questions that lie on the device."""
    batching = {k: v for k, v in config.data.items() if k in _BATCHING}
    plan = QuestionBatches(reading.train, reading.vocabulary, config.batch_size, **batching)
    longest = plan.document_shapes[-1], plan.question_shapes[-1]
    model = make_reader(config, reading.vocabulary, longest)
    return ReadingTask(model.to(device), reading, config.batch_size, seed, **batching)


class Reporter:
    """Tells on standard error how far preprocessing is, in tenths where that is no terminal."""

    def __init__(self) -> None:
        self.shown = -1

    def __call__(self, done: int, total: int) -> None:
        """Say that so many files of all are read."""
        tenth = 10 * done // total
        if not sys.stderr.isatty() and tenth == self.shown:
            return
        self.shown = tenth
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"read {done:,} of {total:,} question files", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self.shown >= 0 and sys.stderr.isatty():
            print(file=sys.stderr)
