"""A training run that can be killed at any moment and goes on where it was.

A `Task` knows the data and the model; the `Trainer` knows when to step, look, save and stop;
devices and precision are Lightning Fabric's. Batches are addressed by the number of the step, so
nothing of the data's order has to be saved.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rbn.nn import average_population_stats, keep_running_averages
from rbn.training import checkpoint
from rbn.training.adam import part_norms, suit
from rbn.training.averaging import AveragedParameters
from rbn.training.captured import CapturedStep
from rbn.training.ledger import Ledger
from rbn.training.randomness import RandomState, seed_of_step
from rbn.training.ranks import Ranks
from rbn.training.schedule import Progress, Schedule
from rbn.training.together import Diverged, train_together
from rbn.training.whole import write_whole
from rbn.training.world import make_fabric

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class Task(Protocol):
    """What is trained, on what, and how well it does.

    To be trained by several processes it must also have `row_dims`, a tuple that says along which
    dimension of each tensor of a minibatch its rows lie: each process takes some of the rows.
    """

    model: nn.Module
    metric: str  # the name of what `evaluate` returns
    higher_is_better: bool

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Minibatch number `step`, from 0, on the model's device."""

    @property
    def loss(self) -> Callable[..., Tensor]:
        """From the tensors of a minibatch to a scalar, the mean over its rows."""

    def evaluate(self) -> dict[str, float]:
        """Figures on the validation data, `metric` among them. The model's mode is restored.

        Of several processes that train together all call it; the first one's figures count.
        """


_DIVIDING = torch.optim.Adam, torch.optim.AdamW
_MOST_SKIPPED = 50  # steps in a row whose gradient is not finite before training is given up


