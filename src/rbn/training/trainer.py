"""The training loop: a run can be killed at any moment and resumes from its last checkpoint.

A `Task` has the data and the model; the `Trainer` decides when to step, evaluate, save and stop;
Lightning Fabric handles devices and precision. A batch is a function of the step number, so the
data's order needs no saving.
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
from rbn.training.adam import part_norms, supports
from rbn.training.atomic_files import write_atomic
from rbn.training.averaging import AveragedParameters
from rbn.training.cuda_graph import CapturedStep
from rbn.training.gradient_log import GradientLog
from rbn.training.interrupt import Interrupted, remembered
from rbn.training.randomness import RandomState, seed_of_step
from rbn.training.ranks import Ranks
from rbn.training.schedule import Progress, Schedule
from rbn.training.world import make_fabric

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class Diverged(FloatingPointError):
    """A loss, or too many gradients in a row, are not finite."""


class Task(Protocol):
    """A model, its data and its evaluation.

    Training with several processes also needs `row_dims`: a tuple with the batch dimension of each
    tensor of a minibatch. Each process takes some of the rows.
    """

    model: nn.Module
    metric: str  # the key of `evaluate`'s result that selects the best model

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the metric is better."""

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Minibatch number `step`, from 0, on the model's device."""

    @property
    def loss(self) -> Callable[..., Tensor]:
        """Maps the tensors of a minibatch to a scalar, the mean over its rows."""

    def evaluate(self) -> dict[str, float]:
        """Metrics on the validation data, including `metric`. Leaves the model's mode unchanged.

        All processes of a run call it; the result of the first one counts.
        """


_HAS_GRAD_SCALE = torch.optim.Adam, torch.optim.AdamW  # divide the gradients in a fused step
_MAX_SKIPPED = 50  # consecutive steps with non-finite gradients after which a run is given up


