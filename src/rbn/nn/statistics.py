"""Population statistics of a batch-normalized layer.

Section 3 of the paper: training uses minibatch statistics, separately for each time step. Testing
uses their average over the training set, and the last step's statistics for all later steps.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rbn.nn import checks
from rbn.nn.processes import all_processes, sum_padded
from rbn.nn.recent_calls import version as _version
from rbn.ops.dispatch import average_in

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# A step that fewer sequences than this reach, and fewer than a quarter of them, uses the statistics
# of the closest earlier step: the variance of a few rows may be close to 0.
_FEW_ROWS = 16


def enough_to_estimate(rows: Tensor) -> Tensor:
    """Which steps have an estimate, bool ``[S]``, given the sequences behind each ``[S]``."""
    return (rows > 1) & (rows >= (rows.max() / 4).clamp(max=_FEW_ROWS))


class _Copies:
    """The deep copies of one `PopulationStatistics`. Their buffers grow together with the original.

    This lets the code that made a copy, such as `torch.optim.swa_utils.AveragedModel`, copy or
    average the buffers into it at any time.
    """

    def __init__(self) -> None:
        self.of: weakref.ref[PopulationStatistics] | None = None
        self._copies: weakref.WeakSet[_Copies] = weakref.WeakSet()

    def grow(self, rows: int) -> None:
        """Grow the buffers of all copies, and of their copies, to that many steps."""
        for copies in self._copies:
            copy = None if copies.of is None else copies.of()
            if copy is not None and copy.max_length is None:
                copy.grow(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copies:
        result = _Copies()
        self._copies.add(result)
        return result

    def __reduce__(self) -> tuple[type[_Copies], tuple[()]]:
        return _Copies, ()  # unpickled statistics are not linked as copies


class PopulationStatistics(nn.Module):
    """Running mean and biased variance of one normalized term, one row per time step.

    Attributes:
        mean: ``[S, features]``. S is `max_length` if given, else the number of steps seen.
        var: ``[S, features]``.
        count: ``[S]``, the number of minibatches that reached each step.

    Statistics stay in float32 or float64 when the rest of the module is cast to a 16-bit dtype.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    # Host-side cache of `count`: what it contains, the tensor and its version. See `set_cached`.
    _estimated: bool
    _seen: int
    _cached_count: Tensor | None
    _cached_version: int

    def __init__(
        self,
        features: int,
        max_length: int | None = None,
        momentum: float | None = 0.1,
        *,
        shared: bool = False,
        sync: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Start without estimates.

        Args:
            features: features of the term.
            max_length: number of steps; None grows with the data.
            momentum: weight of a new minibatch in the running average; None weights all equally.
            shared: at test time, all steps use the average over the steps (an ablation).
            sync: a minibatch consists of the rows of all processes; see `group`.
            device: device of the statistics.
            dtype: their dtype: float64, else float32.
        """
        super().__init__()
        self.features, self.max_length = features, max_length
        self.momentum, self.shared, self.sync = momentum, shared, sync
        self._forced: str | None = None  # last value set by a ``with`` block of any thread
        self._forced_by: dict[int, str] = {}  # value set by a ``with`` block, by thread id
        rows = max_length or 0
        wide = (dtype or torch.get_default_dtype()) == torch.float64
        dtype = torch.float64 if wide else torch.float32
        self.register_buffer("mean", torch.zeros(rows, features, device=device, dtype=dtype))
        self.register_buffer("var", torch.zeros(rows, features, device=device, dtype=dtype))
        self.register_buffer("count", torch.zeros(rows, device=device, dtype=torch.int64))
        self._in_graphs = False  # `estimated` as compiled graphs see it
        self.rows: Tensor | None = None  # sequences behind each step, while they are counted
        self._copies = _Copies()
        self._copies.of = weakref.ref(self)
        self.set_cached(False, 0)

    def set_cached(self, estimated: bool, seen: int) -> None:
        """Cache on the host what the buffers contain, to avoid waiting for the device.

        estimated: whether any step has an estimate. seen: the first `seen` steps all have one.
        """
        if estimated and not self._in_graphs:
            self._in_graphs = True
        count = self._buffers["count"]
        assert count is not None
        state = {"_estimated": estimated, "_seen": seen, "_cached_count": count}
        self.__dict__.update(state, _cached_version=_version(count))  # faster than as attributes

    def cached(self) -> tuple[bool, int]:
        """Returns the cached values, as `set_cached` takes them."""
        return (self._estimated, self._seen) if self._knows() else (False, 0)

    def _cache_update(self, start: int, stop: int, known: bool) -> None:
        """Cache that these steps now have an estimate. known: whether the cache was valid."""
        state = self.__dict__  # several times as fast as attribute access
        if known and stop <= state["_seen"]:  # nothing new
            state["_cached_version"] = _version(state["_cached_count"])
            return
        seen = self._seen if known else 0
        self.set_cached(True, max(stop, seen) if start <= seen else seen)

    def _knows(self) -> bool:
        """Whether the cache is valid for the current buffers.

        `functional_call` swaps in other buffers, and any code may write into them.
        """
        state = self.__dict__
        count = state["_buffers"]["count"]
        if state["_cached_count"] is not count:
            return False
        at: int = state["_cached_version"]
        return at == (count._version if at >= 0 else _version(count))

    @property
    def estimated(self) -> bool:
        """Whether any step has an estimate, as far as the host knows."""
        if torch.compiler.is_compiling():
            return self._in_graphs
        return self._estimated and self._knows()

    @property
    def known_steps(self) -> int:
        """How many of the first steps all have an estimate, as far as the host knows.

        0 in distributed training, where DDP writes another process's numbers into the buffers.
        0 in a compiled graph, which does not notice writes to the buffers.
        """
        if torch.compiler.is_compiling():
            return 0
        return self._seen if self._knows() and all_processes() is None else 0

    @property
    def uses_batch(self) -> bool:
        """Whether the owner normalizes with minibatch statistics now."""
        return self.training or self.forced is not None

    @property
    def trains(self) -> bool:
        """Whether the owner is training and not in a pass of `rbn.update_population_stats`."""
        return self.training and self.forced != "record"

    @property
    def records(self) -> bool:
        """Whether minibatch statistics currently update the running averages."""
        return self.forced == "record" or (self.training and self.forced is None)

    @property
    def group(self) -> ProcessGroup | None:
        """The processes whose rows form one minibatch now; None if each process has its own."""
        if not self.sync or not (self.training or self.forced == "record"):
            return None
        return all_processes()

    def find_estimates(self) -> bool:
        """Whether any step has an estimate. Reads the device if the cache does not say so.

        Assumes that there are estimates where values cannot be read: under `torch.func.vmap` or a
        tracer.
        """
        if self.estimated:
            return True
        if torch.compiler.is_compiling():
            return self.look()
        try:
            return self.look()
        except RuntimeError:
            return True

    def look(self) -> bool:
        """Read the buffers into the cache; waits for the device.

        Returns whether any step has an estimate.
        """
        result = self.count.device.type != "meta" and bool((self.count > 0).any())
        self.set_cached(result, seen_at_first(self.count) if result else 0)
        return result

    def reset(self) -> None:
        """Discard all estimates."""
        for buffer in (self.mean, self.var, self.count):
            buffer.zero_()
        self._in_graphs = False
        self.set_cached(False, 0)

    @torch.no_grad()
    def update(
        self, mean: Tensor, var: Tensor, start: int = 0, reached: Tensor | None = None
    ) -> None:
        """Update the running averages with one minibatch's statistics, from step `start` on.

        Args:
            mean: ``[T, features]``.
            var: ``[T, features]``, biased.
            start: the time step of the first row.
            reached: bool ``[T]``, the steps that enough sequences reached; all by default.
        """
        stop = start + mean.shape[0]
        if self.max_length is None:
            self.grow(stop)
        elif stop > self.max_length:  # drop the steps beyond max_length
            keep = max(0, self.max_length - start)
            mean, var, stop = mean[:keep], var[:keep], start + keep
            reached = None if reached is None else reached[:keep]
            if keep == 0:
                return
        known = not torch.compiler.is_compiling() and self._knows()
        count = self.count[start:stop]
        if self.momentum is None:
            weight = (count + 1).to(self.mean.dtype).reciprocal()
        else:  # the first estimate of a step has weight 1
            weight = torch.where(count > 0, self.momentum, self.mean.new_ones(count.shape[0]))
        if reached is not None:
            weight = torch.where(reached, weight, 0)
        self.mean[start:stop].lerp_(mean.to(self.mean.dtype), weight[:, None])
        self.var[start:stop].lerp_(var.to(self.var.dtype), weight[:, None])
        count += 1 if reached is None else reached  # last: `torch.func` may reject the lines above
        if torch.compiler.is_compiling():
            self._in_graphs = True
        elif reached is None:
            self._cache_update(start, stop, known)
        else:  # maybe no step was reached
            self.set_cached(known and self._estimated, self._seen if known else 0)

    @torch.no_grad()
    def replace(self, mean: Tensor, var: Tensor, count: Tensor, *, keep: bool = False) -> None:
        """Replace the running averages with new estimates; waits for the device.

        Args:
            mean: ``[S, features]``, for the first S steps.
            var: ``[S, features]``, biased.
            count: ``[S]``, the number of minibatches behind each step; 0 means no estimate.
            keep: steps without a new estimate keep their running average.
        """
        with torch.inference_mode(False):
            if self.max_length is None:
                self.grow(len(count))
            if self.mean.is_inference():  # inference tensors cannot be written to here
                self.mean, self.var = self.mean.clone(), self.var.clone()
                self.count = self.count.clone()
            rows = min(len(count), len(self.count))
            new = (count[:rows] > 0).to(self.count.device)
            for old, estimate in ((self.mean, mean), (self.var, var), (self.count, count)):
                estimate = estimate[:rows].to(old)
                chosen = new if old.dim() == 1 else new[:, None]
                old[:rows] = torch.where(chosen, estimate, old[:rows] if keep else 0)
                if not keep:
                    old[rows:] = 0
        self._in_graphs = self.look()

    def read(self, start: int, steps: int) -> tuple[Tensor, Tensor]:
        """Mean and variance for `steps` steps from `start` on, ``[S', features]``, S' <= steps.

        If there are fewer rows than steps, the last row serves all later steps. A step without its
        own estimate uses the closest earlier estimate; steps before the first estimate use the
        first. In compiled or exported programs S' is `steps`, so that one program serves any start.
        """
        rows = self.count.shape[0]
        compiling = torch.compiler.is_compiling()
        if not self.shared and not compiling:
            start = min(start, rows - 1)
            stop = min(start + steps, rows)
            if stop <= self.known_steps:
                mean, var = _part(self.mean, start, stop), _part(self.var, start, stop)
                # A backward pass needs them unchanged.
                return (mean.clone(), var.clone()) if torch.is_grad_enabled() else (mean, var)
        seen = self.count > 0
        if self.shared:
            weight = (seen.to(self.mean.dtype) / seen.sum())[:, None]
            return (self.mean * weight).sum(0, True), (self.var * weight).sum(0, True)
        # position[n]: the n-th step that has an estimate. ONNX supports these ops, but not cummax.
        number = seen.cumsum(0)
        position = number.new_zeros(rows + 1).scatter(
            0, number * seen, torch.arange(rows, device=number.device)
        )
        result = position[number.clamp(min=1)]
        if compiling:  # always `steps` rows: `start` may be an input of the program
            step = torch.arange(steps, device=number.device) + start
            result = result[step.clamp(max=rows - 1)]
        else:
            result = result[start:stop]
        return self.mean[result], self.var[result]

    def count_rows(self, start: int, rows: Tensor) -> None:
        """Count sequences ``[T]`` behind the estimates of the steps from `start` on."""
        if self.rows is not None and not torch.compiler.is_compiling():
            stop = start + len(rows)
            self.rows = F.pad(self.rows, (0, max(0, stop - len(self.rows))))
            self.rows[start:stop] += rows

    def drop_few(self, group: ProcessGroup | None = None) -> None:
        """Discard the estimates of steps that too few of the counted sequences reach.

        group: the processes whose sequences count together.
        """
        rows, self.rows = self.rows, None
        assert rows is not None
        if group is not None:
            rows = sum_padded(rows, group)
        if not len(rows):
            return
        few = ~enough_to_estimate(rows)[: len(self.count)]
        for buffer in (self.mean, self.var, self.count):
            buffer[: len(few)][few] = 0
        self.look()

    def grow(self, rows: int) -> None:
        """Grow the buffers to that many steps."""
        missing = rows - self.count.shape[0]
        compiling = torch.compiler.is_compiling()  # never grows buffers in inference mode
        if missing > 0 and not compiling and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # training needs these buffers, too
                self.grow(rows)
        elif missing > 0:
            known = (False, 0) if compiling else self.cached()
            self.mean = torch.cat([self.mean, self.mean.new_zeros(missing, self.features)])
            self.var = torch.cat([self.var, self.var.new_zeros(missing, self.features)])
            self.count = torch.cat([self.count, self.count.new_zeros(missing)])
            if not compiling:
                self.set_cached(*known)
                self._copies.grow(rows)

    @property
    def forced(self) -> str | None:
        """``"batch"`` or ``"record"`` inside such a ``with`` block; see `batch_statistics`.

        The value applies to the thread of the block. Compiled code and the threads of
        `torch.nn.DataParallel` use the value of any thread.
        """
        if torch.compiler.is_compiling() or "_is_replica" in self.__dict__:
            return self._forced
        return self._forced_by.get(threading.get_ident())

    @forced.setter
    def forced(self, value: str | None) -> None:
        self._forced = value
        if torch.compiler.is_compiling():
            return
        if value is None:
            self._forced_by.pop(threading.get_ident(), None)
        else:
            self._forced_by[threading.get_ident()] = value

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and files, without the `forced` value of a `batch_statistics` block."""
        estimated, seen = self.cached()
        state = {"_estimated": estimated, "_seen": seen, "_cached_count": None}
        return self.__dict__ | state | {"_forced": None, "_forced_by": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the cache of the original: it is valid for this copy, too."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._copies.of = weakref.ref(self)
        self.set_cached(self._estimated, self._seen)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Casts to a 16-bit type move the statistics but do not round them."""
        kept = {"mean": self.mean, "var": self.var}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in kept.items():
            new = getattr(self, name)
            if new.dtype in (torch.float16, torch.bfloat16):
                setattr(self, name, old.to(device=new.device, dtype=torch.float32))
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Accepts any number of steps, up to max_length if given."""
        error_msgs: list[str] = args[-1] if args else kwargs["error_msgs"]
        names = ("mean", "var", "count")
        if not all(isinstance(state_dict.get(prefix + name), Tensor) for name in names):
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            return
        mean, var, count = (state_dict[prefix + name] for name in names)
        rows = mean.shape[0] if mean.dim() == 2 else -1
        wanted = (rows, self.features)
        if (
            rows < 0
            or tuple(mean.shape) != wanted
            or var.shape != mean.shape
            or count.shape != (rows,)
        ):
            error_msgs.append(
                f"{prefix}mean, var and count must have shapes [steps, {self.features}], "
                f"[steps, {self.features}] and [steps], got {list(mean.shape)}, "
                f"{list(var.shape)} and {list(count.shape)}"
            )
            return
        for name, value in (("var", var), ("count", count)):
            if value.device.type != "meta" and bool((value < 0).any()):
                error_msgs.append(f"{prefix}{name} must not be negative, got {value.min().item()}")
                return
        for name, value in (("mean", mean), ("var", var)):
            if value.device.type != "meta" and not bool(value.isfinite().all()):
                checks.warn(
                    f"{prefix}{name} of the state dict has values that are not finite, so eval() "
                    "will give NaN: re-estimate with rbn.update_population_stats(model, batches)"
                )
        if self.max_length is not None and rows > self.max_length:
            last = rows if count.device.type == "meta" else _last_seen(count)
            if last > self.max_length:
                error_msgs.append(
                    f"{prefix}mean has statistics of {last} steps, but this layer holds at most "
                    f"{self.max_length} (its max_length, or 1 with input_stats='sequence')"
                )
                return
            rows = self.max_length  # later rows have no estimate
            mean, var, count = mean[:rows], var[:rows], count[:rows]
            state_dict = state_dict | {
                prefix + name: value for name, value in zip(names, (mean, var, count), strict=True)
            }
        if self.max_length is not None and rows < self.max_length:
            state_dict = dict(state_dict)
            missing = self.max_length - rows
            for name, value in zip(names, (mean, var, count), strict=True):
                fill = value.new_zeros(missing, *value.shape[1:])
                state_dict[prefix + name] = torch.cat([value, fill])
        elif rows != len(self.count):
            with torch.inference_mode(False):  # training needs these buffers, too
                self.mean = self.mean.new_zeros(rows, self.features)
                self.var = self.var.new_zeros(rows, self.features)
                self.count = self.count.new_zeros(rows)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name in ("mean", "var"):
            if getattr(self, name).dtype in (torch.float16, torch.bfloat16):  # with assign=True
                setattr(self, name, getattr(self, name).float())
        result = count.device.type != "meta" and bool((count > 0).any())
        self._in_graphs = result
        self.set_cached(result, seen_at_first(count) if result else 0)

    def extra_repr(self) -> str:
        """The options, for ``print(module)``."""
        return f"{self.features}, max_length={self.max_length}, momentum={self.momentum}"


@contextlib.contextmanager
def temporarily(
    statistics: Iterable[PopulationStatistics], name: str, value: Any
) -> Iterator[None]:
    """Set one attribute of all these statistics inside the ``with`` block."""
    before = [(s, getattr(s, name)) for s in statistics]
    for s, _ in before:
        setattr(s, name, value)
    try:
        yield
    finally:
        for s, old in before:
            setattr(s, name, old)


Update = tuple[PopulationStatistics, Tensor, Tensor, int, Tensor | None]


def update_all(updates: list[Update]) -> None:
    """`PopulationStatistics.update` for several terms of one layer, in fewer operations.

    updates: for each term its statistics and the arguments of `update`.
    """
    together: dict[float, list[tuple[Tensor, ...]]] = {}
    cached: list[tuple[PopulationStatistics, int, int, bool]] = []
    compiling = torch.compiler.is_compiling()
    seen = not compiling and all_processes() is None  # every step already has an estimate
    for statistics, mean, var, start, reached in updates:
        stop, momentum = start + mean.shape[0], statistics.momentum
        rows = statistics._buffers  # several times as fast as attribute access
        means, variances, count = rows["mean"], rows["var"], rows["count"]
        assert means is not None
        assert variances is not None
        assert count is not None
        if momentum is None or reached is not None or stop > count.shape[0]:
            statistics.update(mean, var, start, reached)
            continue
        known = not compiling and statistics._knows()
        cached.append((statistics, start, stop, known))
        seen = seen and known and stop <= statistics._seen
        if mean.dtype != means.dtype:
            mean, var = mean.to(means.dtype), var.to(means.dtype)
        if count.shape[0] != stop - start:
            part = slice(start, stop)
            means, variances, count = means[part], variances[part], count[part]
        together.setdefault(momentum, []).append((means, variances, mean, var, count))
    for momentum, terms in together.items():
        average_in(terms, momentum, seen)
    for statistics, start, stop, known in cached:
        if compiling:
            statistics._in_graphs = True
        else:
            statistics._cache_update(start, stop, known)


def _part(rows: Tensor, start: int, stop: int) -> Tensor:
    return rows if stop - start == rows.shape[0] else rows[start:stop]


def _last_seen(count: Tensor) -> int:
    """Number of steps up to the last one with an estimate; waits for the device."""
    return max((k for k, seen in enumerate(count.tolist(), 1) if seen > 0), default=0)


def seen_at_first(count: Tensor) -> int:
    """Number of steps before the first one without an estimate; waits for the device."""
    return int((count > 0).to(torch.int64).cumprod(0).sum())
