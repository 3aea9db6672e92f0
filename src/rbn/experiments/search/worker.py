"""A worker: takes trials of a sweep and trains them like ``rbn train``."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rbn.experiments import build
from rbn.experiments.base_task import BaseTask
from rbn.experiments.progress_bars import ProgressBars
from rbn.experiments.search.heartbeat import Heartbeat
from rbn.experiments.search.space import listed
from rbn.experiments.search.storage import open_study
from rbn.experiments.search.sweep import Sweep
from rbn.experiments.search.trials import Trials, patiently
from rbn.experiments.training_session import Observer, TrainingSession
from rbn.training import CheckpointError, Trainer
from rbn.training.interrupt import Interrupts, remembered

if TYPE_CHECKING:
    from optuna.trial import Trial
    from rich.console import Console

_MOST_FAILURES = 3  # consecutive trials
_LONGEST_WAIT = 5.0  # seconds between checks of other workers' trials


class TooManyFailed(RuntimeError):
    """Several trials in a row failed, so the cause is probably not their settings."""


@dataclass(frozen=True)
class Job:
    """The job of a worker.

    Attributes:
        sweep: the sweep.
        storage: where its trials are stored.
        out: folder of the runs.
        device: the device to train on.
        root: the data folder; ``RBN_DATA`` by default.
        until: when to save and stop, as a value of `time.monotonic`; None: no limit. The same for
            all processes on this machine, and independent of changes to the clock.
        threads: number of CPU threads; None keeps the default.
    """

    sweep: Sweep
    storage: str
    out: Path
    device: torch.device
    root: Path | None = None
    until: float | None = None
    threads: int | None = None

    def folder(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.out / f"trial-{number:04d}"


class Worker:
    """Trains trials until there are no more.

    Args:
        job: what to do.
        say: called with a line of text for the user.
        console: for a progress bar; None shows none.
    """

    def __init__(
        self,
        job: Job,
        say: Callable[[str], None],
        console: Console | None = None,
    ) -> None:
        self.job, self.say, self._console = job, say, console
        self._loaded: dict[str, build.Loaded] = {}
        self._failures = 0

    def work(self) -> bool:
        """Train until the sweep is finished, or return False when the time runs out.

        Raises:
            TooManyFailed: several trials failed in a row.
            KeyboardInterrupt: Ctrl-C; the current trial is saved and waits for the next worker.
        """
        # An interrupt inside the storage could leave its lock held, so signals are only remembered.
        with remembered() as interrupts:
            return self._work(interrupts)

    def _work(self, interrupts: Interrupts) -> bool:
        job = self.job
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        if job.device.index is not None:
            torch.cuda.set_device(job.device)
        study, storage = open_study(job.sweep, job.storage)
        trials = Trials(job.sweep, study, storage)
        if trials.all_finished():
            return True
        base = job.sweep.config({})
        with interrupts.breakable():
            # Load data before taking a trial, so that missing data do not cost one.
            TrainingSession([], job.device, job.root, loaded=self._loaded).load(base)
        waited = False
        with Heartbeat(trials) as heartbeat:
            while self._left() > 0:
                interrupts.check()
                number = trials.take()
                if number is None:
                    if trials.all_finished():
                        return True
                    if not waited:
                        self.say("waiting for the trials of other workers")
                        waited = True
                    interrupts.wait(min(self._left(), _LONGEST_WAIT, job.sweep.heartbeat))
                    continue
                heartbeat.start(number)
                try:
                    self._run(number, trials, heartbeat, interrupts)
                except BaseException:
                    with contextlib.suppress(Exception):
                        trials.release(number)
                    raise
                finally:
                    heartbeat.pause()
                self._clean()
        return False

    def _clean(self) -> None:
        """Free the last trial's memory, which is in reference cycles."""
        gc.collect()
        if self.job.device.type == "cuda":
            torch.cuda.empty_cache()

    def _left(self) -> float:
        """Seconds left."""
        return math.inf if self.job.until is None else self.job.until - time.monotonic()

    def _run(
        self, number: int, trials: Trials, heartbeat: Heartbeat, interrupts: Interrupts
    ) -> None:
        """Train one trial, from its last checkpoint to its end or until it is pruned."""
        from optuna.exceptions import UpdateFinishedTrialError

        job = self.job
        trial, parameters = trials.begin(number)
        interrupts.check()
        self.say(f"trial {number}: {listed(parameters)}")
        config = job.sweep.config(parameters, number)
        command = job.sweep.command(parameters, number)
        run = job.folder(number), config, job.sweep.seed
        session = TrainingSession([run], job.device, job.root, command, self._loaded)
        try:
            with contextlib.ExitStack() as stack:
                bar = None
                if self._console is not None:
                    bar = stack.enter_context(ProgressBars(self._console))
                observer = _TrialObserver(trials, trial, heartbeat, self.say, bar)
                minutes = None if job.until is None else max(self._left(), 1e-3) / 60
                session.train(max_minutes=minutes, observer=observer)
            self._conclude(number, trials, heartbeat, session, observer, interrupts)
        except UpdateFinishedTrialError:
            self.say(f"trial {number}: another worker has finished it")
        except CheckpointError:
            raise  # the disk is full or broken: not the trial's fault
        except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            trials.fail(number, reason)
            self.say(f"trial {number}: failed: {reason}")
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                raise TooManyFailed(
                    f"{self._failures} trials in a row failed, the last with {reason}"
                ) from error
        else:
            self._failures = 0

    def _conclude(
        self,
        number: int,
        trials: Trials,
        heartbeat: Heartbeat,
        session: TrainingSession,
        observer: _TrialObserver,
        interrupts: Interrupts,
    ) -> None:
        """Store the outcome of a trial."""
        (trainer,) = session.trainers
        now, best = trainer.progress, trainer.progress.best
        metric = self.job.sweep.config({}).kind.metric
        if heartbeat.lost:
            self.say(f"trial {number}: another worker has taken it")
        elif observer.pruned and not now.finished:
            if trials.prune(number):
                value = "no validation yet" if best is None else f"best {metric} {best:.4f}"
                self.say(f"trial {number}: pruned at step {now.step:,}, {value}")
        elif session.diverged is not None and not trainer.best.exists():
            if trials.fail(number, f"diverged at step {now.diverged_at}"):
                self.say(f"trial {number}: failed: {session.diverged}")
        elif session.diverged is None and not now.finished:
            if trials.release(number):
                self.say(f"trial {number}: out of time at step {now.step:,}, saved")
        elif best is None or not math.isfinite(best):
            why = "the validation metric was never a number"
            if trials.fail(number, why):
                self.say(f"trial {number}: failed: {why}")
        else:
            with interrupts.breakable():
                for _ in session.results():  # also writes them
                    pass
            remark = "" if session.diverged is None else f"diverged at step {now.diverged_at}"
            if trials.complete(number, best, remark):
                self.say(f"trial {number}: validation {metric} {best:.4f} after {now.step:,} steps")


