"""What all recurrent modules share: parameters by name, initial states, one layer's run.

A kind of network (`rbn.nn.batch_norm_lstm` and its siblings) says which parameters it has and which
recurrence of `rbn.ops` it runs; `Layers` makes a stack of it in the shape of `torch.nn.LSTM`,
`Cell` a single step in the shape of `torch.nn.LSTMCell`.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import rbn.ops as ops
from rbn.nn import checks, init
from rbn.nn.processes import as_long_as_all, with_steps
from rbn.ops import steps
from rbn.ops.definition import Arguments, Definition
from rbn.ops.dispatch import run
from rbn.ops.types import valid_steps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

INITIAL_STATES = ("learned", "zeros")
States = tuple[Tensor, ...]
GivenStates = TypeVar("GivenStates")  # as users see them: (h, c) of an LSTM, h of a simple RNN


def autocast_on(device: str) -> bool:
    """`torch.is_autocast_enabled`, which does not know the meta device."""
    return device != "meta" and torch.is_autocast_enabled(device)


class Recurrence(nn.Module, abc.ABC):
    """One kind of recurrent network: its parameters and how a layer of it runs."""

    definition: ClassVar[Definition]  # of the operator that runs
    gates: ClassVar[int] = 4  # rows of the weight matrices, in hidden sizes
    states: ClassVar[tuple[str, ...]] = ("h0", "c0")
    weight_dropout = 0.0  # of layers; cells have none
    _common_steps: int | None = None  # that two sequences of all processes reach, while they run

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool,
        initial_state: str,
        hidden_noise: float,
        zoneout: float | tuple[float, float],
    ) -> None:
        super().__init__()
        self.input_size = checks.positive_integer("input_size", input_size)
        self.hidden_size = checks.positive_integer("hidden_size", hidden_size)
        self.has_bias = checks.boolean("bias", bias)
        self.initial_state = checks.choice("initial_state", initial_state, INITIAL_STATES)
        self.hidden_noise = checks.not_negative("hidden_noise", hidden_noise)
        self.zoneout = checks.zoneout_rates(zoneout, len(self.states))

    def extra_repr(self) -> str:
        """The sizes, and the options that differ from the defaults, for ``print(module)``."""
        text = f"{self.input_size}, {self.hidden_size}"
        for name, option in inspect.signature(type(self)).parameters.items():
            if option.default is inspect.Parameter.empty or name in ("device", "dtype"):
                continue
            # A subclass may keep its own options under other names, or not at all.
            value = self.has_bias if name == "bias" else getattr(self, name, option.default)
            if isinstance(value, frozenset):
                value = tuple(sorted(value))
            if value not in (option.default, (option.default,)):  # one rate is kept as a tuple
                text += f", {name}={value!r}"
        return text

    # Parameters ---------------------------------------------------------------------------------

    def _add_parameters(self, suffix: str, input_size: int, factory: dict[str, Any]) -> None:
        """The parameters of one layer and direction, named as torch names them."""
        rows, hidden = self.gates * self.hidden_size, self.hidden_size
        self._add(f"weight_ih{suffix}", (rows, input_size), factory)
        self._add(f"weight_hh{suffix}", (rows, hidden), factory)
        if self.has_bias:
            self._add(f"bias{suffix}", (rows,), factory)
        self._add_normalization(suffix, factory)
        if self.initial_state == "learned":
            for state in self.states:
                self._add(f"{state}{suffix}", (hidden,), factory)

    def _add(self, name: str, shape: tuple[int, ...], factory: dict[str, Any]) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)))

    def _add_normalization(self, suffix: str, factory: dict[str, Any]) -> None:
        """The scales, shifts and statistics of one layer and direction."""

    def _parameter(self, name: str) -> Tensor | None:
        """A parameter, if there is one of that name."""
        parameter: Tensor | None = self._parameters.get(name)
        # One that is computed, say by `torch.nn.utils.parametrize`, is an attribute alone.
        return getattr(self, name, None) if parameter is None else parameter

    def _own(self, name: str) -> Tensor:
        """A parameter that there is."""
        parameter = self._parameter(name)
        assert parameter is not None, name
        return parameter

    def reset_parameters(self) -> None:
        """Start as the paper's models do: orthogonal weights, forget bias 1, all else 0."""
        init.zeros_but_weights_(self)
        init.orthogonal_weights_(self)
        init.forget_bias_(self, 1.0)

    # TorchScript --------------------------------------------------------------------------------

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by `torch.jit.script`."""
        self._refuse_torchscript("script")

    def _slow_forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Called in the place of `forward` by `torch.jit.trace`."""
        self._refuse_torchscript("trace")

    def _refuse_torchscript(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"torch.jit.{name} does not work with {type(self).__name__}: use "
            "torch.export.export, or torch.onnx.export(..., dynamo=True)"
        )

    # One layer, one direction -------------------------------------------------------------------

    @abc.abstractmethod
    def _arguments(
        self,
        suffix: str,
        input: Tensor,
        weight_ih: Tensor | None,
        states: States,
        lengths: Tensor | None,
        start: int,
    ) -> Arguments:
        """The operator's arguments for one layer and direction.

        Shapes: input ``[T, B, I]``, or the input term ``[T, B, gates * H]`` without weight_ih;
        states ``[B, H]``, or ``[H]`` for all rows.
        """

    def _results(
        self, suffix: str, results: tuple[Any, ...], lengths: Tensor | None, start: int
    ) -> tuple[Tensor, States]:
        """The output and the last states, from all that the operator returned."""
        output, *states, _ = results
        return output, tuple(states)

    def _check_ready(self, batch: int) -> bool:
        """Refuse what cannot be computed; whether to fall back on the minibatch's statistics."""
        return False

    def _batch_statistics(self) -> AbstractContextManager[None]:
        """Normalizes with the statistics of the minibatch inside the ``with`` block."""
        return contextlib.nullcontext()

    def _keep_call(
        self,
        x: Tensor,
        states: States | None,
        lengths: Tensor | None,
        start: int,
        rows: int,
    ) -> None:
        """Keep the arguments of a training call, where the statistics will need them."""

    def _keep_states(self, states: States, step: int) -> None:
        """Note what a step of a cell returned, to know whether the next one continues from it."""

    @abc.abstractmethod
    def _run_call(
        self, x: Tensor, states: States | None, lengths: Tensor | None, start: int
    ) -> States:
        """Run on arguments that were checked before; the last states."""

    def _group(self) -> ProcessGroup | None:
        """The processes whose rows make one minibatch with this one's, where there are any."""
        return None

    def _layer(
        self,
        directions: list[tuple[str, Tensor, States | None]],
        lengths: Tensor | None,
        start: int,
    ) -> list[tuple[Tensor, States]]:
        """Run the directions of a layer.

        directions: for each one the suffix of its parameters, its input and the given states.
        """
        calls: list[Arguments] = []
        empty: list[tuple[Tensor, States]] = []
        group = self._group()
        for suffix, x, given in directions:
            weight = self._own(f"weight_ih{suffix}")
            weight_ih: Tensor | None = None
            if x.is_floating_point():
                weight_ih = weight if weight.dtype == x.dtype else weight.to(x.dtype)
            else:  # W_x x_t for a one-hot x_t is a column of W_x
                x = ops.symbol_rows(x[..., 0], weight, self._type(weight))
            batch = x.shape[1]
            states = self._initial_states(suffix, batch, weight) if given is None else given
            if batch == 0 and group is None:
                # No number depends on anything, but backward() finds gradients, zeros, of it all.
                nothing = sum((t.sum().to(x.dtype) for t in (*self.parameters(), *states)), x.sum())
                output = x.new_zeros(x.shape[0], 0, self.hidden_size) + nothing
                empty.append(
                    (output, tuple(x.new_zeros(0, self.hidden_size) + nothing for _ in states))
                )
            else:
                calls.append(self._arguments(suffix, x, weight_ih, states, lengths, start))
        if empty:
            return empty
        return [
            self._results(suffix, results, lengths, start)
            for (suffix, _, _), results in zip(
                directions, run(self.definition, calls, group), strict=True
            )
        ]

    def _initial_states(self, suffix: str, batch: int, like: Tensor) -> States:
        """The learned ``[H]`` or zero ``[B, H]`` initial states, with noise on h0 in training."""
        if self.initial_state == "learned":
            states = [self._own(state + suffix) for state in self.states]
        else:
            states = [like.new_zeros(batch, self.hidden_size) for _ in self.states]
        if self.hidden_noise > 0 and self._draws_noise():
            rows = states[0].expand(batch, self.hidden_size)
            states[0] = rows + self.hidden_noise * torch.randn_like(
                rows, memory_format=torch.contiguous_format
            )
        return tuple(states)

    def _draws_noise(self) -> bool:
        """Whether the initial states are noisy now."""
        return self.training

    def _zoneout(self, rate: float, x: Tensor) -> tuple[Tensor | None, float]:
        """A mask of the units that keep their value, bool ``[T, B, H]``, or the rate in eval()."""
        if rate == 0 or not self.training:
            return None, rate
        shape = (*x.shape[:2], self.hidden_size)
        return torch.rand(shape, device=x.device, dtype=torch.float32) < rate, 0.0

    def _recurrent_weight(self, suffix: str, dtype: torch.dtype) -> Tensor:
        """W_h of one layer and direction as it is in this call.

        With `weight_dropout`, other weights are missing in each call, the same for all steps.
        """
        weight = self._own(f"weight_hh{suffix}")
        if weight.dtype != dtype:
            weight = weight.to(dtype)
        if self.weight_dropout > 0 and self.training:
            return F.dropout(weight, self.weight_dropout)
        return weight

    # Types --------------------------------------------------------------------------------------

    def _weight(self) -> Tensor:
        """Any weight: all have one dtype and device."""
        for parameter in self._parameters.values():  # the first of them, usually
            if parameter is not None and parameter.dim() == 2:
                return parameter
        for parameter in self.parameters():
            if parameter.dim() == 2:
                return parameter
        # A replica, as `torch.nn.DataParallel` makes them, has its parameters as attributes alone.
        return self._own("weight_hh_l0" if hasattr(self, "weight_hh_l0") else "weight_hh")

    def _under_autocast(self) -> bool:
        """Whether autocast is on for this layer: as in PyTorch, not if it is of float64."""
        weight = self._weight()
        return autocast_on(weight.device.type) and weight.dtype != torch.float64

    def _autocast(self, x: Tensor) -> Tensor:
        """X in the type that autocast asks for on its device, if it does and x has values."""
        if not x.is_floating_point():
            return x
        return x.to(self._type(x))

    def _type(self, x: Tensor) -> torch.dtype:
        """The type that autocast asks for on the device of x, if it does; else that of x."""
        return torch.get_autocast_dtype(x.device.type) if self._under_autocast() else x.dtype

    def _given_states(self, hx: Any, shape: tuple[int, ...]) -> States:
        """The user's initial states, checked, one tensor for each of `states`."""
        names = [state.removesuffix("0") for state in self.states]
        if len(names) == 1:
            values = (hx,)
        elif isinstance(hx, (tuple, list)) and len(hx) == 2:
            values = tuple(hx)
        else:
            raise TypeError(f"hx must be a pair (h_0, c_0), got {type(hx).__name__}")
        weight, autocast = self._weight(), self._under_autocast()
        return tuple(
            checks.state(f"{name}_0 in hx", value, shape, weight, autocast)
            for name, value in zip(names, values, strict=True)
        )

    def _wrap(self, states: States) -> Any:
        """States as torch returns them: a pair for LSTMs, one tensor for simple RNNs."""
        return states if len(states) > 1 else states[0]