class Trainer:
    """Optimises a task's model, with checkpoints in a folder.

    The folder holds ``last.safetensors`` (to go on from), ``previous.safetensors`` (the one before,
    should the last be damaged), ``best.safetensors`` (the model of the best evaluation) and
    ``metrics.jsonl`` (one line for each evaluation).

    The run has its own stream of random numbers, which begins at the process's present state.

    Of several processes (see `make_fabric`) each takes its part of every minibatch; gradients are
    those of all rows together. The minibatches are those that one process would have. Checkpoints
    do not depend on the number of processes, which may be another when a run goes on. Where a model
    draws random numbers, those of the first process go on as they would alone; the others draw, for
    every step, from a stream of their own.

    Attributes:
        module: the model without Fabric's wrapper, so in full precision.
        ranks: the processes.

    Args:
        task: the model, its data and its measure. Its `model` becomes Fabric's wrapper of it.
        optimizer: of the model's parameters.
        schedule: when things happen.
        folder: of the run. A checkpoint that is there is gone on from.
        fabric: device, precision and processes; by default the model's device in full precision.
        graph: whether the step is captured as a CUDA graph; for CUDA devices. The optimiser must
            be `capturable`, and where the rate decays its rates tensors.
        look_back: steps after which losses are fetched from the model's device and checked; 1 makes
            the host wait for every step. By default that is so on the CPU alone.
        on_step: called after every step with the progress.
        on_record: called after every evaluation with its figures.
    """

    def __init__(
        self,
        task: Task,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        folder: Path,
        *,
        fabric: Fabric | None = None,
        graph: bool = False,
        look_back: int | None = None,
        on_step: Callable[[Progress], None] | None = None,
        on_record: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        self.task, self.schedule, self.folder = task, schedule, Path(folder)
        self.on_step, self.on_record = on_step, on_record
        self.progress = Progress()
        self.module, self._optimizer = task.model, optimizer  # without their wrappers
        # What a task measures must not depend on when checkpoints were written: it has the running
        # averages, or estimates statistics itself.
        keep_running_averages(task.model)
        device = next(task.model.parameters()).device
        self.fabric = fabric or make_fabric(device)
        self.ranks = Ranks.here()
        if self.ranks.count > 1 and not hasattr(task, "row_dims"):
            raise ValueError(
                f"{type(task).__name__} has no row_dims, so its minibatches cannot be shared by "
                f"{self.ranks.count} processes"
            )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            # What adds a gradient up stays with the stream it was made on, and is kept by DDP,
            # which Fabric sets up on another stream. So it is made first, on ours.
            kept = [p.view_as(p).grad_fn for p in task.model.parameters() if p.requires_grad]
            task.model, self._wrapped = self.fabric.setup(task.model, optimizer)
        del kept
        self.look_back = look_back or (1 if device.type == "cpu" else 100)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._first_rates = [float(rate) for rate in self._rates]
        self._ledger = Ledger(device)
        # Where Fabric scales the loss, it clips as well. A fused Adam divides the gradients itself,
        # and can leave a step out. (So does a fused SGD, but for its momentum, which is not set.)
        self._clips = schedule.clip is not None and not self._scales_loss()
        fused = isinstance(optimizer, _DIVIDING) and bool(optimizer.defaults.get("fused"))
        self._divides = self._clips and fused
        self._fetched = 0  # of progress.loss_count
        self._average: AveragedParameters | None = None
        if schedule.average is not None:
            self._average = AveragedParameters(self.module, schedule.average)
        self._unsaved_best: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._began: float | None = None
        self._saved = 0.0  # seconds since then
        self._closed = False  # finished, and all of it on the disk
        self._stopping = False
        self._random = RandomState(device)
        self._seed = self.ranks.from_first(torch.initial_seed)
        self._share = 1.0  # of the rows of the present minibatch
        self._step: Callable[..., Tensor] = self._optimise
        self._captures = graph
        if graph:
            if self._stream is None:
                raise ValueError(f"graph needs a CUDA device, the model is on {device}")
            if self.ranks.count > 1:
                raise ValueError("graph is for one process: several exchange gradients in a step")
            self._step = CapturedStep(self._optimise, self._stream)
        self._saved_before = self._resume()

    @property
    def last(self) -> Path:
        """The checkpoint to go on from."""
        return self.folder / "last.safetensors"

    @property
    def previous(self) -> Path:
        """The checkpoint before the last, to go on from where that is damaged."""
        return self.folder / "previous.safetensors"

    @property
    def best(self) -> Path:
        """The checkpoint of the best evaluation."""
        return self.folder / "best.safetensors"

    def run(self) -> Progress:
        """Train to the end, or until patience or the time is over; then return where it is.

        Raises:
            Diverged: when a loss, or 50 gradients in a row, are not finite;
                ``diverged.safetensors`` has the model.
            KeyboardInterrupt: on Ctrl-C, after the step was finished and a checkpoint written. A
                second Ctrl-C does not wait for that.
        """
        train_together([self])
        return self.progress

    def advance(self) -> bool:
        """Make one step and what is due after it. False when there is nothing more to do."""
        now, schedule = self.progress, self.schedule
        with self.alone():
            if self._began is None:
                self._begin()
            assert self._began is not None
            if now.finished or now.step >= schedule.steps:
                self._finish()
                return False
            self._make_step()
            spent = time.monotonic() - self._began
            now.seconds = self._before + spent
            if self.on_step:
                self.on_step(now)
            due = now.step % schedule.checkpoint_every == 0
            if now.step % schedule.evaluate_every == 0 or now.step == schedule.steps:
                self._look()
                due = True
            if now.finished or now.step == schedule.steps:
                self._finish()
                return False
            stops = self._stopping or (
                schedule.max_minutes is not None
                and self.ranks.any(spent >= 60 * schedule.max_minutes)
            )
            if stops or (
                due and self.ranks.any(spent - self._saved >= schedule.checkpoint_seconds)
            ):
                self.save()
                self._saved = spent
            return not stops

    def stop(self) -> None:
        """Save and stop unfinished after this step, as when the time is over.

        Where several processes train one run, all of them must be told.
        """
        self._stopping = True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, torch uses the run's own random numbers and, on a GPU, its own stream."""
        with self._random.current(), torch.cuda.stream(self._stream):  # no stream: no effect
            yield

    def _begin(self) -> None:
        self._began, self._before = time.monotonic(), self.progress.seconds
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)  # model and data came from other streams
        self.task.model.train()
        if not self._saved_before:
            self.save()

    def _finish(self) -> None:
        if not self._closed:
            self.progress.finished = self._closed = True
            self.save()

    def _make_step(self) -> None:
        now = self.progress
        if self.schedule.decay_from < 1:
            self._set_rates(self.schedule.rate(now.step))
        now.loss_count += 1
        batch = self.task.batch(now.step)
        if self.ranks.count > 1:
            batch, self._share = self.ranks.part(batch, self.task.row_dims)  # type: ignore[attr-defined]
            if not self.ranks.first:
                torch.manual_seed(seed_of_step(self._seed, now.step, self.ranks.rank))
        self._step(*batch)
        now.step += 1
        if now.loss_count % self.look_back == 0:
            self._fetch()

    def _optimise(self, *batch: Tensor) -> Tensor:
        """One optimisation step, without a word from the host: it may be captured as a graph."""
        self._wrapped.zero_grad(set_to_none=True)
        loss = self.task.loss(*batch)
        # DDP averages over processes what is to be averaged over rows.
        total = loss if self.ranks.count == 1 else loss * (self._share * self.ranks.count)
        scale = self._ledger.loss_scale.to(loss.dtype) if self._clips else None
        self.fabric.backward(total, gradient=scale)
        value = loss.detach()
        if self.ranks.count > 1:
            value = value * self._share
        if self.schedule.clip is None:
            self._ledger.enter(value)
        else:
            self._clip(value, self.schedule.clip)
        if self.look_back == 1 and not self._captures:
            self._fetch()  # before the model is spoilt by a gradient that is not finite
        self._wrapped.step()
        if self._average is not None:
            self._average.update(self._ledger.number - 1)
        return value

    def _clip(self, loss: Tensor, clip: float) -> None:
        """Clip the gradients; one that overflowed has no direction, so the step goes without it."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        if self._clips:
            norm = part_norms(grads) if suit(grads) else torch.nn.utils.get_total_norm(grads)
        else:
            found = self.fabric.clip_gradients(
                self.task.model, self._wrapped, max_norm=clip, error_if_nonfinite=False
            )
            assert found is not None
            norm = found
        divisor, bad = self._ledger.enter(loss, norm, clip)
        if self._divides:
            optimizer: Any = self._optimizer
            optimizer.grad_scale, optimizer.found_inf = divisor, bad
            return
        if self._clips:
            torch._foreach_div_(grads, divisor)
        for grad in grads:
            grad.masked_fill_(bad != 0, 0)

    def _scales_loss(self) -> bool:
        """Whether Fabric multiplies the loss, and tells the optimiser so."""
        return getattr(self.fabric.strategy.precision, "scaler", None) is not None

    def _set_rates(self, factor: float) -> None:
        groups = self._optimizer.param_groups
        for group, rate, first in zip(groups, self._rates, self._first_rates, strict=True):
            if isinstance(rate, Tensor):
                group["lr"] = rate.fill_(first * factor)
            else:
                group["lr"] = first * factor

    def _fetch(self) -> None:
        """Bring the losses to the host, and stop if one was not finite."""
        found = self.ranks.gathered(int(self._ledger.bad), float(self._ledger.total))
        bad = min((int(b) for b, _ in found if b >= 0), default=-1)
        total = sum(part for _, part in found)
        now = self.progress
        steps = now.loss_count - self._fetched
        now.skipped, now.in_a_row = int(self._ledger.skipped), int(self._ledger.in_a_row)
        if bad >= 0:
            self._give_up(bad, f"the loss of minibatch {bad} is not finite")
        if now.in_a_row >= _MOST_SKIPPED:
            self._give_up(now.step, f"the last {now.in_a_row} gradients are not finite")
        if steps > 0:
            now.loss = total / steps
        now.loss_sum += total
        now.loss_scale = float(self._ledger.loss_scale)
        self._fetched = now.loss_count
        self._ledger.total.zero_()

    def _give_up(self, step: int, why: str) -> None:
        self.progress.diverged_at = step
        path = self.folder / "diverged.safetensors"
        average_population_stats(self.module)

        def write() -> None:
            self._write_best()
            checkpoint.save(path, *self._state())

        self.ranks.from_first(write)
        when = "before that step" if step == self.progress.step else "when it was noticed"
        raise Diverged(
            f"training diverged at step {step}: {why}. The model {when} is in {path}, the last "
            f"good checkpoint in {self.last}."
        )

    def _look(self) -> None:
        """Evaluate, write it down, and remember the best."""
        self._fetch()
        average_population_stats(self.module)
        with contextlib.nullcontext() if self._average is None else self._average.in_place():
            record = self._evaluate()
        if self.on_record:
            self.on_record(record)

    def _evaluate(self) -> dict[str, float]:
        now, task = self.progress, self.task
        figures = task.evaluate()
        record: dict[str, float] = {
            "step": now.step,
            "seconds": round(now.seconds, 3),
            "train": now.loss_sum / max(1, now.loss_count),
            **self.ranks.from_first(lambda: figures),
        }
        now.loss_sum, now.loss_count, self._fetched = 0.0, 0, 0
        now.history.append(record)
        value = record[task.metric]
        sign = 1 if task.higher_is_better else -1
        number = not math.isnan(value)
        if number and (now.best is None or not sign * value <= sign * now.best):
            now.best, now.best_step, now.bad_looks = value, now.step, 0
            state = {f"model.{k}": v.clone() for k, v in self.module.state_dict().items()}
            self._unsaved_best = state, {"step": now.step, task.metric: value}
        else:
            now.bad_looks += 1
            patience = self.schedule.patience
            if patience is not None and now.bad_looks >= patience:
                now.finished = now.stopped_early = True
        self.ranks.from_first(self.write_history)
        return record

    def save(self) -> None:
        """Write the best model, if it is new, and the checkpoint to go on from."""
        self._fetch()
        average_population_stats(self.module)
        self.ranks.from_first(self._write_checkpoints)
        self._unsaved_best = None

    def _write_best(self) -> None:
        if self._unsaved_best is not None:
            checkpoint.save(self.best, *self._unsaved_best)

    def _write_checkpoints(self) -> None:
        self._write_best()
        checkpoint.save(self.last, *self._state(), before=self.previous)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = checkpoint.state_of(self.module, self._optimizer)
        if self._average is not None:
            tensors |= self._average.state()
        return tensors, {
            "optimizer": facts,
            "progress": asdict(self.progress),
            "seed": self._seed,
        }

    def _resume(self) -> bool:
        """Go on from the checkpoint, if there is one."""
        found = self.ranks.from_first(self._load_last)
        if found is None:
            return False
        tensors, facts = found
        self._seed = facts.get("seed", self._seed)
        self.progress = Progress(**facts["progress"])
        with self._random.current():
            checkpoint.restore(self.module, self._optimizer, tensors, facts["optimizer"])
            if self._average is not None:
                self._average.restore(tensors)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self._ledger.number.fill_(self.progress.step)
        self._ledger.skipped.fill_(self.progress.skipped)
        self._ledger.in_a_row.fill_(self.progress.in_a_row)
        self._ledger.loss_scale.fill_(self.progress.loss_scale)
        self._fetched = self.progress.loss_count
        self._closed = self.progress.finished
        self.ranks.from_first(self.write_history)  # lines of steps that will be made again go
        return True

    def _load_last(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint, or the one before if it is damaged; None where there is none."""
        if not self.last.exists() and not self.previous.exists():
            return None
        try:
            return checkpoint.load(self.last)
        except checkpoint.CheckpointError as error:
            if not self.previous.exists():
                raise
            try:
                found = checkpoint.load(self.previous)
            except checkpoint.CheckpointError as other:
                raise checkpoint.CheckpointError(f"{error}; and {other}") from other
            os.replace(self.previous, self.last)
            step = found[1]["progress"]["step"]
            warnings.warn(f"{error}. Going on from the one before, of step {step}.", stacklevel=2)
            return found

    def write_history(self) -> str:
        """Write the evaluations so far as lines of JSON, atomically; returns the text."""
        path = self.folder / "metrics.jsonl"
        lines = "".join(json.dumps(record) + "\n" for record in self.progress.history)
        try:
            write_whole(path, lines)
            return lines
        except OSError as error:
            raise checkpoint.CheckpointError(
                f"{error.strerror}. The last checkpoint is still good."
            ) from error

    def load_best(self) -> dict[str, Any]:
        """Give the model the parameters and statistics of the best evaluation; its facts.

        Raises:
            CheckpointError: there is none: no figure was a number.
        """
        if self.progress.history and self.progress.best is None:
            raise checkpoint.CheckpointError(
                f"{self.folder} has no best model: of no evaluation is {self.task.metric} a number"
            )
        tensors, facts = self.ranks.from_first(lambda: checkpoint.load(self.best))
        if facts.get("step") != self.progress.best_step:
            raise checkpoint.CheckpointError(
                f"{self.best} is the model of step {facts.get('step')}, but the best evaluation of "
                f"this run was at step {self.progress.best_step}"
            )
        with self.alone():
            checkpoint.fill(
                self.module,
                {name.removeprefix("model."): value for name, value in tensors.items()},
            )
        return facts
