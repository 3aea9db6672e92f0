"""A training run that can be killed at any moment and goes on where it was.

A `Task` knows the data and the model; the `Trainer` knows when to step, look, save and stop.
Batches are addressed by the number of the step, so nothing of the data's order has to be saved.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rbn.training import checkpoint


class Task(Protocol):
    """What is trained, on what, and how well it does."""

    model: nn.Module
    metric: str  # the name of what `evaluate` returns
    higher_is_better: bool

    def loss(self, step: int) -> Tensor:
        """The loss of minibatch number `step`, from 0: a scalar that can be differentiated."""

    def evaluate(self) -> dict[str, float]:
        """Figures on the validation data, `metric` among them. The model's mode is restored."""


@dataclass(frozen=True)
class Schedule:
    """When things happen.

    Attributes:
        steps: optimisation steps in all.
        evaluate_every: steps between looks at the validation data; one follows the last step too.
        checkpoint_every: steps between checkpoints; one follows every evaluation too.
        patience: evaluations without a better one before training stops; None never does.
        clip: largest global norm of all gradients together; None leaves them alone.
        max_minutes: of this process, after which it saves and stops unfinished; None has no limit.
    """

    steps: int
    evaluate_every: int
    checkpoint_every: int = 1000
    patience: int | None = None
    clip: float | None = 1.0
    max_minutes: float | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate_every", "checkpoint_every", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("clip", "max_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")


@dataclass
class Progress:
    """Where a run is: all of it that is no tensor."""

    step: int = 0
    seconds: float = 0.0  # of training, over all processes that took part
    best: float | None = None
    best_step: int = 0
    bad_looks: int = 0  # evaluations since the best one
    loss_sum: float = 0.0  # since the last evaluation
    loss_count: int = 0
    finished: bool = False
    stopped_early: bool = False
    history: list[dict[str, float]] = field(default_factory=list)


class Diverged(FloatingPointError):
    """A loss or gradient that is not finite."""


class _Interrupts:
    """Remembers a Ctrl-C instead of breaking off in the middle of a step; the second one does."""

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def _note(self, number: int, frame: Any) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


