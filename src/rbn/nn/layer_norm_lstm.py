"""The layer-normalized LSTM as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rbn.nn import checks, init
from rbn.nn.cell import Cell
from rbn.nn.convert import LSTMLayers
from rbn.nn.recurrence import Recurrence, States
from rbn.ops import steps
from rbn.ops.cpu.inference import Weights
from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.types import InitialState


class _LayerNormLSTM(Recurrence):
    """Parameters and operator of the layer-normalized LSTM."""

    gamma: float
    definition = LSTM
    eps: float

    def _set_normalization(self, gamma: float, eps: float) -> None:
        self.gamma = checks.not_negative("gamma", gamma)
        self.eps = checks.positive("eps", eps)

    def _add_normalization(self, suffix: str, factory: dict[str, Any]) -> None:
        rows = self.gates * self.hidden_size
        self._add(f"gamma_x{suffix}", (rows,), factory)
        self._add(f"gamma_h{suffix}", (rows,), factory)
        self._add(f"gamma_c{suffix}", (self.hidden_size,), factory)
        self._add(f"beta_c{suffix}", (self.hidden_size,), factory)

    def reset_parameters(self) -> None:
        """Initialize as in the paper and set gammas to `gamma`."""
        super().reset_parameters()
        init.gamma_(self, self.gamma)

    def _arguments(
        self,
        suffix: str,
        input: Tensor,
        weight_ih: Tensor | None,
        states: States,
        lengths: Tensor | None,
        start: int,
    ) -> LSTMArguments:
        given = (suffix, input, weight_ih, states, lengths)
        return self._lstm_arguments(*given, norm="layer", eps=self.eps)


class LayerNormLSTM(_LayerNormLSTM, LSTMLayers):
    r"""A layer-normalized LSTM (Ba et al., 2016), called like `torch.nn.LSTM`.

    Like `BatchNormLSTM`, but the moments of each term are taken over the features of each sequence
    instead of over the minibatch (for the input and the recurrent term, over all 4H features).
    There are no population statistics: training and evaluation are the same.

    Args:
        input_size: features of the input.
        hidden_size: units H of each layer and direction.
        num_layers: stacked layers.
        bias: whether to use a bias b.
        batch_first: input and output as ``[B, T, features]``.
        dropout: rate of dropout on the output of each layer except the last.
        bidirectional: adds a second recurrence backwards in time. Reverses only the unpadded part.
        gamma: initial value of all gammas.
        eps: added to every variance.
        initial_state: ``"learned"`` vectors h0 and c0, or ``"zeros"``.
        hidden_noise: standard deviation of Gaussian noise on the initial hidden state in training.
        zoneout: rates (cell, hidden) of Krueger et al. (2017).
        weight_dropout: dropout rate of the entries of W_h in training (Merity et al., 2018). One
            mask per call, shared by all steps; the remaining weights are scaled up.

    Parameters have the names and shapes of `BatchNormLSTM`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        gamma: float = 1.0,
        eps: float = 1e-5,
        initial_state: InitialState = "learned",
        hidden_noise: float = 0.0,
        zoneout: tuple[float, float] = (0.0, 0.0),
        weight_dropout: float = 0.0,
        proj_size: int = 0,
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
            proj_size=proj_size,
        )
        self._set_normalization(gamma, eps)
        self._build(device, dtype)


class LayerNormLSTMCell(_LayerNormLSTM, Cell[tuple[Tensor, Tensor]]):
    """One step of `LayerNormLSTM`, called like `torch.nn.LSTMCell`.

    ``cell(input, hx)`` takes ``[B, input_size]`` and returns ``(h, c)``, ``[B, H]`` each. `step` is
    accepted so that all cells have the same signature, but has no effect.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        gamma: float = 1.0,
        eps: float = 1e-5,
        initial_state: InitialState = "learned",
        hidden_noise: float = 0.0,
        zoneout: tuple[float, float] = (0.0, 0.0),
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
        self._set_normalization(gamma, eps)
        self._build(device, dtype)

    def _step(self, x: Tensor, states: States, step: int) -> States | None:
        weights: list[Any] = [self._parameter(name) for name in Weights._fields]
        return steps.ln_lstm(x, Weights(*weights), states, self.eps, self.zoneout)


LayerNormLSTM._cell_class = LayerNormLSTMCell