class Layers(Recurrence, Generic[GivenStates]):
    """A stack of layers, one- or two-directional, called like `torch.nn.LSTM`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        weight_dropout: float,
        **options: Any,
    ) -> None:
        """Check the options. The subclass calls `_build` when it has checked its own."""
        super().__init__(input_size, hidden_size, bias=bias, **options)
        self.bias = bias
        self.num_layers = checks.positive_integer("num_layers", num_layers)
        self.batch_first = checks.boolean("batch_first", batch_first)
        self.dropout = checks.probability("dropout", dropout)
        if self.dropout and self.num_layers == 1:
            checks.warn(
                "dropout is applied to the output of every layer except the last, so it needs "
                f"num_layers greater than 1, got dropout={dropout} and num_layers=1"
            )
        self.bidirectional = checks.boolean("bidirectional", bidirectional)
        self.directions = 2 if bidirectional else 1
        self.weight_dropout = checks.probability("weight_dropout", weight_dropout)
        if self.weight_dropout == 1:
            raise ValueError(
                "weight_dropout must be below 1, got 1: no recurrent weight would stay"
            )

    def _build(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Make all parameters and start them."""
        checks.floating("dtype", dtype)
        for layer in range(self.num_layers):
            size = self.input_size if layer == 0 else self.hidden_size * self.directions
            for suffix in self._suffixes(layer):
                self._add_parameters(suffix, size, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _suffixes(self, layer: int) -> tuple[str, ...]:
        return (f"_l{layer}", f"_l{layer}_reverse")[: self.directions]

    def flatten_parameters(self) -> None:
        """Does nothing; here so that code written for `torch.nn.LSTM` runs."""

    @overload
    def forward(
        self,
        input: Tensor,
        hx: GivenStates | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> tuple[Tensor, GivenStates]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: GivenStates | None = None, *, start: int = 0
    ) -> tuple[PackedSequence, GivenStates]: ...

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: GivenStates | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        *,
        start: int = 0,
    ) -> tuple[Tensor | PackedSequence, GivenStates]:
        """Run the layer over a batch of sequences.

        Args:
            input: ``[T, B, input_size]``, ``[B, T, input_size]`` with batch_first,
                ``[T, input_size]`` for one sequence without a batch, or a PackedSequence. Integers
                of one dimension less are symbols from 0 to input_size - 1 and stand for one-hot
                vectors: a look-up in the weights instead of a product with zeros.
            hx: initial states as `torch.nn.LSTM` takes them, ``[layers * directions, B, H]`` each;
                overrides the learned ones.
            lengths: unpadded steps of each sequence, integers ``[B]`` in any order.
            start: the time step at which the input begins, for sequences fed in pieces: chooses the
                statistics. One direction only.

        Returns:
            ``output, states`` with the shapes of `torch.nn.LSTM`. Padded positions of the output
            are zero; the states are those after each sequence's last unpadded step.
        """
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise ValueError("lengths must not be given with a PackedSequence: it has its own")
            return self._forward_packed(input, hx, start)
        input = self._prepared(input)
        if input.dim() == 2:
            if lengths is not None:
                raise ValueError("lengths needs a batched input, got one without a batch")
            if hx is not None:
                shape = (self.num_layers * self.directions, self.hidden_size)
                hx = self._wrap(tuple(h[:, None] for h in self._given_states(hx, shape)))
            output, finals = self._forward_steps(input[:, None], hx, None, start)
            return output[:, 0], self._wrap(tuple(state[:, 0] for state in finals))
        if self.batch_first:
            output, finals = self._forward_steps(input.transpose(0, 1), hx, lengths, start)
            return output.transpose(0, 1), self._wrap(finals)
        output, finals = self._forward_steps(input, hx, lengths, start)
        return output, self._wrap(finals)

    if TYPE_CHECKING:
        __call__ = forward

    def _prepared(self, input: Tensor) -> Tensor:
        """An input in the layer's type, or symbols as int64 with a last dimension of one."""
        weight = self._weight()
        if checks.is_symbols(input):
            return checks.symbols(input, self.input_size, weight)
        autocast = self._under_autocast()
        checks.sequence_input(input, self.input_size, weight, autocast)
        return input.to(self._type(input)) if autocast else input

    def _forward_steps(self, x: Tensor, hx: Any, lengths: Any, start: int) -> tuple[Tensor, States]:
        """Everything for x ``[T, B, input_size]``: what is left of the checks, then the work."""
        steps, batch, _ = x.shape
        if steps == 0:
            raise ValueError("input must have at least one time step, got none")
        start = checks.whole("start", start)
        if start < 0 or (self.bidirectional and start > 0):
            raise ValueError(f"start must be 0, or positive with one direction, got {start}")
        lengths = checks.lengths(lengths, steps, batch, x.device)
        shape = (self.num_layers * self.directions, batch, self.hidden_size)
        given = None if hx is None else self._given_states(hx, shape)
        untrained = self._check_ready(batch)
        self._keep_call(x, given, lengths, start, batch)
        if untrained:
            with self._batch_statistics():
                return self._stack(x, given, lengths, start)
        group = self._group()
        if group is None:
            return self._stack(x, given, lengths, start)
        x, lengths, self._common_steps = as_long_as_all(x, lengths, group)
        try:
            output, finals = self._stack(x, given, lengths, start)
        finally:
            self._common_steps = None
        return with_steps(output, steps), finals

    def _run_call(
        self, x: Tensor, states: States | None, lengths: Tensor | None, start: int
    ) -> States:
        return self._stack(x, states, lengths, start)[1]

    def _stack(
        self, x: Tensor, given: States | None, lengths: Tensor | None, start: int
    ) -> tuple[Tensor, States]:
        """All layers and directions over x ``[T, B, input_size]``."""
        if lengths is not None and self._ignores_padding():
            valid = valid_steps(lengths, x.shape[0])
            assert valid is not None
            x = torch.where(valid[:, :, None], x, 0)  # whatever it holds, it must not spread
        finals: list[States] = []
        for layer in range(self.num_layers):
            directions: list[tuple[str, Tensor, States | None]] = []
            for direction, suffix in enumerate(self._suffixes(layer)):
                k = layer * self.directions + direction
                states = None if given is None else tuple(state[k] for state in given)
                directions.append((suffix, reverse(x, lengths) if direction == 1 else x, states))
            outputs = []
            for direction, (output, final) in enumerate(self._layer(directions, lengths, start)):
                outputs.append(reverse(output, lengths) if direction == 1 else output)
                finals.append(final)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
            if self.dropout and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        if len(finals) == 1:
            return x, tuple([state.unsqueeze(0) for state in finals[0]])
        return x, tuple(torch.stack(state) for state in zip(*finals, strict=True))

    def _ignores_padding(self) -> bool:
        """Whether padded positions have no influence at all."""
        return True

    def _forward_packed(self, packed: PackedSequence, hx: Any, start: int) -> tuple[Any, Any]:
        """Run in the packed rows' own order and pack the result the same way."""
        checks.packed(packed)
        padded, lengths = pad_packed_sequence(PackedSequence(packed.data, packed.batch_sizes))
        padded = self._prepared(padded)
        if hx is not None and packed.sorted_indices is not None:
            shape = (self.num_layers * self.directions, padded.shape[1], self.hidden_size)
            states = self._given_states(hx, shape)
            hx = self._wrap(tuple(h[:, packed.sorted_indices] for h in states))
        output, finals = self._forward_steps(padded, hx, lengths, start)
        if packed.unsorted_indices is not None:
            finals = tuple(state[:, packed.unsorted_indices] for state in finals)
        data = pack_padded_sequence(output, lengths).data
        indices = packed.sorted_indices, packed.unsorted_indices
        return PackedSequence(data, packed.batch_sizes, *indices), self._wrap(finals)


