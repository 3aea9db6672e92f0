"""The batch-normalized GRU as a module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rbn.nn.batch_norm_rnn import OneState, OneStateCell
from rbn.nn.convert import CellLayers
from rbn.ops.definition import GRU
from rbn.ops.types import InitialState, InputStats, Padding


class _BatchNormGRU(OneState):
    """The equations of `torch.nn.GRU` with both terms normalized."""

    definition = GRU
    gates = 3
    nonlinearity = "gates"

    def _add_normalization(self, suffix: str, factory: dict[str, Any]) -> None:
        super()._add_normalization(suffix, factory)
        if self.has_bias:
            self._add(f"beta_n{suffix}", (self.hidden_size,), factory)

    def _own_biases(self, bias_ih: Tensor, bias_hh: Tensor) -> dict[str, Tensor]:
        bias_gates, beta_n = bias_hh.split([2 * self.hidden_size, self.hidden_size])
        return {"bias": bias_ih + F.pad(bias_gates, (0, self.hidden_size)), "beta_n": beta_n}


class BatchNormGRU(_BatchNormGRU, CellLayers[Tensor]):
    r"""A batch-normalized GRU, called like `torch.nn.GRU`.

    $$
    \begin{align*}
    (\tilde r_t, \tilde z_t, \tilde u_t) &= \mathrm{BN}(W_h h_{t-1}; \gamma_h, (0, 0, \beta_n)) \\
    (\hat r_t, \hat z_t, \hat n_t) &= \mathrm{BN}(W_x x_t; \gamma_x, 0) + b \\
    n_t &= \tanh(\hat n_t + \sigma(\tilde r_t + \hat r_t) \odot \tilde u_t) \\
    h_t &= (1 - z_t) \odot n_t + z_t \odot h_{t-1}, \quad z_t = \sigma(\tilde z_t + \hat z_t)
    \end{align*}
    $$

    $\beta_n$ is the only shift besides b that is not redundant, because the reset gate multiplies
    it. Takes the arguments of `BatchNormRNN` except `nonlinearity`; ``bias=False`` removes b and
    $\beta_n$. `from_gru` and ``load_state_dict(strict=False)`` load the weights of a
    `torch.nn.GRU`.

    Parameters, for each layer k: ``weight_ih_lk [3H, I]``, ``weight_hh_lk [3H, H]``,
    ``bias_lk [3H]``, ``gamma_x_lk [3H]``, ``gamma_h_lk [3H]``, ``beta_n_lk [H]``, ``h0_lk [H]``;
    gate order r, z, n.
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
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        options: dict[str, Any] = {"initial_state": initial_state, "hidden_noise": hidden_noise}
        super().__init__(*sizes, weight_dropout=weight_dropout, zoneout=zoneout, **options)
        normalization = max_length, gamma, eps, momentum, input_stats, padding, ablations
        self._set_normalization(*normalization, sync_stats, refresh_stats)
        self._build(device, dtype)

    @classmethod
    def from_gru(cls, gru: nn.GRU, **options: object) -> BatchNormGRU:
        """A new layer that starts from the weights of `gru`, like `BatchNormLSTM.from_lstm`."""
        if not isinstance(gru, nn.GRU):
            raise TypeError(f"gru must be a torch.nn.GRU, got {type(gru).__name__}")
        sizes = "input_size", "hidden_size", "num_layers"
        own: dict[str, Any] = {"device": gru.weight_ih_l0.device, "dtype": gru.weight_ih_l0.dtype}
        for name in (*sizes, "bias", "batch_first", "dropout", "bidirectional"):
            own[name] = getattr(gru, name)
        new = cls(**{**options, **own})
        new.load_state_dict({n: getattr(gru, n) for n in gru._flat_weights_names}, strict=False)
        return new.train(gru.training)


class BatchNormGRUCell(_BatchNormGRU, OneStateCell):
    """One step of `BatchNormGRU`, called like `torch.nn.GRUCell` plus the time step.

    ``cell(input, hx, step)`` takes ``[B, input_size]`` and returns h ``[B, H]``. Options and
    parameters are those of `BatchNormGRU`, with parameter names without suffix.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
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
        options: dict[str, Any] = {"initial_state": initial_state, "hidden_noise": hidden_noise}
        super().__init__(input_size, hidden_size, bias, zoneout=zoneout, **options)
        normalization = max_length, gamma, eps, momentum, "step", "exclude", ablations
        self._set_normalization(*normalization, sync_stats, refresh_stats)
        self._build(device, dtype)


BatchNormGRU._cell_class = BatchNormGRUCell
