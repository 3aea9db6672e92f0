"""The numbers of the paper's tables."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = {
    "lstm": "LSTM",
    "bi-lstm": "BiLSTM",
    "bn-lstm": "BN-LSTM",
    "ln-lstm": "LN-LSTM",
    "bn-gru": "BN-GRU",
    "bn-rnn": "BN-RNN",
    "rnn": "RNN",
    "irnn": "iRNN",
    "bn-everywhere": "BN-everywhere",
    "bn-e*": "BN-e*",
    "bn-e**": "BN-e**",
}


@dataclass(frozen=True)
class Entry:
    """One cell of a table of the paper.

    Attributes:
        task: a key of `rbn.experiments.paper.paper_tasks.paper_tasks()`.
        model: the recurrent layer or reader.
        field: key of a published result, ``valid`` or ``test``.
        paper: the number in the paper.
    """

    task: str
    model: str
    field: str
    paper: float


@dataclass(frozen=True)
class Table:
    """One table of the paper, or numbers of its text.

    Attributes:
        name: such as ``table2``.
        title: what is measured.
        unit: the unit of its numbers.
        percent: whether results are fractions and the table's numbers percentages.
        digits: decimals.
        entries: the paper's numbers.
    """

    name: str
    title: str
    unit: str
    percent: bool
    digits: int
    entries: tuple[Entry, ...]

    def shown(self, value: float) -> float:
        """A published result in the table's unit."""
        return 100 * value if self.percent else value


def _error_rates(task: str, field: str, *pairs: tuple[str, float]) -> tuple[Entry, ...]:
    return tuple(Entry(task, model, field, paper) for model, paper in pairs)


TABLES = {
    table.name: table
    for table in (
        Table(
            "table1",
            "Pixel by pixel MNIST, test set",
            "accuracy, %",
            True,
            1,
            (
                Entry("mnist", "lstm", "test", 98.9),
                Entry("mnist", "bn-lstm", "test", 99.0),
                Entry("pmnist", "lstm", "test", 90.2),
                Entry("pmnist", "bn-lstm", "test", 95.4),
            ),
        ),
        Table(
            "table2",
            "Penn Treebank, whole test sequence",
            "bits per character",
            False,
            3,
            (Entry("ptb", "lstm", "test", 1.38), Entry("ptb", "bn-lstm", "test", 1.32)),
        ),
        Table(
            "table3",
            "text8, whole test sequence",
            "bits per character",
            False,
            3,
            (Entry("text8", "lstm", "test", 1.43), Entry("text8", "bn-lstm", "test", 1.36)),
        ),
        Table(
            "table4",
            "questions on whole documents",
            "error rate, %",
            True,
            1,
            (
                *_error_rates("cnn-full", "valid", ("lstm", 45.5), ("bn-e**", 37.9)),
                *_error_rates("cnn-full", "test", ("lstm", 45.0), ("bn-e**", 36.3)),
            ),
        ),
        Table(
            "fig4a",
            "questions on four sentences, lowest validation error (section 5.4)",
            "error rate, %",
            True,
            1,
            _error_rates(
                "cnn",
                "valid",
                ("lstm", 50.3),
                ("bn-lstm", 49.5),
                ("bn-everywhere", 50.0),
                ("bn-e*", 47.1),
                ("bn-e**", 43.9),
            ),
        ),
    )
}