class Cell(Recurrence, Generic[GivenStates]):
    """One step at a time, called like `torch.nn.LSTMCell`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        **options: Any,
    ) -> None:
        """Check the options. The subclass calls `_build` when it has checked its own."""
        super().__init__(input_size, hidden_size, bias=bias, **options)

    def _build(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Make all parameters and start them."""
        checks.floating("dtype", dtype)
        self._add_parameters("", self.input_size, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _run_call(
        self, x: Tensor, states: States | None, lengths: Tensor | None, start: int
    ) -> States:
        ((_, states),) = self._layer([("", x[None], states)], None, start)
        return states

    def forward(self, input: Tensor, hx: GivenStates | None = None, step: int = 0) -> GivenStates:
        """One step.

        Args:
            input: ``[B, input_size]``, or ``[input_size]`` without a batch.
            hx: previous states as `torch.nn.LSTMCell` takes them, ``[B, H]`` each; by default the
                initial ones.
            step: the time step, from 0: chooses the statistics.

        Returns:
            The states after the step, ``(h, c)`` or ``h``, ``[B, H]`` each.
        """
        if not self.training:
            streamed = self._stream(input, hx, step)
            if streamed is not None:
                result: GivenStates = self._wrap(streamed)
                return result
        if not isinstance(input, Tensor) or input.dim() not in (1, 2):
            got = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            raise ValueError(f"input must have shape [B, {self.input_size}], got {got}")
        checks.features(input, self.input_size, self._weight(), self._under_autocast())
        step = checks.whole("step", step)
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        batched = input.dim() == 2
        x = input if batched else input[None]
        given: States | None = None
        if hx is not None:
            shape = (x.shape[0], self.hidden_size) if batched else (self.hidden_size,)
            given = self._given_states(hx, shape)
            if not batched:
                given = tuple(state[None] for state in given)
        x = self._autocast(x)
        untrained = self._check_ready(x.shape[0])
        self._keep_call(x, given, None, step, x.shape[0])
        with self._batch_statistics() if untrained else contextlib.nullcontext():
            states = self._run_call(x, given, None, step)
        self._keep_states(states, step)
        found: GivenStates = self._wrap(states if batched else tuple(state[0] for state in states))
        return found

    if TYPE_CHECKING:
        __call__ = forward

    def _stream(self, input: Any, hx: Any, step: Any) -> States | None:
        """The states after one step in `eval()`, in as little time as possible.

        None for whatever is not a plain step, bad arguments too: `forward` goes its longer way.
        """
        if type(input) is not Tensor or type(step) is not int or step < 0:
            return None
        if not steps.supported(input) or autocast_on(input.device.type):
            return None
        like = self._weight()
        states = (hx,) if len(self.states) == 1 else hx
        if hx is not None and (
            not isinstance(states, (tuple, list)) or len(states) != len(self.states)
        ):
            return None
        batch, dtype, device = input.shape[:-1], like.dtype, like.device
        if input.dtype != dtype or input.device != device or 0 in batch:
            return None
        if input.shape != (*batch, self.input_size) or len(batch) > 1:
            return None
        if hx is None:
            rows = batch or (1,)
            states = [s.expand(*rows, -1) for s in self._initial_states("", rows[0], like)]
        else:
            shape = (*batch, self.hidden_size)
            for state in states:
                if type(state) is not Tensor or state.shape != shape:
                    return None
                if state.dtype != dtype or state.device != device:
                    return None
        if batch:
            return self._step(input, tuple(states), step)
        states = tuple(state if state.dim() == 2 else state[None] for state in states)
        found = self._step(input[None], states, step)
        return None if found is None else tuple(state[0] for state in found)

    @abc.abstractmethod
    def _step(self, x: Tensor, states: States, step: int) -> States | None:
        """The states after one step in `eval()`, all tensors ``[B, ...]``, by `rbn.ops.steps`.

        None where that does not cover the case: `_layer` runs then.
        """


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """X ``[T, B, F]`` backwards in time: only the unpadded part, padding stays at the end."""
    if lengths is None:
        return x.flip(0)
    steps = torch.arange(x.shape[0], device=x.device)[:, None]
    index = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return x.gather(0, index[:, :, None].expand_as(x))
