"""The base class of all recurrent modules: parameters, initial states, running one layer.

Each network type (`rbn.nn.batch_norm_lstm` and its siblings) defines its parameters and the
operator of `rbn.ops` that it runs. `rbn.nn.layers` stacks it like `torch.nn.LSTM`; `rbn.nn.cell`
runs a single step like `torch.nn.LSTMCell`.
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
from rbn.ops.definition import Arguments, Definition, LSTMArguments
from rbn.ops.dispatch import run

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

INITIAL_STATES = ("learned", "zeros")
States = tuple[Tensor, ...]
GivenStates = TypeVar("GivenStates")  # as users pass them: (h, c) of an LSTM, h of a simple RNN


def autocast_on(device: str) -> bool:
    """Like `torch.is_autocast_enabled`, which does not support the meta device."""
    return device != "meta" and torch.is_autocast_enabled(device)


class Recurrence(nn.Module, abc.ABC):
    """One type of recurrent network: its parameters and how to run one layer of it."""

    # The operator. Read it from the type: the exporter of torch 2.6 cannot read it from a module.
    definition: ClassVar[Definition]
    gates: ClassVar[int] = 4  # the weight matrices have gates * hidden_size rows
    states: ClassVar[tuple[str, ...]] = ("h0", "c0")
    step_argument: ClassVar[str]  # the argument of `forward` that numbers a step
    step_hint: ClassVar[str]  # how to pass it
    weight_dropout = 0.0  # layers only; cells have none
    # With sync_stats, during a call: the number of sequences on all processes, and the number of
    # steps that enough of them reach.
    _all_rows: int | None = None
    _common_steps: int | None = None
    _generator: torch.Generator | None = None  # for zoneout's masks; None: torch's default

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
        self.input_size = checks.layer_size("input_size", input_size)
        self.hidden_size = checks.layer_size("hidden_size", hidden_size)
        self.has_bias = checks.layer_flag("bias", bias)
        self.initial_state = checks.choice("initial_state", initial_state, INITIAL_STATES)
        self.hidden_noise = checks.not_negative("hidden_noise", hidden_noise)
        self.zoneout = checks.zoneout_rates(zoneout, len(self.states))

    def __repr__(self) -> str:
        """One line, like `torch.nn.LSTM`'s: without the modules that hold the statistics."""
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """The sizes, and the options that differ from the defaults, for ``print(module)``."""
        text = f"{self.input_size}, {self.hidden_size}"
        for name, option in inspect.signature(type(self)).parameters.items():
            if option.default is inspect.Parameter.empty or name in ("device", "dtype"):
                continue
            # A subclass may store its options under other names, or not at all.
            value = self.has_bias if name == "bias" else getattr(self, name, option.default)
            if isinstance(value, frozenset):
                value = tuple(sorted(value))
            if value not in (option.default, (option.default,)):  # one rate is stored as a tuple
                text += f", {name}={value!r}"
        return text

    # Parameters ---------------------------------------------------------------------------------

    def _add_parameters(self, suffix: str, input_size: int, factory: dict[str, Any]) -> None:
        """Create the parameters of one layer and direction, with torch's names."""
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
        """Create the scales, shifts and statistics of one layer and direction."""

    def _parameter(self, name: str) -> Tensor | None:
        """Returns the named parameter, or None."""
        parameter: Tensor | None = self._parameters.get(name)
        # A computed parameter, e.g. of `torch.nn.utils.parametrize`, is only an attribute.
        return getattr(self, name, None) if parameter is None else parameter

    def _own(self, name: str) -> Tensor:
        """Returns the named parameter; it must exist."""
        parameter = self._parameter(name)
        assert parameter is not None, name
        return parameter

    def reset_parameters(self) -> None:
        """Initialize as in the paper: orthogonal weights, forget bias 1, everything else 0."""
        init.zeros_but_weights_(self)
        init.orthogonal_weights_(self)
        init.forget_bias_(self, 1.0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Also accepts a state dict of torch's module, and adds its two biases into one."""
        for name in self._parameters:
            if name.startswith("bias") and prefix + name not in state_dict:
                both = [prefix + name.replace("bias", new) for new in ("bias_ih", "bias_hh")]
                if all(key in state_dict for key in both):
                    own = self._own_biases(*(state_dict.pop(key) for key in both))
                    for new, value in own.items():
                        state_dict[prefix + name.replace("bias", new)] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _own_biases(self, bias_ih: Tensor, bias_hh: Tensor) -> dict[str, Tensor]:
        """Convert the two biases of torch's module to this network's shifts, by name."""
        return {"bias": bias_ih + bias_hh}

    # TorchScript --------------------------------------------------------------------------------

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by `torch.jit.script`."""
        self._refuse_torchscript("script")

    def _slow_forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Called by `torch.jit.trace` instead of `forward`."""
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
        """Returns the operator's arguments for one layer and direction.

        Shapes: input ``[T, B, I]``, or the input term ``[T, B, gates * H]`` if weight_ih is None;
        states ``[B, H]``, or ``[H]`` shared by all rows.
        """

    def _lstm_arguments(
        self,
        suffix: str,
        input: Tensor,
        weight_ih: Tensor | None,
        states: States,
        lengths: Tensor | None,
        **options: Any,
    ) -> LSTMArguments:
        """`_arguments` for any LSTM. options: of its normalization; none without normalization."""
        weight_hh = self._recurrent_weight(suffix, input.dtype)
        mask_c, rate_c = self._zoneout(self.zoneout[0], input)
        mask_h, rate_h = self._zoneout(self.zoneout[1], input)
        normalized = bool(options)
        return LSTMArguments(
            input=input,
            weight_ih=weight_ih,
            weight_hh=weight_hh,
            bias=self._parameter(f"bias{suffix}"),
            gamma_x=self._parameter(f"gamma_x{suffix}") if normalized else None,
            gamma_h=self._parameter(f"gamma_h{suffix}") if normalized else None,
            gamma_c=self._parameter(f"gamma_c{suffix}") if normalized else None,
            beta_c=self._parameter(f"beta_c{suffix}"),
            h0=states[0],
            c0=states[1],
            lengths=lengths,
            mask_c=mask_c,
            mask_h=mask_h,
            rate_c=rate_c,
            rate_h=rate_h,
            **options,
        )

    def _results(
        self, suffix: str, results: tuple[Any, ...], lengths: Tensor | None, start: int
    ) -> tuple[Tensor, States]:
        """Returns the output and the final states, taken from the operator's results."""
        output, *states, _ = results
        return output, tuple(states)

    def _check_ready(self, batch: int) -> bool:
        """Raise if the call cannot be computed.

        Returns whether to fall back to minibatch statistics.
        """
        return False

    def _batch_statistics(self) -> AbstractContextManager[None]:
        """Inside the ``with`` block, normalize with minibatch statistics."""
        return contextlib.nullcontext()

    def _keep_call(
        self,
        x: Tensor,
        states: States | None,
        lengths: Tensor | None,
        start: int,
        rows: int,
    ) -> None:
        """Keep the arguments of a training call if the statistics are refreshed from them."""

    def _keep_states(self, states: States, step: int) -> None:
        """Remember the states a call returned, to detect whether the next call continues them."""

    def _check_first_step(self, states: States | None) -> None:
        """Warn if a step continues from the previous one without its number (`step_argument`)."""

    def _check_repeated_step(self, hx: Any, states: Any) -> None:
        """Like `_check_first_step`, in `eval()`. states: what the step from `hx` returned."""

    def _warn_repeated_step(self) -> None:
        """The warning of `_check_repeated_step`, once."""
        self.__dict__["_warned_step"] = True
        checks.warn(
            f"{type(self).__name__} continues from its previous step, but {self.step_argument} "
            "was not given: each call uses the statistics of step 0. Pass the step number: "
            f"{self.step_hint}"
        )

    @abc.abstractmethod
    def _run_call(
        self, x: Tensor, states: States | None, lengths: Tensor | None, start: int
    ) -> States:
        """Run on arguments that are already checked. Returns the final states."""

    def _group(self) -> ProcessGroup | None:
        """The processes whose rows form one minibatch with this one's, or None."""
        return None

    def _layer(
        self,
        directions: list[tuple[str, Tensor, States | None]],
        lengths: Tensor | None,
        start: int,
    ) -> list[tuple[Tensor, States]]:
        """Run the directions of a layer.

        directions: for each direction, its parameter suffix, input and given initial states.
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
                # The output is empty, but backward() must still give zero gradients to everything.
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
                directions, run(type(self).definition, calls, group), strict=True
            )
        ]

    def _initial_states(self, suffix: str, batch: int, like: Tensor) -> States:
        """Learned ``[H]`` or zero ``[B, H]`` initial states, with noise on h0 in training."""
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
        """Whether this call draws the masks of zoneout and the noise on the initial state."""
        return self.training

    def _zoneout(self, rate: float, x: Tensor) -> tuple[Tensor | None, float]:
        """In training, a mask of units that keep their value, bool ``[T, B, H]``; else the rate."""
        if rate == 0 or not self._draws_noise():
            return None, rate
        shape = (*x.shape[:2], self.hidden_size)
        options: dict[str, Any] = {"device": x.device, "dtype": torch.float32}
        if self._generator is not None:
            options["generator"] = self._generator
        return torch.rand(shape, **options) < rate, 0.0

    def _recurrent_weight(self, suffix: str, dtype: torch.dtype) -> Tensor:
        """W_h of one layer and direction for this call.

        With `weight_dropout`, each training call draws a new mask, shared by all steps.
        """
        weight = self._own(f"weight_hh{suffix}")
        if weight.dtype != dtype:
            weight = weight.to(dtype)
        if self.weight_dropout > 0 and self.training:
            return F.dropout(weight, self.weight_dropout)
        return weight

    # Types --------------------------------------------------------------------------------------

    def _weight(self) -> Tensor:
        """Returns any weight matrix: all have the same dtype and device."""
        for parameter in self._parameters.values():  # usually the first one
            if parameter is not None and parameter.dim() == 2:
                return parameter
        for parameter in self.parameters():
            if parameter.dim() == 2:
                return parameter
        # In a replica of `torch.nn.DataParallel`, parameters are only attributes.
        return self._own("weight_hh_l0" if hasattr(self, "weight_hh_l0") else "weight_hh")

    def _under_autocast(self) -> bool:
        """Whether autocast applies to this layer. As in PyTorch, it does not apply to float64."""
        weight = self._weight()
        return autocast_on(weight.device.type) and weight.dtype != torch.float64

    def _autocast(self, x: Tensor) -> Tensor:
        """Casts a floating-point x to the autocast dtype of its device, if autocast is on."""
        if not x.is_floating_point():
            return x
        return x.to(self._type(x))

    def _type(self, x: Tensor) -> torch.dtype:
        """The autocast dtype of x's device if autocast is on, else x's dtype."""
        return torch.get_autocast_dtype(x.device.type) if self._under_autocast() else x.dtype

    def _given_states(self, hx: Any, shape: tuple[int, ...]) -> States:
        """Checks the user's initial states. Returns one tensor for each of `states`."""
        if len(self.states) == 1:
            names, values = ["hidden"], (hx,)
        elif isinstance(hx, (tuple, list)) and len(hx) == 2:
            names, values = ["hidden[0]", "hidden[1]"], tuple(hx)
        else:
            raise TypeError(f"hx must be a pair (h_0, c_0), got {type(hx).__name__}")
        weight, autocast = self._weight(), self._under_autocast()
        return tuple(
            checks.state(name, value, shape, weight, autocast)
            for name, value in zip(names, values, strict=True)
        )

    def _wrap(self, states: States) -> Any:
        """Returns states in torch's form: a pair for LSTMs, one tensor for simple RNNs."""
        return states if len(states) > 1 else states[0]
