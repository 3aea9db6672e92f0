"""The inputs of a layer's most recent training calls.

Running averages of a batch-normalized recurrent network lag so far behind its weights that
evaluation can collapse. Before evaluating, a layer therefore runs the inputs of its most recent
training calls again, at its current weights, and uses their statistics ("precise BN").
This module keeps those inputs; `rbn.nn.fresh_statistics` runs them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rbn.ops.operator import register as register_operator
from rbn.ops.types import valid_steps

ROWS = 1024  # sequences to keep; benchmarks/fresh_statistics.py measures the effect
# Fewer if trainable layers produced the inputs: older inputs come from older weights and are less
# accurate.
ROWS_OF_LAYERS = 256
# Statistics react most to initial states, such as those of a decoder. If these have changed in the
# meantime, only the newest sequences are used; benchmarks/decoder_statistics.py.
ROWS_OF_STATES = 64
BYTES = 128 * 2**20  # memory limit of kept inputs
LEAST_ROWS = 16  # kept even above the memory limit

States = tuple[Tensor, ...]
Signature = tuple[tuple[int, int], ...]
"""The identity and version of each parameter: changes whenever the weights do."""


class Call:
    """One training call: references to its detached arguments, not copies.

    Attributes:
        x: ``[T, B, features]`` of a layer, ``[B, features]`` of a cell; symbols have one feature.
        states: the given initial states. None if the module used its own, or continued from its
            previous call.
        lengths: number of unpadded steps of each sequence ``[B]``, or None.
        start: the time step of the first row of x.
        autocast: the autocast dtype, or None.
        most: how many sequences to keep if such calls are the most recent ones.
        trained_states: whether trainable layers produced the initial states.
        current_states: whether the initial states are parameters, or views of them: optimizers
            change these in place, so they are never outdated.
        nbytes: the size of the tensors in bytes.
    """

    def __init__(
        self,
        x: Tensor,
        states: States | None = None,
        lengths: Tensor | None = None,
        start: int = 0,
        autocast: torch.dtype | None = None,
        most: int | None = None,
        trained_states: bool = False,
        current_states: bool = False,
    ) -> None:
        self.x, self.states, self.lengths = x, states, lengths
        self.start, self.autocast = start, autocast
        self.most = ROWS if most is None else most
        self.trained_states, self.current_states = trained_states, current_states
        tensors = self._tensors()
        self._versions = [version(t) for t in tensors]
        self.nbytes = sum([t.nbytes for t in tensors])

    @property
    def unchanged(self) -> bool:
        """Whether no tensor but a parameter was modified in place since the call."""
        now = [version(t) for t in self._tensors()]
        if self.current_states:  # after x
            own = slice(1, 1 + len(self.states or ()))
            now[own] = self._versions[own]
        return self._versions == now

    def is_finite(self, ignore_padding: bool) -> Tensor:
        """Whether the input has neither NaN nor infinity, as a tensor: nothing waits for it."""
        x = self.x
        if ignore_padding and self.lengths is not None:
            valid = valid_steps(self.lengths.to(x.device), len(x))
            assert valid is not None
            x = torch.where(valid[..., None], x, 0)
        return torch.isfinite(x).all()

    def first_rows(self, rows: int) -> Call:
        """A copy of the first sequences of a layer's call."""
        states = None if self.states is None else tuple(s[:, :rows].clone() for s in self.states)
        lengths = None if self.lengths is None else self.lengths[:rows].clone()
        x = self.x[:, :rows].clone()
        return Call(x, states, lengths, self.start, self.autocast, self.most, self.trained_states)

    def _tensors(self) -> list[Tensor]:
        if self.states is None and self.lengths is None:
            return [self.x]
        return [t for t in (self.x, *(self.states or ()), self.lengths) if t is not None]


@dataclass
class _Sequences:
    """Consecutive calls on the same sequences, such as the steps of a cell."""

    calls: list[Call]
    rows: int
    nbytes: int


