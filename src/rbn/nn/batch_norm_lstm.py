"""The batch-normalized LSTM of the paper as a module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rbn.nn.batch_normalized import BatchNormalized
from rbn.nn.cell import Cell
from rbn.nn.convert import LSTMLayers
from rbn.nn.recurrence import States
from rbn.nn.streaming import step_rows
from rbn.ops import steps
from rbn.ops.cpu.inference import Weights
from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.types import Ablation, InitialState, InputStats, Padding


class _BatchNormLSTM(BatchNormalized):
    """Parameters and operator of equations 6 to 8."""

    definition = LSTM
    ablation_names = ("shared_stats", "joint_terms", "pass_normalized_cell", "raw_output")

    def _set_normalization(self, *args: Any) -> None:
        super()._set_normalization(*args)
        if {"pass_normalized_cell", "raw_output"} <= self.ablations:
            raise ValueError(
                "ablations pass_normalized_cell and raw_output exclude each other: raw_output "
                "removes the normalized cell that pass_normalized_cell passes on"
            )
        if "joint_terms" in self.ablations and self.input_stats == "sequence":
            raise ValueError(
                "ablation joint_terms leaves no input term with statistics of its own: "
                "input_stats must be 'step'"
            )

    def _normalized_terms(self) -> dict[str, int]:
        terms = super()._normalized_terms()
        if "joint_terms" in self.ablations:
            del terms["x"]
        if "raw_output" in self.ablations:
            del terms["c"]
        return terms

    def _add_normalization(self, suffix: str, factory: dict[str, Any]) -> None:
        super()._add_normalization(suffix, factory)
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
        arguments = self._lstm_arguments(
            suffix,
            input,
            weight_ih,
            states,
            lengths,
            norm="batch",
            eps=self.eps,
            input_stats=self.input_stats,
            padding=self.padding,
            min_rows=self._min_rows_of(input, lengths),
            pass_normalized_cell="pass_normalized_cell" in self.ablations,
        )
        population = self._population(suffix, start, input.shape[0])
        with_population: LSTMArguments = LSTM.with_population(arguments, population)
        return with_population


class BatchNormLSTM(_BatchNormLSTM, LSTMLayers):
    r"""A batch-normalized LSTM (Cooijmans et al., 2017), called like `torch.nn.LSTM`.

    For each layer, with $\mathrm{BN}(h; \gamma, \beta) = \beta + \gamma
    (h - \mathrm{E}[h]) / \sqrt{\mathrm{Var}[h] + \epsilon}$:

    $$
    \begin{align*}
    (\tilde f_t, \tilde i_t, \tilde o_t, \tilde g_t) &= \mathrm{BN}(W_h h_{t-1}; \gamma_h, 0)
        + \mathrm{BN}(W_x x_t; \gamma_x, 0) + b \\
    c_t &= \sigma(\tilde f_t) \odot c_{t-1} + \sigma(\tilde i_t) \odot \tanh(\tilde g_t) \\
    h_t &= \sigma(\tilde o_t) \odot \tanh(\mathrm{BN}(c_t; \gamma_c, \beta_c))
    \end{align*}
    $$

    In training, each time step is normalized with its own minibatch statistics, and gradients flow
    through them; steps that few sequences reach are normalized with constants from the earlier
    steps. In `eval()`, the layer uses population statistics. These are re-estimated from the
    inputs of recent training calls at the current weights (see `refresh_stats`), or averaged over
    an entire data set by `rbn.update_population_stats`. Steps beyond the last one seen in training
    use the statistics of that last step.

    Args:
        input_size: features of the input.
        hidden_size: units H of each layer and direction.
        num_layers: stacked layers.
        bias: whether to use a bias b.
        batch_first: input and output as ``[B, T, features]``.
        dropout: rate of dropout on the output of each layer except the last.
        bidirectional: adds a second recurrence backwards in time. Reverses only the unpadded part.
        max_length: number of steps with population statistics; None grows with the training data.
        gamma: initial value of all gammas.
        eps: added to every variance.
        momentum: weight of a new minibatch in the running average; None weights all equally.
        input_stats: ``"step"``, or ``"sequence"`` for input-term statistics over all unpadded
            positions, shared by all steps (BN-e* of the paper).
        padding: ``"exclude"`` keeps padded rows out of every statistic; ``"include"``, the authors'
            behaviour, counts them in all except sequencewise ones.
        initial_state: ``"learned"`` vectors h0 and c0, or ``"zeros"``.
        hidden_noise: standard deviation of Gaussian noise on the initial hidden state in training.
        zoneout: rates (cell, hidden) of Krueger et al. (2017).
        weight_dropout: dropout rate of the entries of W_h in training (Merity et al., 2018). One
            mask per call, shared by all steps; the remaining weights are scaled up.
        ablations: variants in the paper and its code. Any of ``"shared_stats"`` (population
            statistics averaged over time), ``"joint_terms"`` (one normalization of W_h h + W_x x by
            gamma_h), ``"pass_normalized_cell"`` (the next step continues from BN(c_t)) and
            ``"raw_output"`` (no normalization of the cell before the output).
        sync_stats: in distributed training (`torch.distributed`), compute minibatch statistics and
            their gradients over the rows of all processes, as if one process had them all. Every
            process must then call the layer in training; batch sizes and lengths may differ. Runs
            the plain equations, with two exchanges per step. False: each process's rows are a
            separate minibatch, as with `torch.nn.BatchNorm1d`.
        refresh_stats: keep references to the inputs of recent training calls (1,024 sequences, at
            most 128 MiB), and re-estimate the population statistics from them at the current
            weights before the layer is evaluated, saved or copied. Draws the masks of zoneout, as
            in training, but not those of dropout. False: evaluate with the running averages, which
            lag behind the weights.
        proj_size: must be 0. Accepted because `torch.nn.LSTM` has it.

    Parameters of each layer k, with the suffix ``_reverse`` for the backward direction:
    ``weight_ih_lk [4H, I]``, ``weight_hh_lk [4H, H]``, ``bias_lk [4H]``, ``gamma_x_lk [4H]``,
    ``gamma_h_lk [4H]``, ``gamma_c_lk [H]``, ``beta_c_lk [H]``, ``h0_lk [H]``, ``c0_lk [H]``; gate
    order i, f, g, o.
    Statistics: ``stats_x_lk``, ``stats_h_lk``, ``stats_c_lk``, each with ``mean``, ``var [T, ...]``
    and ``count [T]``.
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
        zoneout: tuple[float, float] = (0.0, 0.0),
        weight_dropout: float = 0.0,
        ablations: Iterable[Ablation] = (),
        sync_stats: bool = False,
        refresh_stats: bool = True,
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


class BatchNormLSTMCell(_BatchNormLSTM, Cell[tuple[Tensor, Tensor]]):
    """One step of `BatchNormLSTM`, called like `torch.nn.LSTMCell` plus the time step.

    ``cell(input, hx, step)`` takes ``[B, input_size]`` and returns ``(h, c)``, ``[B, H]`` each. In
    `eval()` the step selects the population statistics to use; in training, those to update.
    Options and parameters are those of `BatchNormLSTM`, with parameter names without suffix.
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
        zoneout: tuple[float, float] = (0.0, 0.0),
        ablations: Iterable[Ablation] = (),
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

    def _step(self, x: Tensor, states: States, step: int) -> States | None:
        rows = step_rows(self, step, x)
        if rows is None:
            return None
        weights: list[Any] = [self._parameter(name) for name in Weights._fields]
        return steps.lstm(
            x,
            Weights(*weights),
            states,
            rows,
            self.eps,
            self.zoneout,
            "pass_normalized_cell" in self.ablations,
        )


BatchNormLSTM._cell_class = BatchNormLSTMCell
