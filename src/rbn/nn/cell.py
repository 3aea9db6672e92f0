"""One step of a recurrent network, called like `torch.nn.LSTMCell`."""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from rbn.nn import checks
from rbn.nn.recurrence import GivenStates, Recurrence, States, autocast_on
from rbn.ops import steps


class Cell(Recurrence, Generic[GivenStates]):
    """One step at a time, called like `torch.nn.LSTMCell`."""

    step_argument = "step"
    step_hint = "cell(input, hx, step)"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        **options: Any,
    ) -> None:
        """Check the options. The subclass calls `_build` after checking its own."""
        super().__init__(input_size, hidden_size, bias=bias, **options)

    def _build(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Create and initialize all parameters."""
        checks.floating("dtype", dtype)
        self._add_parameters("", self.input_size, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _run_call(
        self, x: Tensor, states: States | None, lengths: Tensor | None, start: int
    ) -> States:
        ((_, states),) = self._layer([("", x[None], states)], None, start)
        return states

    def forward(
        self, input: Tensor, hx: GivenStates | None = None, step: int | None = None
    ) -> GivenStates:
        """Run one step.

        Args:
            input: ``[B, input_size]``, or ``[input_size]`` without a batch.
            hx: previous states as in `torch.nn.LSTMCell`, ``[B, H]`` each. Defaults to the initial
                states.
            step: the time step, counted from 0; 0 by default. Selects the population statistics,
                so a loop over a sequence must pass it.

        Returns:
            The states after the step, ``(h, c)`` or ``h``, ``[B, H]`` each.
        """
        counted = step is not None
        step = step if counted else 0
        if not self.training:
            streamed = self._stream(input, hx, step)
            if streamed is not None:
                if not counted:
                    self._check_repeated_step(hx, streamed)
                result: GivenStates = self._wrap(streamed)
                return result
        if not isinstance(input, Tensor) or input.dim() not in (1, 2):
            got = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            raise ValueError(f"input must have shape [B, {self.input_size}], got {got}")
        checks.features(input, self.input_size, self._weight(), self._under_autocast())
        step = checks.integer("step", step)
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
        if not counted:
            self._check_first_step(given)
        x = self._autocast(x)
        untrained = self._check_ready(x.shape[0])
        self._keep_call(x, given, None, step, x.shape[0])
        with self._batch_statistics() if untrained else contextlib.nullcontext():
            states = self._run_call(x, given, None, step)
        self._keep_states(states, step)
        states = states if batched else tuple(state[0] for state in states)
        if not counted and not self.training:
            self._check_repeated_step(hx, states)
        value: GivenStates = self._wrap(states)
        return value

    if TYPE_CHECKING:
        __call__ = forward

    def _stream(self, input: Any, hx: Any, step: Any) -> States | None:
        """Fast path of `forward` in `eval()`. Returns the states after one step.

        Returns None for anything but a plain step, including invalid arguments. `forward` then
        takes its slow path, which raises the errors.
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
        dtype, device = like.dtype, like.device
        if input.dtype != dtype or input.device != device:
            return None
        *batch, features = input.shape
        if features != self.input_size or len(batch) > 1 or 0 in batch:
            return None
        if hx is None:
            rows = batch[0] if batch else 1
            states = [s.expand(rows, -1) for s in self._initial_states("", rows, like)]
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
        result = self._step(input[None], states, step)
        return None if result is None else tuple(state[0] for state in result)

    @abc.abstractmethod
    def _step(self, x: Tensor, states: States, step: int) -> States | None:
        """Runs one step in `eval()` with `rbn.ops.steps`. All tensors are ``[B, ...]``.

        Returns None if `rbn.ops.steps` does not support the case; `_layer` then runs it.
        """