class _TrialObserver:
    """Reports every evaluation to the storage, and stops the run if it is pruned."""

    def __init__(
        self,
        trials: Trials,
        trial: Trial,
        heartbeat: Heartbeat,
        say: Callable[[str], None],
        bar: Observer | None = None,
    ) -> None:
        self._trials, self._trial, self._heartbeat = trials, trial, heartbeat
        self._say, self._bar = say, bar
        self._known = set(trials.frozen(trial.number).intermediate_values)
        self.pruned = False

    def add(self, trainer: Trainer, task: BaseTask) -> None:
        """Observe a run."""
        if trainer.progress.step > 0:
            self._say(f"trial {self._trial.number}: resumes at step {trainer.progress.step:,}")
        if self._bar is not None:
            self._bar.add(trainer, task)
        # The storage lacks earlier evaluations if it was lost or replaced.
        self._store(trainer, [record[task.metric] for record in trainer.progress.history])
        trainer.record_callbacks.append(lambda _: self._report(trainer, task.metric))
        self._heartbeat.when_lost(trainer.stop)

    def _report(self, trainer: Trainer, metric: str) -> None:
        if self._heartbeat.lost:  # the trial and its record now belong to another worker
            return
        self._store(trainer, [record[metric] for record in trainer.progress.history])
        if patiently(self._trial.should_prune):
            self.pruned = True
            trainer.stop()

    def _store(self, trainer: Trainer, curve: Sequence[float]) -> None:
        """Store new evaluations, and the progress of the run."""
        now, number = trainer.progress, self._trial.number
        for look, value in enumerate(curve):
            if look not in self._known:  # after a kill, repeated evaluations have the same values
                patiently(partial(self._trial.report, value, look))
                self._known.add(look)
        if curve:
            done = {"step": now.step, "seconds": round(now.seconds, 3)}
            patiently(lambda: self._trials.record(number, **done))
