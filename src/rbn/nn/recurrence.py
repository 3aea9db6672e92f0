"""The base of all recurrent modules: parameters by name, initial states, one layer's run.

A kind of network (`rbn.nn.batch_norm_lstm` and its siblings) says which parameters it has and which
recurrence of `rbn.ops` it runs. `rbn.nn.layers` makes a stack of it in the shape of
`torch.nn.LSTM`, `rbn.nn.cell` a single step in the shape of `torch.nn.LSTMCell`.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rbn.ops as ops
from rbn.nn import checks, init
from rbn.ops.definition import Arguments, Definition
from rbn.ops.dispatch import run

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
        """Returns the named parameter, or None."""
        parameter: Tensor | None = self._parameters.get(name)
        # One that is computed, say by `torch.nn.utils.parametrize`, is an attribute alone.
        return getattr(self, name, None) if parameter is None else parameter

    def _own(self, name: str) -> Tensor:
        """Returns the named parameter; it must exist."""
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
