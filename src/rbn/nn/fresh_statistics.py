"""Keeps population statistics up to date with the weights.

Running averages lag behind the weights of a recurrent network. A layer therefore keeps its most
recent training calls (`rbn.nn.recent_calls`) and runs them again before it is evaluated, saved or
copied.
"""

from __future__ import annotations

import abc
import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, SyncBatchNorm

from rbn.nn import checks
from rbn.nn.recent_calls import (
    Call,
    RecentCalls,
    Signature,
    are_parameters,
    are_trained,
    keep_compiled_call,
    register,
    rows_to_keep,
    version,
    without_outdated_states,
)
from rbn.nn.recurrence import Recurrence, States
from rbn.nn.statistics import PopulationStatistics, enough_to_estimate, temporarily
from rbn.nn.update_bn import UpdateBN
from rbn.ops.operator import is_traced
from rbn.ops.types import InputStats, valid_steps

T = TypeVar("T", bound="FreshStatistics")
# Seed of the masks in an estimate: the same weights and inputs always give the same statistics.
_SEED = 0


class FreshStatistics(Recurrence):
    """A recurrence that refreshes its population statistics when they are needed."""

    input_stats: InputStats
    momentum: float | None
    sync_stats: bool
    refresh_stats: bool
    recent_calls: RecentCalls
    _pools: dict[str, _Pool] | None = None  # while `refresh` runs
    _frozen = False  # whether the layer is in eval() while its weights are trained
    _check_norms = True  # set by `train` and `eval`, cleared by the next evaluation
    _written: tuple[int, ...] = ()  # versions of the statistics after the last estimate

    @abc.abstractmethod
    def _ignores_padding(self) -> bool:
        """Whether padded positions have no influence on any result."""

    @abc.abstractmethod
    def _min_rows(self, batch: int) -> int:
        """How many sequences must reach a step for it to get its own minibatch statistics."""

    def _set_refresh(self, refresh_stats: bool) -> None:
        """Start with an empty log of calls."""
        self.refresh_stats = checks.boolean("refresh_stats", refresh_stats)
        self.recent_calls, self._key = RecentCalls(), register(self)
        self.update_bn = UpdateBN(self)

    def reset_running_stats(self) -> None:
        """Discard the population statistics, and the inputs kept to refresh them."""
        self.recent_calls.clear()
        for statistics in self._all_statistics():
            statistics.reset()

    def _all_statistics(self) -> list[PopulationStatistics]:
        return [m for m in self._modules.values() if isinstance(m, PopulationStatistics)]

    @torch.no_grad()
    def refresh(self) -> bool:
        """Re-estimate the population statistics at the current weights, if they are stale.

        Runs the layer on the inputs of its most recent training calls, with new masks of zoneout
        but without dropout, and averages the minibatch statistics. Evaluation, `eval()`,
        `state_dict()` and copying call this automatically. Changes neither parameters nor the
        random state. Processes that train together need not call it at the same time: each uses
        its own inputs.

        Returns:
            Whether the statistics were re-estimated.
        """
        calls = self.recent_calls
        if not self.refresh_stats or not calls or self._pools is not None or not self._is_usable():
            return False
        weights = self._signature()
        if not self._is_stale(weights):
            return False
        pools = self._pool(calls)
        if pools:
            stale = 0
            for name, pool in pools.items():
                statistics = cast(PopulationStatistics, self._modules[name])
                stale = max(stale, pool.steps_left_out(statistics))
                pool.write_to(statistics)
            if all(kept[0].x.dim() == 3 for kept in calls):  # a layer's: cells always count steps
                self._check_left_out(stale)
        else:
            checks.warn(
                f"{type(self).__name__} evaluates with running averages, which lag behind the "
                "weights, because the inputs of its recent training calls were modified in "
                "place. Pass a new tensor in each call, or call "
                "rbn.update_population_stats(model, batches)"
            )
        self.mark_fresh()
        return bool(pools)

    def refresh_once(self) -> None:
        """Refresh the statistics for an evaluation, and release inputs that are no longer needed.

        A layer that evaluates with gradients enabled and has trainable parameters counts as frozen:
        it keeps its statistics until `train` is called. Without trainable parameters the weights
        cannot change, so the inputs are released.
        """
        if self.may_be_stale:
            self.refresh()
            self._check_norms = False
        if not self._frozen and torch.is_grad_enabled() and self.recent_calls:
            self._frozen = any(p.requires_grad for p in self.parameters())
            if not self._frozen and not self.recent_calls.has_relatives:
                self.recent_calls.clear()

    def mark_fresh(self) -> None:
        """Declare that the statistics belong to the current weights."""
        norms = self._norms() if self.recent_calls.has_relatives else ()
        self.recent_calls.mark_estimated(self._signature(), norms)
        self._written = self._versions()

    @property
    def may_be_stale(self) -> bool:
        """Whether inputs were added or weights changed since the last estimate."""
        calls = self.recent_calls
        if calls.new_rows > 0:
            return True
        if self._frozen or not calls:
            return False
        return self._signature() != calls.estimated_at or (self._check_norms and bool(calls.norms))

    def _is_stale(self, weights: Signature) -> bool:
        """Whether weights changed or inputs were added since the last estimate."""
        calls = self.recent_calls
        if calls.new_rows > 0:
            return True
        if self._frozen:
            return False
        if weights == calls.estimated_at:
            return self._check_norms and self._weights_swapped()
        if not calls.is_copy and self._versions() != self._written:
            self.mark_fresh()  # weights and statistics were loaded, tensor by tensor
            return False
        return True

    def _pool(self, recent: RecentCalls) -> dict[str, _Pool]:
        """Statistics of recent training calls at the current weights, by module name."""
        statistics = self._all_statistics()
        training, self._pools = self.training, {}
        self.training = False  # no dropout
        if any(self.zoneout):
            self._generator = torch.Generator(self._weight().device).manual_seed(_SEED)
        random: AbstractContextManager[None] = contextlib.nullcontext()
        if self.hidden_noise > 0:  # `_initial_states` draws noise, as in training
            weight = self._weight()
            random = torch.random.fork_rng([weight.device] if weight.is_cuda else [])
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                random,
                temporarily(statistics, "forced", "record"),
                temporarily(statistics, "sync", False),
            ):
                every = list(recent)
                unchanged = [calls for calls in every if all(call.unchanged for call in calls)]
                self._check_kept(every, unchanged)
                for calls in without_outdated_states(self._without_nan(unchanged)):
                    states: States | None = None
                    for call in calls:
                        states = self._replay(call, states)
            return self._pools
        finally:
            self._pools, self._generator, self.training = None, None, training

    def _check_kept(self, every: list[list[Call]], unchanged: list[list[Call]]) -> None:
        """Warn once if each call overwrote the previous call's input, as in a reused buffer."""
        reused = len(unchanged) == 1 and len(every) > 2
        if reused and not self.__dict__.get("_warned_reused"):
            self.__dict__["_warned_reused"] = True
            checks.warn(
                f"{type(self).__name__} evaluates with the statistics of one training call "
                f"instead of {len(every)}, because the inputs of the others were modified in "
                "place. Pass a new tensor in each call, or call "
                "rbn.update_population_stats(model, batches)"
            )

    def _check_left_out(self, steps: int) -> None:
        """Warn once if the kept inputs are pieces of sequences that do not cover all steps."""
        if steps and not self.__dict__.get("_warned_pieces"):
            self.__dict__["_warned_pieces"] = True
            checks.warn(
                f"{type(self).__name__} evaluates {steps} steps with running averages, which lag "
                "behind the weights: its recent training calls, with start=, did not reach them. "
                "Call rbn.update_population_stats(model, batches). If sequences continue without "
                "an end, as in truncated backpropagation, train and evaluate without start"
            )

    def _without_nan(self, kept: list[list[Call]]) -> list[list[Call]]:
        """Leaves out inputs with NaN or infinity, unless all have them; warns once.

        A training loop may have skipped the update of such a batch.
        """
        if not kept:
            return kept
        ignore = self._ignores_padding()
        flags = [torch.stack([c.is_finite(ignore) for c in calls]).all() for calls in kept]
        device = self._weight().device
        finite = torch.stack([flag.to(device) for flag in flags]).tolist()
        if all(finite) or not any(finite):
            return kept
        if not self.__dict__.get("_warned_nan"):
            self.__dict__["_warned_nan"] = True
            checks.warn(
                f"{type(self).__name__} evaluates without the statistics of {finite.count(False)} "
                f"of its {len(kept)} recent training calls: their inputs have NaN or infinity"
            )
        return [calls for calls, good in zip(kept, finite, strict=True) if good]

    def _replay(self, call: Call, states: States | None) -> States:
        """Run a kept call again, on the current device and in the current dtype of the weights."""
        weight = self._weight()
        x = call.x.to(weight.device)
        dtype = weight.dtype if call.autocast is None else call.autocast
        if x.is_floating_point():
            x = x.to(dtype)
        if call.states is not None:
            states = tuple(state.to(weight.device, dtype) for state in call.states)
        lengths = None if call.lengths is None else call.lengths.to(weight.device)
        with torch.autocast(weight.device.type, call.autocast, enabled=call.autocast is not None):
            return self._run_call(x, states, lengths, call.start)

    def _keep_call(
        self,
        x: Tensor,
        states: States | None,
        lengths: Tensor | None,
        start: int,
        rows: int,
    ) -> None:
        """Keep the arguments of a training call for `refresh`, in the form `_run_call` takes."""
        if not self.refresh_stats or rows < 2 or not self._all_statistics()[0].records:
            return
        if torch.compiler.is_compiling():
            if not is_exporting():
                keep_compiled_call(
                    x.detach(),
                    [] if states is None else [state.detach() for state in states],
                    lengths,
                    self._all_statistics()[0].count,
                    start,
                    self._type(self._weight()) if self._under_autocast() else None,
                    rows_to_keep(x, states),
                    are_trained(states),
                    self._key,
                )
            return
        if is_recomputing() or is_traced(x) or torch._C._are_functorch_transforms_active():
            return
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            # Replays of the graph skip this code, so the statistics stay running averages.
            self.recent_calls.clear()
            return
        recent, most = self.recent_calls, rows_to_keep(x, states)
        current = are_parameters(states)
        trained = are_trained(states) and not current
        same_sequences = states is not None and recent.follows(start, rows)
        if same_sequences and recent.returned(states):
            states = None
        call = Call(
            x.detach(),
            None if states is None else tuple([state.detach() for state in states]),
            lengths,
            start,
            torch.get_autocast_dtype(x.device.type) if self._under_autocast() else None,
            most,
            trained,
            current,
        )
        recent.add(call, rows, same_sequences=same_sequences)

    def _draws_noise(self) -> bool:
        """True in training and in `refresh`: noise may be the only variance of the first steps."""
        return self.training or self._pools is not None

    def _keep_states(self, states: States, step: int) -> None:
        if self.training and self.refresh_stats and not torch.compiler.is_compiling():
            self.recent_calls.remember(states, step)

    def _check_first_step(self, states: States | None) -> None:
        if not self.training or torch.compiler.is_compiling() or not self._separates_steps():
            return
        if self.recent_calls.returned(states) and not self.__dict__.get("_warned_step"):
            self.__dict__["_warned_step"] = True
            checks.warn(
                f"{type(self).__name__} continues from its previous step, but {self.step_argument} "
                "was not given: evaluation will normalize all steps with the same statistics. Pass "
                f"the step number: {self.step_hint}"
            )

    def _check_repeated_step(self, hx: Any, states: Any) -> None:
        if torch.compiler.is_compiling() or self.__dict__.get("_warned_step"):
            return
        if max(len(s.mean) for s in self._all_statistics()) < 2 or not self._separates_steps():
            return
        if self.recent_calls.continues(hx[0] if isinstance(hx, (tuple, list)) else hx):
            self._warn_repeated_step()
        self.recent_calls.remember_last(states[0] if isinstance(states, tuple) else states)

    def _separates_steps(self) -> bool:
        """Whether each time step has population statistics of its own."""
        return any(not s.shared and s.max_length != 1 for s in self._all_statistics())

    def _batch_statistics(self) -> AbstractContextManager[None]:
        return temporarily(self._all_statistics(), "forced", "batch")

    def _signature(self) -> Signature:
        own = self._parameters.values()
        every = self.parameters() if "parametrizations" in self._modules else own
        # Like `version`, but without a function call per parameter.
        return tuple(
            [(id(p), -1 if p.is_inference() else p._version) for p in every if p is not None]
        )

    def _versions(self) -> tuple[int, ...]:
        """Version counters of the statistics, which increase with every write."""
        return tuple([version(statistics.count) for statistics in self._all_statistics()])

    def _weights_swapped(self) -> bool:
        """Whether weights were swapped with a copy's through `Tensor.data`.

        Such writes, as in Lightning's `WeightAveraging`, do not change a tensor's version. Waits
        for the device, but only if the module has a copy.
        """
        before = self.recent_calls.norms
        now = self._norms() if before else ()
        return bool(now) and now != before

    def _norms(self) -> tuple[float, ...]:
        """The norm of each parameter; empty if the host cannot read values."""
        weight = self._weight()
        if not self._is_usable() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return ()
        with torch.no_grad():
            norms = [torch.linalg.vector_norm(p, dtype=torch.float64) for p in self.parameters()]
            return tuple(torch.stack(norms).tolist())

    def _is_usable(self) -> bool:
        """Whether the parameters can be used now.

        They cannot be while a compiler or `torch.func` traces, or while FSDP has them sharded
        between calls of a module.
        """
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return False
        shape = (self.gates * self.hidden_size, self.hidden_size)
        for name, parameter in self.named_parameters():
            if parameter.is_meta or hasattr(parameter, "device_mesh"):
                return False
            if name.startswith("weight_hh") and tuple(parameter.shape) != shape:
                return False
        return torch._C._len_torch_dispatch_stack() == 0

    def train(self: T, mode: bool = True) -> T:
        """Switch between training and evaluation. Refreshes the statistics before evaluation."""
        if mode or self.training:
            self._frozen = False
        super().train(mode)
        self._check_norms = True
        if not mode:
            self.refresh()
        return self

    if not TYPE_CHECKING:  # a type checker sees the overloads of `torch.nn.Module`

        def state_dict(self, *args, **kwargs):
            """The parameters and refreshed statistics."""
            self.refresh()
            return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if any(f"{prefix}{name}.count" in state_dict for name in self._modules):
            self.recent_calls.clear()
            self.mark_fresh()

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and files: refreshed statistics, no kept inputs."""
        self.refresh()
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._key = register(self)
        self.update_bn.link(self)
        self.mark_fresh()

    def add_module(self, name: str, module: Module | None) -> None:
        """Add a child. `SyncBatchNorm.convert_sync_batchnorm` cannot replace `update_bn`."""
        if not isinstance(module, SyncBatchNorm):
            super().add_module(name, module)
        elif not self.sync_stats:
            checks.warn(
                f"convert_sync_batchnorm does not change {type(self).__name__}: create it with "
                "sync_stats=True to normalize over the sequences of all processes"
            )

    def _reached(self, lengths: Tensor | None, steps: int, rows: int) -> tuple[Tensor, Tensor]:
        """How many sequences reach each step ``[T]``, and the same with 0 for too few."""
        reached = torch.full((steps,), rows, device=self._weight().device)
        if lengths is not None and self._ignores_padding():
            valid = valid_steps(lengths, steps)
            assert valid is not None
            reached = valid.sum(1)
        own = reached
        if self._common_steps is not None:
            own = torch.where(torch.arange(steps, device=own.device) < self._common_steps, own, 0)
        elif self._ignores_padding():
            own = torch.where(own >= self._min_rows(rows), own, 0)
        return reached, own

    def _add_to_pools(
        self,
        suffix: str,
        result: list[tuple[str, PopulationStatistics, Tensor, Tensor]],
        lengths: Tensor | None,
        start: int,
        steps: int,
        rows: int,
    ) -> None:
        """Collect minibatch statistics for `refresh`."""
        assert self._pools is not None
        reached, own = self._reached(lengths, steps, rows)
        for term, _, mean, var in result:
            pool = self._pools.setdefault(f"stats_{term}{suffix}", _Pool())
            if term == "x" and self.input_stats == "sequence":
                pool.add(mean, var, 0, reached.sum()[None])
            else:
                pool.add(mean, var, start, own)


class _Pool:
    """The average of one term's minibatch statistics, weighted by number of rows."""

    def __init__(self) -> None:
        self._mean = self._var = self._rows = self._count = torch.empty(0)
        self._pieces = False

    def add(self, mean: Tensor, var: Tensor, start: int, rows: Tensor) -> None:
        """Add statistics ``[T, features]`` of the steps from `start` on, each of ``rows [T]``."""
        if not self._mean.numel():
            self._mean, self._var = mean.new_zeros(0, mean.shape[1]), var.new_zeros(0, var.shape[1])
            self._rows = self._count = rows.new_zeros(0)
        stop = start + len(rows)
        missing = stop - len(self._rows)
        if missing > 0:
            self._mean = F.pad(self._mean, (0, 0, 0, missing))
            self._var = F.pad(self._var, (0, 0, 0, missing))
            self._rows = F.pad(self._rows, (0, missing))
            self._count = F.pad(self._count, (0, missing))
        rows = torch.where(rows > 1, rows, 0)  # one row has no variance
        self._mean[start:stop] += mean * rows[:, None]
        self._var[start:stop] += var * rows[:, None]
        self._rows[start:stop] += rows
        self._count[start:stop] += rows > 0
        self._pieces = self._pieces or start > 0

    def steps_left_out(self, statistics: PopulationStatistics) -> int:
        """How many steps keep their running averages because no piece has reached them."""
        if not self._pieces:
            return 0
        rows = self._rows[: len(statistics.count)]
        seen = statistics.count > 0
        return int(seen[len(rows) :].sum() + (seen[: len(rows)] & (rows == 0)).sum())

    def write_to(self, statistics: PopulationStatistics) -> None:
        """Replace the running averages with these averages."""
        rows = self._rows
        total = rows.clamp(min=1)[:, None]
        count = torch.where(enough_to_estimate(rows), self._count, 0)
        statistics.replace(self._mean / total, self._var / total, count, keep=self._pieces)


def is_exporting() -> bool:
    """Whether `torch.export` is tracing; always False before torch 2.7."""
    asked = getattr(torch.compiler, "is_exporting", None)
    return asked is not None and bool(asked())


def is_recomputing() -> bool:
    """Whether a backward pass is running, where `torch.utils.checkpoint` calls layers again."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1