class RecentCalls:
    """The most recent training calls of one module, up to `ROWS` sequences or `BYTES` bytes.

    A deep copy of the module starts with an empty log that is linked to this one. A copy that is
    not trained itself but whose weights change, such as an average of models, is refreshed from its
    source's inputs.

    Attributes:
        new_rows: number of sequences added since the last estimate.
        estimated_at: the weights at the last estimate.
        norms: norms of the weights at the last estimate; empty if unknown.
    """

    def __init__(self, source: RecentCalls | None = None) -> None:
        self._kept: deque[_Sequences] = deque()
        self._rows = self._nbytes = 0  # totals of `_kept`
        self._source = source
        self._copies: weakref.WeakSet[RecentCalls] = weakref.WeakSet()
        self._returned: tuple[weakref.ref[Tensor], ...] = ()  # states of a cell's last step
        self._last_step = -1
        self._last_in_eval: weakref.ref[Tensor] | None = None  # the state of such a step
        self.new_rows = 0
        self.estimated_at: Signature | None = None
        self.norms: tuple[float, ...] = ()

    def __iter__(self) -> Iterator[list[Call]]:
        """Calls grouped by sequences, oldest first. The source's calls if this log is empty."""
        log = self._source if not self._kept and self._source is not None else self
        return iter([sequences.calls for sequences in log._kept])

    def __bool__(self) -> bool:
        return bool(self._kept) or bool(self._source and self._source._kept)

    @property
    def is_copy(self) -> bool:
        """Whether the module is a copy that was not trained itself."""
        return self._source is not None

    @property
    def has_relatives(self) -> bool:
        """Whether the module has a copy or is one, so that weights may be swapped between them."""
        return bool(self._copies) or self._source is not None

    def add(self, call: Call, rows: int, *, same_sequences: bool = False) -> None:
        """Keep one more call, on `rows` sequences.

        same_sequences: the call continues the previous call's sequences.
        """
        self._unlink()  # a copy that is trained gets its own log
        nbytes = call.nbytes
        if same_sequences and self._kept:
            last = self._kept[-1]
            last.calls.append(call)
            last.nbytes += nbytes
            self._nbytes += nbytes
        else:
            if nbytes > BYTES and rows > LEAST_ROWS:
                fit = max(LEAST_ROWS, rows * BYTES // nbytes)
                call, nbytes, rows = call.first_rows(fit), nbytes * fit // rows, fit
            self._kept.append(_Sequences([call], rows, nbytes))
            self._rows, self._nbytes = self._rows + rows, self._nbytes + nbytes
            self.new_rows += rows
        self._drop_oldest()

    def follows(self, step: int, rows: int) -> bool:
        """Whether a call from this step on continues the sequences of the previous call."""
        if not self._kept or not step > self._last_step >= 0:
            return False
        return self._kept[-1].rows == rows and self._kept[-1].nbytes < BYTES

    def returned(self, states: States | None) -> bool:
        """Whether the previous call returned these states."""
        if states is None or len(states) != len(self._returned):
            return False
        return all(ref() is state for ref, state in zip(self._returned, states, strict=True))

    def remember(self, states: States, step: int) -> None:
        """Remember the states that a call returned after this step."""
        self._returned, self._last_step = tuple([weakref.ref(state) for state in states]), step

    def continues(self, state: Tensor | None) -> bool:
        """Whether the previous step without a number in `eval()` returned this state."""
        return self._last_in_eval is not None and self._last_in_eval() is state is not None

    def remember_last(self, state: Tensor) -> None:
        """Remember the state that a step without a number returned in `eval()`."""
        self._last_in_eval = weakref.ref(state)

    def mark_estimated(self, weights: Signature, norms: tuple[float, ...]) -> None:
        """Record that the statistics belong to these weights."""
        self.estimated_at, self.norms = weights, norms
        self.new_rows = 0

    def clear(self) -> None:
        """Release all inputs."""
        self._kept.clear()
        self._rows = self._nbytes = 0
        self._unlink()
        self.new_rows = 0

    def _unlink(self) -> None:
        if self._source is not None:
            self._source._copies.discard(self)
            self._source = None

    def _drop_oldest(self) -> None:
        most = self._kept[-1].calls[0].most
        while len(self._kept) > 1 and (
            self._rows - self._kept[0].rows >= most or self._nbytes > BYTES
        ):
            oldest = self._kept.popleft()
            self._rows, self._nbytes = self._rows - oldest.rows, self._nbytes - oldest.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> RecentCalls:
        source = self if self._source is None else self._source
        copy = RecentCalls(source)
        source._copies.add(copy)
        return copy

    def __reduce__(self) -> tuple[type[RecentCalls], tuple[()]]:
        return RecentCalls, ()  # files and other processes get no inputs


def rows_to_keep(x: Tensor, states: States | None) -> int:
    """How many sequences to keep of calls with such an input and given initial states."""
    return ROWS_OF_LAYERS if x.requires_grad or are_trained(states) else ROWS


def are_trained(states: States | None) -> bool:
    """Whether the given initial states have gradients, so that older ones may be outdated."""
    return states is not None and any(state.requires_grad for state in states)


def are_parameters(states: States | None) -> bool:
    """Whether the given initial states are parameters or views of them, such as expanded ones."""
    if states is None:
        return False
    owners = [cast(Tensor, state._base) if state._is_view() else state for state in states]
    return all(owner.is_leaf and owner.requires_grad for owner in owners)


def without_outdated_states(kept: list[list[Call]]) -> list[list[Call]]:
    """The newest `ROWS_OF_STATES` sequences if trained initial states have changed, else all.

    They have changed if their mean over the older sequences differs from that over the newest by
    more than it does for random sequences: by more than ``var * (1 / older + 1 / newest)`` in the
    square, on average over features.

    Args:
        kept: calls grouped by sequences, oldest first.
    """
    first = [calls[0] for calls in kept]
    if not all(call.trained_states and call.states is not None for call in first):
        return kept
    rows = [call.x.shape[-2] for call in first]
    split = len(rows)
    while split > 0 and sum(rows[split:]) < ROWS_OF_STATES:
        split -= 1
    if split == 0:
        return kept
    chance = 1 / sum(rows[:split]) + 1 / sum(rows[split:])
    ratios = []
    for states in zip(*[cast(States, call.states) for call in first], strict=True):
        where = states[-1].device
        older, newest = (
            torch.cat([state.to(where, torch.float32) for state in part], -2)
            for part in (states[:split], states[split:])
        )
        var = torch.cat([older, newest], -2).var(-2).clamp(min=1e-12)
        ratios.append(((older.mean(-2) - newest.mean(-2)).square() / var).mean() / chance)
    return kept[split:] if float(torch.stack(ratios).mean()) > 1 else kept


def version(tensor: Tensor) -> int:
    """How often a tensor was modified in place; -1 for inference tensors, which do not count it."""
    return -1 if tensor.is_inference() else tensor._version


# In compiled graphs -------------------------------------------------------------------------------

_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(layer: Any) -> int:
    """Register a module that has `recent_calls`. Returns its key, for use in compiled graphs."""
    key = max(_layers, default=0) + 1
    _layers[key] = layer
    return key


def _keep_compiled_call(
    x: Tensor,
    states: Sequence[Tensor],
    lengths: Tensor | None,
    count: Tensor,
    start: int,
    autocast: torch.dtype | None,
    most: int,
    trained_states: bool,
    key: int,
) -> None:
    """Keep a copy of a compiled graph's call: the graph reuses the memory of its tensors."""
    layer = _layers.get(key)
    if layer is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    kept = tuple([state.clone() for state in states]) or None
    lengths = None if lengths is None else lengths.clone()
    call = Call(x.clone(), kept, lengths, start, autocast, most, trained_states)
    layer.recent_calls.add(call, x.shape[-2])


keep_compiled_call = register_operator(
    "keep_call",
    # `count` does not change. Declaring it mutated keeps the operator from being eliminated.
    "(Tensor x, Tensor[] states, Tensor? lengths, Tensor(a!) count, SymInt start, "
    "ScalarType? autocast, int most, bool trained_states, int key) -> ()",
    _keep_compiled_call,
    lambda *args: None,
)
