"""The state of a sweep: its trials as rows, and the best of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rbn.experiments.config import from_mapping
from rbn.experiments.search.storage import description
from rbn.experiments.search.trial_record import RECORD
from rbn.experiments.search.trials import SILENT

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

STATES = {
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "RUNNING": "running",
    "WAITING": "waiting",
    "FAIL": "failed",
}


@dataclass(frozen=True)
class Row:
    """A trial.

    Attributes:
        number: number of the trial, from 0.
        state: one of the values of `STATES`.
        remark: why it failed, or what else is unusual.
        parameters: its settings.
        best: its best validation metric so far.
        curve: the validation metric of every evaluation, in order.
        steps: number of training steps up to the last evaluation.
        seconds: training time up to the last evaluation.
    """

    number: int
    state: str
    remark: str
    parameters: dict[str, Any]
    best: float | None
    curve: tuple[float, ...]
    steps: int
    seconds: float


@dataclass(frozen=True)
class SweepStatus:
    """The current state of a sweep.

    Attributes:
        name: name of the sweep.
        figure: the validation metric.
        maximize: whether a higher metric is better.
        rows: its trials.
        total: number of trials, including those that have not started.
    """

    name: str
    figure: str
    maximize: bool
    rows: tuple[Row, ...]
    total: int

    @property
    def parameters(self) -> list[str]:
        """Names of the settings that are tried."""
        return list(dict.fromkeys(name for row in self.rows for name in row.parameters))

    @property
    def finished(self) -> int:
        """Number of trials that have ended."""
        return sum(row.state in ("complete", "pruned", "failed") for row in self.rows)

    @property
    def best(self) -> Row | None:
        """The best complete trial."""
        done = [row for row in self.rows if row.state == "complete" and row.best is not None]
        key = _key(self.maximize)
        return max(done, key=lambda row: key(row.best), default=None)

    def summary(self) -> str:
        """The state in one line."""
        counts = Counter(row.state for row in self.rows)
        counts["waiting"] += self.total - len(self.rows)
        parts = [f"{counts[state]} {state}" for state in STATES.values() if counts[state]]
        return f"{self.name}: {self.finished} of {self.total} trials finished ({', '.join(parts)})"


def sweep_status(study: Study) -> SweepStatus:
    """The status of a study's sweep."""
    about = description(study)
    total = int(about["trials"])
    maximize = study.direction.name == "MAXIMIZE"
    # Includes trials that were finished before the number of trials was reduced.
    every = study.get_trials(deepcopy=False)
    trials = [t for t in every if t.number < total or t.state.is_finished()]
    identity = about["identity"]
    order = list(dict.fromkeys(key for space in identity["space"] for key in space))
    rows = tuple(_row(trial, maximize, order) for trial in trials)
    config = from_mapping(next(iter(identity["config"].values())))
    return SweepStatus(study.study_name, config.kind.metric, maximize, rows, max(total, len(rows)))


def _row(trial: FrozenTrial, maximize: bool, order: Sequence[str]) -> Row:
    curve = tuple(trial.intermediate_values[k] for k in sorted(trial.intermediate_values))
    figures = [value for value in curve if value == value]  # not NaN
    if trial.state.name == "COMPLETE" and trial.value is not None:
        figures.append(trial.value)
    record = trial.user_attrs.get(RECORD) or {"step": 0, "seconds": 0.0}
    return Row(
        number=trial.number,
        state=STATES[trial.state.name],
        remark=_remark(trial),
        parameters={name: trial.params[name] for name in order if name in trial.params},
        best=max(figures, key=_key(maximize), default=None),
        curve=curve,
        steps=int(record["step"]),
        seconds=float(record["seconds"]),
    )


def _key(maximize: bool) -> Any:
    return (lambda value: value) if maximize else (lambda value: -value)


def _remark(trial: FrozenTrial) -> str:
    attributes = trial.user_attrs
    if trial.state.is_finished():
        return str(attributes[RECORD]["reason"])
    if attributes.get(RECORD, {}).get("state", "RUNNING") != "RUNNING":
        # A kill between two writes, or a damaged storage.
        return "finished but not marked as such: rbn sweep completes it"
    if trial.state.name == "RUNNING" and attributes.get("beat"):
        # By this machine's clock; only for display.
        silence = time.time() - attributes["beat"]["time"]
        if silence > SILENT * attributes["beat"]["every"]:
            return f"silent for {silence / 60:.0f} min"
    if trial.state.name == "WAITING" and trial.params:
        return "to be resumed"
    return ""
