"""Answering questions about a document."""

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
from rbn.experiments.base_task import BaseTask, Measurement
from rbn.experiments.config import Config, check_names
from rbn.experiments.task_kinds import QUESTIONS
from rbn.experiments.tasks import correct_and_nats
from rbn.models import AttentiveReader
from rbn.training import Ranks
from rbn.training.atomic_files import write_checked

VOCABULARY = "vocabulary.json"
_BATCHING = ("rename", "padding", "longest")


class ReadingTask(BaseTask):
    """Questions about documents; the metric is the error rate, from 0 to 1, as in Figure 4.

    Ignores `population_batch` in evaluations, which need many batches to cover all lengths.

    Args:
        model: the reader.
        reading: the data, on the model's device.
        batch_size: batch size in training and evaluation.
        seed: random seed of the order of the questions and of the entities' names.
        options: options of `QuestionBatches`.
    """

    kind = QUESTIONS
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

    @staticmethod
    def load_data(config: Config, root: Path | None = None) -> Reading:
        """The questions of a config."""
        check_names(
            "data", config.data, check_options, cloze if config.task == "cloze" else load_questions
        )
        check_options(**{k: v for k, v in config.data.items() if k in _BATCHING})
        options = {k: v for k, v in config.data.items() if k not in _BATCHING}
        if config.task == "cloze":
            return cloze(**options)
        progress = PreprocessingProgress()
        reading, summary = load_questions(config.task, root=root, progress=progress, **options)
        progress.close()
        for part, counts in summary["parts"].items():
            if counts["malformed"] and Ranks.here().first:
                examples = "; ".join(counts["malformed"][:3])
                print(
                    f"skipped {len(counts['malformed'])} malformed {part} files: {examples}",
                    file=sys.stderr,
                )
        return reading

    @classmethod
    def from_config(
        cls, config: Config, data: Reading, seed: int, device: torch.device
    ) -> ReadingTask:
        """The task of a run on questions that are on the device."""
        batching = {k: v for k, v in config.data.items() if k in _BATCHING}
        batches = QuestionBatches(data.train, data.vocabulary, config.batch_size, **batching)
        longest = batches.document_shapes[-1], batches.question_shapes[-1]
        model = make_reader(config, data.vocabulary, longest)
        return cls(model.to(device), data, config.batch_size, seed, **batching)

    @staticmethod
    def check_model(config: Config) -> nn.Module:
        """Build the reader, which rejects invalid options."""
        return make_reader(config, Vocabulary(1, ()), (1, 1))

    @property
    def batches_per_epoch(self) -> int:
        """Number of minibatches with as many questions as the training set."""
        return self.batches.batches_per_epoch

    @property
    def items_per_step(self) -> int:
        """Questions per minibatch."""
        return self.batches.batch_size

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Texts, lengths and answers of minibatch number `step`, as in `Batch`.

        Its padded lengths are one of `self.batches.shapes`.
        """
        batch = self.batches.batch(step)
        return (*batch.texts, batch.answers)

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

    @property
    def split_names(self) -> tuple[str, ...]:
        """The splits that can be evaluated. Some sets have a second test set, ``test-cnn``."""
        return tuple(self.parts)

    def measure(self, split: str) -> Measurement:
        """The error rate, from 0 to 1, and the cross-entropy."""
        batches = self.parts[split]
        sums = torch.zeros(2, dtype=torch.float64, device=batches.passages.answers.device)
        ranks = Ranks.here()
        for batch in ranks.share(batches.in_order()):
            logits, _ = self.model(*batch.texts)
            sums += correct_and_nats(logits, self.reader.classes(batch.answers))
        correct, nats = ranks.total(*sums.tolist())
        count = len(batches.passages)
        return Measurement(1 - correct / count, nats / count)

    def population_batches(self, batch_size: int) -> Iterator[Batch]:
        """One pass over the training questions, for exact population statistics.

        Mixes batches of all lengths, so that the first few are representative.
        """
        return self.batches.in_order(batch_size, mixed=True)

    def final_metrics(self) -> dict[str, float]:
        """Adds the metrics of the second test set, if there is one."""
        metrics = super().final_metrics()
        if "test-cnn" in self.parts:
            metrics["test_cnn"] = self.measure_with("test-cnn", "population")
            metrics["test_cnn_batch"] = self.measure_with("test-cnn", "batch")
        return metrics

    def write_files(self, folder: Path) -> None:
        """Write the vocabulary, so that the model can answer questions without the data."""
        vocabulary = self.reading.vocabulary
        content = {"entities": vocabulary.entities, "words": vocabulary.words}
        write_checked(folder / VOCABULARY, content)

    @staticmethod
    def forward(model: nn.Module, batch: Batch) -> object:
        """Run the model on a batch of `population_batches`."""
        return model(*batch.texts)


def make_reader(
    config: Config, vocabulary: Vocabulary, longest: tuple[int, int] | None = None
) -> AttentiveReader:
    """The reader of a config.

    Args:
        config: the run's config.
        vocabulary: vocabulary of the run's data.
        longest: padded lengths of the longest document and question, for population statistics;
            None takes them from the checkpoint that is loaded.
    """
    for place, options in (("layer", config.layer), ("normalization", config.normalization)):
        check_names(place, options, AttentiveReader)
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


class PreprocessingProgress:
    """Preprocessing progress on standard error; without a terminal, one line per tenth."""

    def __init__(self) -> None:
        self.shown = -1

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` files are read."""
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
