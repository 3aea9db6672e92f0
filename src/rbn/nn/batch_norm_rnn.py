"""The batch-normalized simple RNN as a module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from rbn.nn import checks
from rbn.nn.batch_normalized import BatchNormalized
from rbn.nn.cell import Cell
from rbn.nn.convert import CellLayers
from rbn.nn.recurrence import States
from rbn.nn.streaming import step_rows
from rbn.ops import steps
from rbn.ops.cpu.inference import Weights
from rbn.ops.definition import RNN, RNNArguments
from rbn.ops.types import InitialState, InputStats, Nonlinearity, Padding


class OneState(BatchNormalized):
    """A network whose only state is h: equation 1 with both terms normalized, or the GRU."""

    definition = RNN
    gates = 1
    states = ("h0",)
    terms = ("x", "h")
    nonlinearity: str

    def _set_nonlinearity(self, nonlinearity: str) -> None:
        self.nonlinearity = checks.choice("nonlinearity", nonlinearity, ("tanh", "relu"))

    def _arguments(
        self,
        suffix: str,
        input: Tensor,
        weight_ih: Tensor | None,
        states: States,
        lengths: Tensor | None,
        start: int,
    ) -> RNNArguments:
        weight_hh = self._recurrent_weight(suffix, input.dtype)
        mask_h, rate_h = self._zoneout(self.zoneout[0], input)
        arguments = RNNArguments(
            input=input,
            weight_ih=weight_ih,
            weight_hh=weight_hh,
            bias=self._parameter(f"bias{suffix}"),
            gamma_x=self._own(f"gamma_x{suffix}"),
            gamma_h=self._own(f"gamma_h{suffix}"),
            h0=states[0],
            beta_n=self._parameter(f"beta_n{suffix}"),
            lengths=lengths,
            mask_h=mask_h,
            rate_h=rate_h,
            eps=self.eps,
            input_stats=self.input_stats,
            padding=self.padding,
            min_rows=self._min_rows_of(input, lengths),
            nonlinearity=self.nonlinearity,
        )
        population = self._population(suffix, start, input.shape[0])
        with_population: RNNArguments = type(self).definition.with_population(arguments, population)
        return with_population


class BatchNormRNN(OneState, CellLayers[Tensor]):
    r"""A batch-normalized simple RNN (equation 1), called like `torch.nn.RNN`.

    $$
    h_t = \phi(\mathrm{BN}(W_h h_{t-1}; \gamma_h, 0) + \mathrm{BN}(W_x x_t; \gamma_x, 0) + b)
    $$

    Args:
        input_size: features of the input.
        hidden_size: units H of each layer and direction.
        num_layers: stacked layers.
        nonlinearity: ``"tanh"`` or ``"relu"``.
        bias: whether to use a bias b.
        batch_first: input and output as ``[B, T, features]``.
        dropout: rate of dropout on the output of each layer except the last.
        bidirectional: adds a second recurrence backwards in time. Reverses only the unpadded part.
        zoneout: rate for the hidden state (Krueger et al., 2017).
        weight_dropout: dropout rate of the entries of W_h in training (Merity et al., 2018). One
            mask per call, shared by all steps; the remaining weights are scaled up.
        ablations: ``"shared_stats"``, as in `BatchNormLSTM`.

    `max_length`, `gamma`, `eps`, `momentum`, `input_stats`, `padding`, `initial_state`,
    `hidden_noise`, `sync_stats` and `refresh_stats` are those of `BatchNormLSTM`.

    Parameters, for each layer k: ``weight_ih_lk [H, I]``, ``weight_hh_lk [H, H]``, ``bias_lk [H]``,
    ``gamma_x_lk [H]``, ``gamma_h_lk [H]``, ``h0_lk [H]``.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: Nonlinearity = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        max_length: int | None = None,
        gamma: float = 0.1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        input_stats: InputStats = "step",
        padding: Padding = "exclude",
        initial_state: InitialState = "learned",
        hidden_noise: float = 0.0,
        zoneout: float = 0.0,
        weight_dropout: float = 0.0,
        ablations: Iterable[Literal["shared_stats"]] = (),
        sync_stats: bool = False,
        refresh_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            initial_state=initial_state,
            hidden_noise=hidden_noise,
            zoneout=zoneout,
            weight_dropout=weight_dropout,
        )
        self._set_nonlinearity(nonlinearity)
        self._set_normalization(
            max_length,
            gamma,
            eps,
            momentum,
            input_stats,
            padding,
            ablations,
            sync_stats,
            refresh_stats,
        )
        self._build(device, dtype)

    @property
    def mode(self) -> str:
        """``"RNN_TANH"`` or ``"RNN_RELU"``, as in `torch.nn.RNN`."""
        return f"RNN_{self.nonlinearity.upper()}"


class OneStateCell(OneState, Cell[Tensor]):
    """One step of a network whose only state is h."""

    def _step(self, x: Tensor, states: States, step: int) -> States | None:
        rows = step_rows(self, step, x)
        if rows is None:
            return None
        names = "weight_ih", "weight_hh", "bias", "gamma_x", "gamma_h"
        weights: list[Any] = [self._parameter(name) for name in names]
        weights += [None, self._parameter("beta_n") if self.gates == 3 else None]
        options = self.nonlinearity, rows, self.eps, self.zoneout
        return steps.bn_rnn(x, Weights(*weights), states, *options)


class BatchNormRNNCell(OneStateCell):
    """One step of `BatchNormRNN`, called like `torch.nn.RNNCell` plus the time step.

    ``cell(input, hx, step)`` takes ``[B, input_size]`` and returns h ``[B, H]``. Options and
    parameters are those of `BatchNormRNN`, with parameter names without suffix.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: Nonlinearity = "tanh",
        *,
        max_length: int | None = None,
        gamma: float = 0.1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        initial_state: InitialState = "learned",
        hidden_noise: float = 0.0,
        zoneout: float = 0.0,
        ablations: Iterable[Literal["shared_stats"]] = (),
        sync_stats: bool = False,
        refresh_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            bias,
            initial_state=initial_state,
            hidden_noise=hidden_noise,
            zoneout=zoneout,
        )
        self._set_nonlinearity(nonlinearity)
        self._set_normalization(
            max_length,
            gamma,
            eps,
            momentum,
            "step",
            "exclude",
            ablations,
            sync_stats,
            refresh_stats,
        )
        self._build(device, dtype)


BatchNormRNN._cell_class = BatchNormRNNCell
