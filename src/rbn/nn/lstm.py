"""The paper's baseline: an LSTM with the same options as the batch-normalized one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rbn.nn.cell import Cell
from rbn.nn.checks import boolean
from rbn.nn.convert import LSTMLayers
from rbn.nn.recurrence import Recurrence, States
from rbn.ops import steps
from rbn.ops.cpu.inference import Weights
from rbn.ops.definition import LSTM as LSTM_DEFINITION
from rbn.ops.definition import LSTMArguments
from rbn.ops.types import InitialState


class _LSTM(Recurrence):
    """Parameters and operator of equations 2 to 4."""

    definition = LSTM_DEFINITION
    cell_bias: bool

    def _add_normalization(self, suffix: str, factory: dict[str, Any]) -> None:
        if self.cell_bias:
            self._add(f"beta_c{suffix}", (self.hidden_size,), factory)

    def _arguments(
        self,
        suffix: str,
        input: Tensor,
        weight_ih: Tensor | None,
        states: States,
        lengths: Tensor | None,
        start: int,
    ) -> LSTMArguments:
        return self._lstm_arguments(suffix, input, weight_ih, states, lengths)


class LSTM(_LSTM, LSTMLayers):
    r"""The paper's baseline LSTM: `BatchNormLSTM` without the normalization.

    $$
    \begin{align*}
    (\tilde f_t, \tilde i_t, \tilde o_t, \tilde g_t) &= W_h h_{t-1} + W_x x_t + b \\
    c_t &= \sigma(\tilde f_t) \odot c_{t-1} + \sigma(\tilde i_t) \odot \tanh(\tilde g_t) \\
    h_t &= \sigma(\tilde o_t) \odot \tanh(c_t + \beta_c)
    \end{align*}
    $$

    The authors' baseline also has the additive $\beta_c$, which is not in the paper's
    equation 4. ``cell_bias=False`` removes it. All other arguments, parameters and shapes are those
    of `BatchNormLSTM`.
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
        cell_bias: bool = True,
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
        self.cell_bias = boolean("cell_bias", cell_bias)
        self._build(device, dtype)

    @classmethod
    def from_lstm(cls, lstm: nn.LSTM, **options: object) -> LSTM:
        """The same network as `lstm`, by default with zero initial state and no cell bias."""
        return super().from_lstm(lstm, **{"initial_state": "zeros", "cell_bias": False, **options})

    def to_lstm(self) -> nn.LSTM:
        """The same network as a `torch.nn.LSTM`.

        Raises `ValueError` for what `torch.nn.LSTM` does not have: a nonzero cell bias or learned
        initial state, or zoneout. Drops training-only options: noise and `weight_dropout`.
        """
        if any(self.zoneout):
            raise ValueError(f"torch.nn.LSTM has no zoneout, but this layer has {self.zoneout}")
        suffixes = [s for layer in range(self.num_layers) for s in self._suffixes(layer)]
        for name in (start + suffix for start in ("beta_c", "h0", "c0") for suffix in suffixes):
            value = getattr(self, name, None)  # parametrized or not
            if value is not None and value.detach().abs().sum() > 0:
                what = "cell bias" if name.startswith("beta_c") else "learned initial state"
                raise ValueError(f"torch.nn.LSTM has no {what}, but {name} is not zero")
        weight = self._weight()
        new = nn.LSTM(
            self.input_size,
            self.hidden_size,
            self.num_layers,
            self.bias,
            self.batch_first,
            self.dropout,
            self.bidirectional,
            device=weight.device,
            dtype=weight.dtype,
        )
        new.train(self.training)
        with torch.no_grad():
            for layer in range(self.num_layers):
                for suffix in self._suffixes(layer):
                    for name in ("weight_ih", "weight_hh"):
                        getattr(new, name + suffix).copy_(getattr(self, name + suffix))
                    if self.bias:
                        getattr(new, "bias_ih" + suffix).copy_(getattr(self, "bias" + suffix))
                        getattr(new, "bias_hh" + suffix).zero_()
        return new


class LSTMCell(_LSTM, Cell[tuple[Tensor, Tensor]]):
    """One step of `LSTM`, called like `torch.nn.LSTMCell`.

    ``cell(input, hx)`` takes ``[B, input_size]`` and returns ``(h, c)``, ``[B, H]`` each. `step` is
    accepted so that all cells have the same signature, but has no effect.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        cell_bias: bool = True,
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
        self.cell_bias = boolean("cell_bias", cell_bias)
        self._build(device, dtype)

    def _step(self, x: Tensor, states: States, step: int) -> States | None:
        bias, beta_c = self._parameter("bias"), self._parameter("beta_c")
        weight_ih, weight_hh = self._own("weight_ih"), self._own("weight_hh")
        weights = Weights(weight_ih, weight_hh, bias, None, None, None, beta_c)
        return steps.lstm(x, weights, states, zoneout=self.zoneout)


LSTM._cell_class = LSTMCell
