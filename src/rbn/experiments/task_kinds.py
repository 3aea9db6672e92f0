"""What is known about a task before its data are loaded: its metric, units and models.

The classes that train and evaluate a task are in `tasks` and `reading`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LAYERS = ("lstm", "bn-lstm", "ln-lstm", "bn-gru", "bn-rnn", "rnn", "irnn")
READERS = ("lstm", "bi-lstm", "bn-lstm", "bn-everywhere", "bn-e*", "bn-e**")


@dataclass(frozen=True)
class TaskKind:
    """A kind of task.

    Attributes:
        metric: what is measured, such as ``"accuracy"``.
        higher_is_better: whether a higher value of the metric is better.
        items: what a minibatch consists of, such as ``"images"``.
        models: the models that can be trained.
        is_percentage: whether the metric is a fraction, shown in percent.
        other_settings: settings of `Config` that the kind does not have, with what to say of each.
        test_on_whole_text: whether the test number is of the test text as one sequence; otherwise
            it is the mean over the sequences of the test set.
    """

    metric: str
    higher_is_better: bool
    items: str
    models: tuple[str, ...]
    other_settings: Mapping[str, str] = field(hash=False)
    is_percentage: bool = True
    test_on_whole_text: bool = False

    @property
    def result_metric(self) -> str:
        """The metric as ``result.json`` names it."""
        return self.metric + (", whole sequence" if self.test_on_whole_text else "")

    @property
    def test_label(self) -> str:
        """How the test number of a run is measured."""
        return ("whole sequence, " if self.test_on_whole_text else "") + "population stats"

    def valid_label(self, stats: str = "population") -> str:
        """How a validation number of a run is measured."""
        return ("windows, " if self.test_on_whole_text else "") + f"{stats} stats"

    def format(self, value: float, digits: int = 2) -> str:
        """A value with metric and unit: ``1.3230 bits per character`` or ``accuracy 58.33 %``.

        digits: after the decimal point, for percentages.
        """
        if self.is_percentage:
            return f"{self.metric} {100 * value:.{digits}f} %"
        return f"{value:.4f} {self.metric}"

    def format_evaluation(self, record: dict[str, float]) -> str:
        """The metrics of an evaluation on the validation data."""
        batch, population = record["valid_batch"], record["valid_population"]
        if not self.is_percentage:
            return f"{self.metric} {batch:.4f} (batch stats), {population:.4f} (population)"
        text = (
            f"{self.metric} {100 * batch:.1f} % (batch stats), {100 * population:.1f} % "
            "(population)"
        )
        if "valid_population_nats" in record:
            text += f", loss {record['valid_population_nats']:.3f} nats (population)"
        return text


_NO_WINDOWS = dict.fromkeys(("length", "valid_windows"), "only a text is cut into windows")

IMAGES = TaskKind("accuracy", True, "images", LAYERS, _NO_WINDOWS)
TEXT = TaskKind(
    *("bits per character", False, "characters"),
    tuple(name for name in LAYERS if name not in ("rnn", "irnn")),
    {},
    is_percentage=False,
    test_on_whole_text=True,
)
QUESTIONS = TaskKind(
    *("error rate", False, "questions", READERS),
    {**_NO_WINDOWS, "dropout": "a reader has layer.dropout instead"},
)

TASK_KINDS = {
    **dict.fromkeys(("digits", "mnist", "pmnist"), IMAGES),
    **dict.fromkeys(("ptb", "text8", "pydoc"), TEXT),
    **dict.fromkeys(("cloze", "cnn", "cnn-built", "dailymail-built"), QUESTIONS),
}
TASKS = tuple(TASK_KINDS)
