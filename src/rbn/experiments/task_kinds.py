"""A task's metric, units and models, which are known before its data are loaded.

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
        metric: name of the metric, such as ``"accuracy"``.
        higher_is_better: whether a higher value of the metric is better.
        items: what a minibatch consists of, such as ``"images"``.
        models: the models that can be trained.
        is_percentage: whether the metric is a fraction, shown in percent.
        other_settings: settings of `Config` that do not apply, with the reason.
        test_on_whole_text: whether the test result is on the test text as one sequence; otherwise
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
        """The name of the metric in ``result.json``."""
        return self.metric + (", whole sequence" if self.test_on_whole_text else "")

    def format_test(self, value: float, stats: str | None = "population") -> str:
        """A run's test result and how it was measured. stats: None if the model has none."""
        return self._with_notes(value, "whole sequence" if self.test_on_whole_text else None, stats)

    def format_valid(self, value: float, stats: str | None = "population") -> str:
        """A run's validation result and how it was measured. stats: None if the model has none."""
        return self._with_notes(value, "windows" if self.test_on_whole_text else None, stats)

    def _with_notes(self, value: float, over: str | None, stats: str | None) -> str:
        notes = [note for note in (over, stats and f"{stats} stats") if note]
        return self.format(value) + (f" ({', '.join(notes)})" if notes else "")

    def format(self, value: float, digits: int = 2) -> str:
        """A value with metric and unit: ``1.3230 bits per character`` or ``accuracy 58.33 %``.

        digits: decimals of percentages.
        """
        if self.is_percentage:
            return f"{self.metric} {100 * value:.{digits}f} %"
        return f"{value:.4f} {self.metric}"

    def format_evaluation(self, record: dict[str, float], has_statistics: bool) -> str:
        """The metrics of an evaluation on the validation data.

        has_statistics: whether the model has population statistics; if not, both numbers of the
            record are the same.
        """

        def format(value: float) -> str:
            return f"{100 * value:.1f} %" if self.is_percentage else f"{value:.4f}"

        population, note = format(record["valid_population"]), ""
        text = f"{self.metric} {population}"
        if has_statistics:
            note = " (population)"
            batch = format(record["valid_batch"])
            text = f"{self.metric} {batch} (batch stats), {population}{note}"
        if self.is_percentage and "valid_population_nats" in record:
            text += f", loss {record['valid_population_nats']:.3f} nats{note}"
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