class Trainer:
    """Optimises a task's model, with checkpoints in a folder.

    The folder holds ``last.safetensors`` (to resume from), ``previous.safetensors`` (the checkpoint
    before it, in case the last one is damaged), ``best.safetensors`` (the model of the best
    evaluation) and ``metrics.jsonl`` (one line per evaluation).

    The run has its own stream of random numbers, which starts at the process's current state.

    With several processes (see `make_fabric`), each one takes its part of every minibatch, and the
    gradients are those of all rows. Minibatches and checkpoints do not depend on the number of
    processes, which may change when a run is resumed. If the model draws random numbers, the first
    process draws those of a single-process run; the others use a separate stream for each step.

    Attributes:
        module: the model without Fabric's wrapper, in full precision.
        ranks: the processes of the run.
        step_callbacks: called in order after every step, with the progress.
        record_callbacks: called in order after every evaluation, with its record: ``step``,
            ``seconds``, ``train`` (the mean loss) and the metrics of `Task.evaluate`.

    Args:
        task: the model, its data and its evaluation. Its `model` is replaced by Fabric's wrapper.
        optimizer: updates the model's parameters.
        schedule: how long to train, and when to evaluate and save.
        folder: the run's folder. If it holds a checkpoint, training resumes from it.
        fabric: device, precision and processes; by default the model's device in full precision.
        graph: capture the step as a CUDA graph. The optimiser must be `capturable`, and its
            learning rates must be tensors if they decay.
        look_back: steps between two transfers of the losses to the host, where they are checked. 1
            makes the host wait for every step. Default: 1 on the CPU, 100 on a GPU.
        on_step: the first of the `step_callbacks`.
        on_record: the first of the `record_callbacks`.
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
        self.step_callbacks = [] if on_step is None else [on_step]
        self.record_callbacks = [] if on_record is None else [on_record]
        self.progress = Progress()
        self.module, self._optimizer = task.model, optimizer  # without Fabric's wrappers
        # Evaluations must not depend on when checkpoints were written: a task uses the running
        # averages, or estimates statistics itself.
        keep_running_averages(task.model)
        device = next(task.model.parameters()).device
        self.fabric = fabric or make_fabric(device)
        self.ranks = Ranks.here()
        if self.ranks.count > 1 and not hasattr(task, "row_dims"):
            raise ValueError(
                f"{type(task).__name__} has no row_dims, so its minibatches cannot be split among "
                f"{self.ranks.count} processes"
            )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            # A node that accumulates gradients stays on the stream it was created on, and DDP keeps
            # it. Fabric sets DDP up on another stream, so create the nodes first, on ours.
            accumulators = [
                p.view_as(p).grad_fn for p in task.model.parameters() if p.requires_grad
            ]
            task.model, self._wrapped = self.fabric.setup(task.model, optimizer)
        del accumulators
        self.look_back = look_back or (1 if device.type == "cpu" else 100)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._first_rates = [float(rate) for rate in self._rates]
        self._log = GradientLog(device)
        # If Fabric scales the loss, it clips as well. A fused Adam divides the gradients itself and
        # can skip a step. (A fused SGD can, too, but does not skip its momentum.)
        self._clips = schedule.clip is not None and not self._scales_loss()
        fused = isinstance(optimizer, _HAS_GRAD_SCALE) and bool(optimizer.defaults.get("fused"))
        self._divides = self._clips and fused
        self._fetched = 0  # the part of progress.loss_count whose losses are on the host
        self._average: AveragedParameters | None = None
        if schedule.average is not None:
            self._average = AveragedParameters(self.module, schedule.average)
        self._unsaved_best: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._is_complete = False  # finished, with the final checkpoint written
        self._stopping = False
        self._random = RandomState(device)
        self._seed = self.ranks.from_first(torch.initial_seed)
        self._share = 1.0  # this process's share of the current minibatch's rows
        self._step: Callable[..., Tensor] = self._optimize
        self._captures = graph
        if graph:
            if self._stream is None:
                raise ValueError(f"graph needs a CUDA device, the model is on {device}")
            if self.ranks.count > 1:
                raise ValueError(
                    f"graph needs a single process, got {self.ranks.count}: they exchange "
                    "gradients within a step"
                )
            self._step = CapturedStep(self._optimize, self._stream)
        self._has_checkpoint = self._resume()

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.folder / "last.safetensors"

    @property
    def previous(self) -> Path:
        """The checkpoint before the last, to resume from if the last one is damaged."""
        return self.folder / "previous.safetensors"

    @property
    def best(self) -> Path:
        """The checkpoint of the best evaluation."""
        return self.folder / "best.safetensors"

    def run(self) -> Progress:
        """Train until the last step, until patience or time runs out, or until `stop` is called.

        Returns:
            The progress; `finished` unless the time ran out or `stop` was called.

        Raises:
            Diverged: a loss, or 50 gradients in a row, were not finite. The model is in
                ``diverged.safetensors``.
            Interrupted: Ctrl-C or SIGTERM, after the step was completed and a checkpoint written. A
                second Ctrl-C raises KeyboardInterrupt at once.
        """
        with remembered() as interrupts:
            for _ in self.steps():
                # The signal may have reached only one of several processes.
                if self.ranks.any(bool(interrupts.seen)):
                    with self.isolated():
                        self.save()
                    break
            if self.ranks.any(bool(interrupts.seen)):
                raise Interrupted(interrupts.seen)
        return self.progress

    def steps(self) -> Iterator[Progress]:
        """The training loop: yields the progress after every step.

        Between steps torch's random state and stream are the caller's, so that several trainers can
        take turns (see `train_interleaved`).
        """
        now, schedule = self.progress, self.schedule
        began, seconds_before, last_save = time.monotonic(), now.seconds, 0.0
        with self.isolated():
            self._start()
        while not now.finished and now.step < schedule.steps:
            with self.isolated():
                self._train_step()
                spent = time.monotonic() - began
                now.seconds = seconds_before + spent
                for on_step in self.step_callbacks:
                    on_step(now)

                is_last = now.step == schedule.steps
                evaluates = is_last or now.step % schedule.evaluate_every == 0
                if evaluates:
                    self._evaluate()  # sets `finished` when patience runs out

                stops = False
                if not is_last and not now.finished:
                    stops = self._stopping or self._out_of_time(spent)
                    checkpoint_due = evaluates or now.step % schedule.checkpoint_every == 0
                    if stops or (
                        checkpoint_due
                        and self.ranks.any(spent - last_save >= schedule.checkpoint_seconds)
                    ):
                        self.save()
                        last_save = spent
            if stops:
                return
            yield now
        with self.isolated():
            self._finish()

    def stop(self) -> None:
        """Save and stop unfinished after the current step, as when the time runs out.

        If several processes train one run, all must call it.
        """
        self._stopping = True

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Inside the ``with`` block, torch uses the run's random numbers and its GPU stream."""
        with self._random.current(), torch.cuda.stream(self._stream):  # no stream: no effect
            yield

    def _start(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)  # model and data came from other streams
        self.task.model.train()
        if not self._has_checkpoint:
            self.save()
            self._has_checkpoint = True

    def _finish(self) -> None:
        """Write the final checkpoint, unless the run was loaded from it."""
        if not self._is_complete:
            self.progress.finished = self._is_complete = True
            self.save()

    def _out_of_time(self, spent: float) -> bool:
        limit = self.schedule.max_minutes
        return limit is not None and self.ranks.any(spent >= 60 * limit)

    def _train_step(self) -> None:
        now = self.progress
        if self.schedule.decay_from < 1:
            self._set_rates(self.schedule.rate(now.step))
        now.loss_count += 1
        batch = self.task.batch(now.step)
        if self.ranks.count > 1:
            dims = self.task.row_dims  # type: ignore[attr-defined]
            batch, self._share = self.ranks.part(batch, dims)
            if not self.ranks.first:
                torch.manual_seed(seed_of_step(self._seed, now.step, self.ranks.rank))
        self._step(*batch)
        now.step += 1
        if now.loss_count % self.look_back == 0:
            self._fetch()

    def _optimize(self, *batch: Tensor) -> Tensor:
        """One optimisation step without host synchronization, so that a graph can capture it."""
        self._wrapped.zero_grad(set_to_none=True)
        loss = self.task.loss(*batch)
        # DDP averages over processes; the gradients must be averaged over rows.
        total = loss if self.ranks.count == 1 else loss * (self._share * self.ranks.count)
        scale = self._log.loss_scale.to(loss.dtype) if self._clips else None
        self.fabric.backward(total, gradient=scale)
        value = loss.detach()
        if self.ranks.count > 1:
            value = value * self._share
        if self.schedule.clip is None:
            self._log.record(value)
        else:
            self._clip(value, self.schedule.clip)
        if self.look_back == 1 and not self._captures:
            self._fetch()  # before a gradient that is not finite destroys the model
        self._wrapped.step()
        if self._average is not None:
            self._average.update(self._log.number - 1)
        return value

    def _clip(self, loss: Tensor, clip: float) -> None:
        """Clip the gradients. If they overflowed, they have no direction: skip the step."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        if self._clips:
            norm = part_norms(grads) if supports(grads) else torch.nn.utils.get_total_norm(grads)
        else:
            total = self.fabric.clip_gradients(
                self.task.model, self._wrapped, max_norm=clip, error_if_nonfinite=False
            )
            assert total is not None
            norm = total
        divisor, bad = self._log.record(loss, norm, clip)
        if self._divides:
            optimizer: Any = self._optimizer
            optimizer.grad_scale, optimizer.found_inf = divisor, bad
            return
        if self._clips:
            torch._foreach_div_(grads, divisor)
        for grad in grads:
            grad.masked_fill_(bad != 0, 0)

    def _scales_loss(self) -> bool:
        """Whether Fabric scales the loss (16-mixed)."""
        return getattr(self.fabric.strategy.precision, "scaler", None) is not None

    def _set_rates(self, factor: float) -> None:
        groups = self._optimizer.param_groups
        for group, rate, first in zip(groups, self._rates, self._first_rates, strict=True):
            if isinstance(rate, Tensor):
                group["lr"] = rate.fill_(first * factor)
            else:
                group["lr"] = first * factor

    def _fetch(self) -> None:
        """Copy the losses to the host, and give up if one was not finite."""
        gathered = self.ranks.gathered(int(self._log.bad), float(self._log.total))
        bad = min((int(b) for b, _ in gathered if b >= 0), default=-1)
        total = sum(part for _, part in gathered)
        now = self.progress
        steps = now.loss_count - self._fetched
        now.skipped, now.in_a_row = int(self._log.skipped), int(self._log.in_a_row)
        if bad >= 0:
            self._give_up(bad, f"the loss of minibatch {bad} is not finite")
        if now.in_a_row >= _MAX_SKIPPED:
            self._give_up(now.step, f"the last {now.in_a_row} gradients are not finite")
        if steps > 0:
            now.loss = total / steps
        now.loss_sum += total
        now.loss_scale = float(self._log.loss_scale)
        self._fetched = now.loss_count
        self._log.total.zero_()

    def _give_up(self, step: int, why: str) -> None:
        self.progress.diverged_at = step
        path = self.folder / "diverged.safetensors"
        average_population_stats(self.module)

        def write() -> None:
            self._write_best()
            checkpoint.save(path, *self._state())

        self.ranks.from_first(write)
        when = "before that step" if step == self.progress.step else "when this was detected"
        raise Diverged(
            f"training diverged at step {step}: {why}. The model {when} is in {path}, the last "
            f"good checkpoint in {self.last}."
        )

    def _evaluate(self) -> None:
        """Evaluate the model, or its running average, and report the record."""
        self._fetch()
        average_population_stats(self.module)
        with contextlib.nullcontext() if self._average is None else self._average.in_place():
            record = self._evaluation_record()
        for on_record in self.record_callbacks:
            on_record(record)

    def _evaluation_record(self) -> dict[str, float]:
        """Evaluate, append the record to the history, keep the best model, count patience."""
        now, task = self.progress, self.task
        metrics = task.evaluate()
        record: dict[str, float] = {
            "step": now.step,
            "seconds": round(now.seconds, 3),
            "train": now.loss_sum / max(1, now.loss_count),
            **self.ranks.from_first(lambda: metrics),
        }
        now.loss_sum, now.loss_count, self._fetched = 0.0, 0, 0
        now.history.append(record)
        value = record[task.metric]
        sign = 1 if task.higher_is_better else -1
        is_number = not math.isnan(value)
        if is_number and (now.best is None or not sign * value <= sign * now.best):
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
        """Write the best model, if it is new, and the checkpoint to resume from."""
        self._fetch()
        average_population_stats(self.module)
        self.ranks.from_first(self._write_checkpoints)
        self._unsaved_best = None

    def _write_best(self) -> None:
        if self._unsaved_best is not None:
            checkpoint.save(self.best, *self._unsaved_best)

    def _write_checkpoints(self) -> None:
        self._write_best()
        checkpoint.save(self.last, *self._state(), previous=self.previous)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, optimizer = checkpoint.state_of(self.module, self._optimizer)
        if self._average is not None:
            tensors |= self._average.state()
        return tensors, {
            "optimizer": optimizer,
            "progress": asdict(self.progress),
            "seed": self._seed,
        }

    def _resume(self) -> bool:
        """Load the last checkpoint. Returns whether there was one."""
        loaded = self.ranks.from_first(self._load_last)
        if loaded is None:
            return False
        tensors, metadata = loaded
        self._seed = metadata.get("seed", self._seed)
        self.progress = Progress(**metadata["progress"])
        with self._random.current():
            checkpoint.restore(self.module, self._optimizer, tensors, metadata["optimizer"])
            if self._average is not None:
                self._average.restore(tensors)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self._log.number.fill_(self.progress.step)
        self._log.skipped.fill_(self.progress.skipped)
        self._log.in_a_row.fill_(self.progress.in_a_row)
        self._log.loss_scale.fill_(self.progress.loss_scale)
        self._fetched = self.progress.loss_count
        self._is_complete = self.progress.finished
        self.ranks.from_first(self.write_history)  # drops the lines of steps after the checkpoint
        return True

    def _load_last(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint, or the previous one if it is damaged; None if there is neither."""
        if not self.last.exists() and not self.previous.exists():
            return None
        try:
            return checkpoint.load(self.last)
        except checkpoint.CheckpointError as error:
            if not self.previous.exists():
                raise
            try:
                previous = checkpoint.load(self.previous)
            except checkpoint.CheckpointError as other:
                raise checkpoint.CheckpointError(f"{error}; and {other}") from other
            os.replace(self.previous, self.last)
            step = previous[1]["progress"]["step"]
            warnings.warn(
                f"{error}. Resuming from the previous checkpoint (step {step}).", stacklevel=2
            )
            return previous

    def write_history(self) -> str:
        """Write the evaluations so far as JSON lines, atomically. Returns the text."""
        path = self.folder / "metrics.jsonl"
        lines = "".join(json.dumps(record) + "\n" for record in self.progress.history)
        try:
            write_atomic(path, lines)
            return lines
        except OSError as error:
            raise checkpoint.CheckpointError(
                f"{error.strerror}. The last checkpoint is intact."
            ) from error

    def load_best(self) -> dict[str, Any]:
        """Load the parameters and statistics of the best evaluation.

        Returns:
            Its step and metric.

        Raises:
            CheckpointError: there is none, because the metric of every evaluation was NaN.
        """
        if self.progress.history and self.progress.best is None:
            raise checkpoint.CheckpointError(
                f"{self.folder} has no best model: {self.task.metric} was NaN in every evaluation"
            )
        tensors, metadata = self.ranks.from_first(lambda: checkpoint.load(self.best))
        if metadata.get("step") != self.progress.best_step:
            raise checkpoint.CheckpointError(
                f"{self.best} is the model of step {metadata.get('step')}, but the best evaluation "
                f"of this run was at step {self.progress.best_step}"
            )
        with self.isolated():
            checkpoint.fill(
                self.module,
                {name.removeprefix("model."): value for name, value in tensors.items()},
            )
        return metadata