class Trainer:
    """Optimises a task's model, with checkpoints in a folder.

    The folder holds ``last.safetensors`` (to go on from), ``best.safetensors`` (the model of the
    best evaluation) and ``metrics.jsonl`` (one line for each evaluation).

    Args:
        task: the model, its data and its measure.
        optimizer: of the model's parameters.
        schedule: when things happen.
        folder: of the run. A checkpoint that is there is gone on from.
        look_back: steps after which losses are fetched from the model's device and checked; 1 makes
            the host wait for every step. By default that is so on the CPU alone.
        on_step: called after every step with the progress and the loss, still on its device.
        on_record: called after every evaluation with its figures.
    """

    def __init__(
        self,
        task: Task,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        folder: Path,
        *,
        look_back: int | None = None,
        on_step: Callable[[Progress, Tensor], None] | None = None,
        on_record: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        self.task, self.optimizer, self.schedule = task, optimizer, schedule
        self.folder = Path(folder)
        device = next(task.model.parameters()).device
        self.look_back = look_back or (1 if device.type == "cpu" else 100)
        self.on_step, self.on_record = on_step, on_record
        self.progress = Progress()
        # Of the steps since losses were last fetched: their sum, and the first bad one or -1.
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._bad = torch.full((), -1, dtype=torch.int64, device=device)
        if self.last.exists():
            self._resume()

    @property
    def last(self) -> Path:
        """The checkpoint to go on from."""
        return self.folder / "last.safetensors"

    @property
    def best(self) -> Path:
        """The checkpoint of the best evaluation."""
        return self.folder / "best.safetensors"

    def run(self) -> Progress:
        """Train to the end, or until patience or the time is over; then return where it is.

        Raises:
            Diverged: when a loss or gradient is not finite; ``diverged.safetensors`` has the model.
            KeyboardInterrupt: on Ctrl-C, after the step was finished and a checkpoint written. A
                second Ctrl-C does not wait for that.
        """
        now, schedule = self.progress, self.schedule
        began, before = time.monotonic(), now.seconds
        self.task.model.train()
        if not self.last.exists():
            self.save()
        with _Interrupts() as interrupts:
            while now.step < schedule.steps and not now.finished:
                loss = self._step()
                now.seconds = before + time.monotonic() - began
                if self.on_step:
                    self.on_step(now, loss)
                minutes = (time.monotonic() - began) / 60
                out_of_time = schedule.max_minutes is not None and minutes >= schedule.max_minutes
                stop = out_of_time or interrupts.seen
                if now.step % schedule.evaluate_every == 0 or now.step == schedule.steps:
                    self._look()
                    self.save()
                elif now.step % schedule.checkpoint_every == 0 or stop:
                    self.save()
                if interrupts.seen:
                    raise KeyboardInterrupt
                if out_of_time and not now.finished:
                    return now
        now.finished = True
        self.save()
        return now

    def _step(self) -> Tensor:
        """One optimisation step."""
        now, model = self.progress, self.task.model
        loss = self.task.loss(now.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        value = loss.detach()
        finite = value.isfinite()
        if self.schedule.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), self.schedule.clip)
            finite = finite & norm.isfinite()
        self._bad = torch.where(finite | (self._bad >= 0), self._bad, now.step)
        self._sum += value
        now.loss_count += 1
        if now.loss_count % self.look_back == 0:
            self._fetch()
        self.optimizer.step()
        now.step += 1
        return value

    def _fetch(self) -> None:
        """Bring the losses to the host, and stop if one was not finite."""
        bad = int(self._bad)
        if bad >= 0:
            self._give_up(bad)
        self.progress.loss_sum += float(self._sum)
        self._sum.zero_()

    def _give_up(self, step: int) -> None:
        path = self.folder / "diverged.safetensors"
        tensors, facts = checkpoint.state_of(self.task.model, self.optimizer)
        checkpoint.save(path, tensors, {"optimizer": facts, "progress": asdict(self.progress)})
        when = "before that step" if step == self.progress.step else "when it was noticed"
        raise Diverged(
            f"training diverged at step {step}: the loss or the gradient of minibatch {step} is "
            f"not finite. The model {when} is in {path}, the last good checkpoint in {self.last}."
        )

    def _look(self) -> None:
        """Evaluate, write it down, and remember the best."""
        now, task = self.progress, self.task
        self._fetch()
        record: dict[str, float] = {
            "step": now.step,
            "seconds": round(now.seconds, 3),
            "train": now.loss_sum / max(1, now.loss_count),
            **task.evaluate(),
        }
        now.loss_sum, now.loss_count = 0.0, 0
        now.history.append(record)
        value = record[task.metric]
        sign = 1 if task.higher_is_better else -1
        if now.best is None or sign * value > sign * now.best:
            now.best, now.best_step, now.bad_looks = value, now.step, 0
            tensors = {f"model.{k}": v for k, v in task.model.state_dict().items()}
            checkpoint.save(self.best, tensors, {"step": now.step, task.metric: value})
        else:
            now.bad_looks += 1
            patience = self.schedule.patience
            if patience is not None and now.bad_looks >= patience:
                now.finished = now.stopped_early = True
        self._write_history()
        if self.on_record:
            self.on_record(record)

    def save(self) -> None:
        """Write the checkpoint to go on from."""
        self._fetch()
        tensors, facts = checkpoint.state_of(self.task.model, self.optimizer)
        checkpoint.save(self.last, tensors, {"optimizer": facts, "progress": asdict(self.progress)})

    def _resume(self) -> None:
        tensors, facts = checkpoint.load(self.last)
        checkpoint.restore(self.task.model, self.optimizer, tensors, facts["optimizer"])
        self.progress = Progress(**facts["progress"])
        self._write_history()  # lines of steps that will be made again go

    def _write_history(self) -> None:
        """The evaluations so far as lines of JSON, replaced as a whole."""
        path = self.folder / "metrics.jsonl"
        part = path.with_name(path.name + ".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(record) + "\n" for record in self.progress.history)
        part.write_text(lines)
        os.replace(part, path)

    def load_best(self) -> dict[str, Any]:
        """Give the model the parameters and statistics of the best evaluation; its facts."""
        tensors, facts = checkpoint.load(self.best)
        self.task.model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items()})
        return facts
