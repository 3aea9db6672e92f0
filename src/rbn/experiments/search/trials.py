"""Assigns trials to workers, with heartbeats.

A trial is waiting, running or finished. The worker that takes it stores its own name and a growing
count in it at every heartbeat. If the count stops growing, the worker is dead: any worker that
notices resets the trial to waiting, and the next one resumes from its last checkpoint. A worker
that finds another name in its trial was wrongly considered dead, and gives the trial up. The
storage only has to make sure that a waiting trial is taken once. No clocks are compared.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rbn.experiments.search import sampling
from rbn.experiments.search.space import Choices, Parameter, Value
from rbn.experiments.search.sweep import Sweep
from rbn.experiments.search.trial_record import RECORD, make_record
from rbn.training import interrupt

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

Result = TypeVar("Result")
SILENT = 4  # missing heartbeats after which a worker counts as dead
_MOST_DEATHS = 3  # number of workers that may die on a trial before it fails
_PAUSES = (1, 2, 4, 8, 15)  # seconds between attempts to reach the storage


def patiently(call: Callable[[], Result]) -> Result:
    """Retry for half a minute if the storage cannot be reached; not after Ctrl-C."""
    from optuna.exceptions import StorageInternalError

    with interrupt.remembered() as interrupts:
        for pause in _PAUSES:
            try:
                return call()
            except StorageInternalError:
                if interrupts.seen:
                    raise
                interrupts.wait(pause)
        return call()


class Trials:
    """A worker's view of the trials of a sweep.

    Args:
        sweep: the sweep.
        study: the sweep's study.
        storage: the study's storage.
    """

    def __init__(self, sweep: Sweep, study: Study, storage: BaseStorage) -> None:
        self.sweep, self.study, self._storage = sweep, study, storage
        self._study_id = storage.get_study_id_from_name(sweep.name)
        self.worker = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._count = 0
        self._seen: dict[int, tuple[Any, float]] = {}  # last heartbeat, and when it was first seen

    def take(self) -> int | None:
        """Claim a trial. Returns its number, or None if none is available."""
        trials = patiently(self._all)
        freed = [trial.number for trial in trials if self._silent(trial) and self._free(trial)]
        waiting = [t.number for t in trials if t.state.name == "WAITING"]
        for number in sorted(freed + waiting):
            if self._claim(number):
                return number
        if len(trials) < self.sweep.trials:
            # Two workers may create one too many. Its number exceeds the last, so it never runs.
            patiently(lambda: self.study.enqueue_trial({}))
            return self.take()
        return None

    def all_finished(self) -> bool:
        """Whether all trials of the sweep are finished."""
        trials = patiently(self._all)
        return len(trials) == self.sweep.trials and all(t.state.is_finished() for t in trials)

    def _all(self) -> list[FrozenTrial]:
        trials = self.study.get_trials(deepcopy=False)
        return [trial for trial in trials if trial.number < self.sweep.trials]

    def id_of(self, number: int) -> int:
        """The storage's id of a trial."""
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _claim(self, number: int) -> bool:
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        def attempt() -> bool:
            return self._storage.set_trial_state_values(self.id_of(number), TrialState.RUNNING)

        try:
            if not patiently(attempt):
                return False
        except UpdateFinishedTrialError:
            return False
        patiently(lambda: self.beat(number))
        return True

    def _silent(self, trial: FrozenTrial) -> bool:
        """Whether a running trial has had no new heartbeat for too long."""
        if trial.state.name != "RUNNING":
            self._seen.pop(trial.number, None)
            return False
        sign, now = trial.user_attrs.get("beat"), time.monotonic()
        before, since = self._seen.get(trial.number, (None, now))
        if trial.number not in self._seen or before != sign:
            self._seen[trial.number] = sign, now
            return False
        every = sign["every"] if sign else self.sweep.heartbeat
        return bool(now - since > SILENT * every)

    def _free(self, trial: FrozenTrial) -> bool:
        """Reset a dead worker's trial to waiting. False if the worker lives or the trial failed."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        del self._seen[trial.number]
        try:
            now = self.frozen(trial.number)
            if now.state != TrialState.RUNNING or now.user_attrs != trial.user_attrs:
                return False  # another worker was faster
            sign = now.user_attrs.get("beat") or {}
            dead = [*now.user_attrs.get("dead", []), sign.get("worker", "before its first sign")]
            self._set_attribute(trial.number, "dead", dead)
            if len(dead) >= _MOST_DEATHS:
                self._fail(trial.number, f"{len(dead)} workers died while training it")
                return False
            self._storage.set_trial_state_values(self.id_of(trial.number), TrialState.WAITING)
        except UpdateFinishedTrialError:
            return False
        return True

    def frozen(self, number: int) -> FrozenTrial:
        """The current state of a trial in the storage."""
        return self._storage.get_trial(self.id_of(number))

    def beat(self, number: int) -> None:
        """Store a heartbeat."""
        self._count += 1
        sign = {"worker": self.worker, "count": self._count, "every": self.sweep.heartbeat}
        self._set_attribute(number, "beat", {**sign, "time": time.time()})

    def holds(self, number: int) -> bool:
        """Whether a trial still belongs to this worker."""
        trial = self.frozen(number)
        sign = trial.user_attrs.get("beat") or {}
        return trial.state.name == "RUNNING" and sign.get("worker") == self.worker

    def _set_attribute(self, number: int, key: str, value: Any) -> None:
        self._storage.set_trial_user_attr(self.id_of(number), key, value)

    def record(self, number: int, **changed: Any) -> None:
        """Store changes of a trial, with a checksum (see `make_record`)."""
        self._set_attribute(number, RECORD, make_record(self.frozen(number), changed))

    def begin(self, number: int) -> tuple[Trial, dict[str, Value]]:
        """Choose a trial's settings, or load those that were chosen before."""
        from optuna.trial import Trial

        self.study.sampler = sampling.make_sampler(self.sweep, number)
        trial = Trial(self.study, self.id_of(number))
        names = list(self.sweep.space)
        if self.sweep.points is not None:
            names = list(self.sweep.points[number])
        space = self.sweep.space
        parameters = {name: _suggest(trial, name, space[name]) for name in names}
        patiently(lambda: self.record(number, state="RUNNING", value=None, reason=""))
        return trial, parameters

    # The ends of a trial. Each method returns False if another worker has taken the trial.

    def release(self, number: int) -> bool:
        """Reset a trial to waiting, for another worker or a later run."""
        from optuna.trial import TrialState

        def work() -> None:
            self._storage.set_trial_state_values(self.id_of(number), TrialState.WAITING)

        return self._end(number, work)

    def complete(self, number: int, value: float, remark: str = "") -> bool:
        """Finish a trial with its metric."""

        def work() -> None:
            self.record(number, state="COMPLETE", value=value, reason=remark)
            self.study.tell(number, value)

        return self._end(number, work)

    def prune(self, number: int) -> bool:
        """Stop a trial early."""
        from optuna.trial import TrialState

        def work() -> None:
            self.record(number, state="PRUNED")
            self.study.tell(number, state=TrialState.PRUNED)

        return self._end(number, work)

    def fail(self, number: int, reason: str) -> bool:
        """Mark a trial as failed."""
        return self._end(number, lambda: self._fail(number, reason))

    def _fail(self, number: int, reason: str) -> None:
        from optuna.trial import TrialState

        self.record(number, state="FAIL", reason=reason)
        self.study.tell(number, state=TrialState.FAIL)

    def _end(self, number: int, work: Callable[[], object]) -> bool:
        from optuna.exceptions import UpdateFinishedTrialError

        def attempt() -> bool:
            if not self.holds(number):
                return False
            work()
            return True

        try:
            return patiently(attempt)
        except UpdateFinishedTrialError:
            return False
        except ValueError:  # Optuna's error for a trial that is not running
            if self.holds(number):
                raise
            return False


def _suggest(trial: Trial, name: str, parameter: Parameter) -> Value:
    if isinstance(parameter, Choices):
        chosen: Value = trial.suggest_categorical(name, parameter.values)
        return chosen
    low, high, log = parameter.low, parameter.high, parameter.log
    if parameter.is_integer:
        step = int(parameter.step or 1)
        return trial.suggest_int(name, int(low), int(high), step=step, log=log)
    return trial.suggest_float(name, low, high, step=parameter.step, log=log)
