"""The recurrences as functions, independent of the backend.

All work on one layer and one direction. ``wx`` is the input term W_x x_t of every step, not yet
normalized and without a bias: a matrix product, or a look-up of rows for one-hot inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rbn.ops.checks import check_targets
from rbn.ops.definition import GRU, LSTM, RNN, LSTMArguments, RNNArguments
from rbn.ops.dispatch import run, select
from rbn.ops.types import InputStats, Nonlinearity, Padding, Statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def bn_lstm(
    wx: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    gamma_x: Tensor | None,
    gamma_h: Tensor,
    gamma_c: Tensor | None,
    beta_c: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    *,
    lengths: Tensor | None = None,
    population: Statistics | None = None,
    eps: float = 1e-5,
    input_stats: InputStats = "step",
    padding: Padding = "exclude",
    min_rows: int = 1,
    zoneout_c: Tensor | float = 0.0,
    zoneout_h: Tensor | float = 0.0,
    pass_normalized_cell: bool = False,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor, Statistics]:
    """The batch-normalized LSTM, equations 6 to 8.

    Args:
        wx: input term W_x x_t, ``[T, B, 4H]``, gates in torch's order i, f, g, o.
        weight_hh: W_h, ``[4H, H]``.
        bias: b, ``[4H]``.
        gamma_x: scale of the input term, ``[4H]``; None normalizes the sum of both terms by
            gamma_h instead (an ablation).
        gamma_h: scale of the recurrent term, ``[4H]``.
        gamma_c: scale of the cell, ``[H]``; None computes the output from the unnormalized cell
            plus beta_c (an ablation).
        beta_c: shift of the cell, ``[H]``.
        h0: initial hidden state, ``[B, H]``.
        c0: initial cell, ``[B, H]``.
        lengths: unpadded steps of each row, integers ``[B]``, each from 1 to T.
        population: statistics to normalize with, constants without a gradient; None uses those
            of the minibatch.
        eps: added to every variance.
        input_stats: minibatch statistics of the input term for each step, or over the sequence.
        padding: whether padded rows count in minibatch statistics.
        min_rows: steps that fewer rows reach (over all processes) are normalized with the mean and
            variance over all rows of the earlier steps. Only with ``padding="exclude"``.
        zoneout_c: mask of the cell's units that keep their value, bool ``[T, B, H]``, or the rate.
        zoneout_h: the same for the hidden state.
        pass_normalized_cell: the next step continues from BN(c_t) (an ablation).
        group: processes whose rows form one minibatch; statistics and gradients are taken over all
            of them. Every process must call this function, and its backward pass, with the same T;
            B may differ and be 0. Runs the reference. None: only this process's rows.

    Returns:
        The output ``[T, B, H]`` (zero where padded), h_n and c_n ``[B, H]`` after each row's last
        unpadded step, and the minibatch statistics (all None if `population` is given).
    """
    a = LSTMArguments(
        wx,
        None,
        weight_hh,
        bias,
        gamma_x,
        gamma_h,
        gamma_c,
        beta_c,
        h0,
        c0,
        lengths=lengths,
        **_zoneout(c=zoneout_c, h=zoneout_h),
        norm="batch",
        eps=eps,
        input_stats=input_stats,
        padding=padding,
        min_rows=min_rows,
        pass_normalized_cell=pass_normalized_cell,
    )
    output, h_n, c_n, statistics = run(LSTM, [LSTM.with_population(a, population)], group)[0]
    return output, h_n, c_n, statistics


def lstm(
    wx: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    beta_c: Tensor | None,
    h0: Tensor,
    c0: Tensor,
    *,
    lengths: Tensor | None = None,
    zoneout_c: Tensor | float = 0.0,
    zoneout_h: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain LSTM, equations 2 to 4; arguments and results as in `bn_lstm`.

    beta_c ``[H]`` is the additive cell bias of the authors' baseline, h = o * tanh(c + beta_c).
    """
    tensors = (wx, None, weight_hh, bias, None, None, None, beta_c, h0, c0, lengths)
    a = LSTMArguments(*tensors, **_zoneout(c=zoneout_c, h=zoneout_h))
    output, h_n, c_n, _ = run(LSTM, [a])[0]
    return output, h_n, c_n


def ln_lstm(
    wx: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    gamma_x: Tensor,
    gamma_h: Tensor,
    gamma_c: Tensor,
    beta_c: Tensor,
    h0: Tensor,
    c0: Tensor,
    *,
    lengths: Tensor | None = None,
    eps: float = 1e-5,
    zoneout_c: Tensor | float = 0.0,
    zoneout_h: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer-normalized LSTM; arguments and results as in `bn_lstm`, without statistics."""
    tensors = (wx, None, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta_c, h0, c0, lengths)
    zoneout = _zoneout(c=zoneout_c, h=zoneout_h)
    a = LSTMArguments(*tensors, **zoneout, norm="layer", eps=eps)
    output, h_n, c_n, _ = run(LSTM, [a])[0]
    return output, h_n, c_n


def bn_rnn(
    wx: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    gamma_x: Tensor,
    gamma_h: Tensor,
    h0: Tensor,
    *,
    nonlinearity: Nonlinearity = "tanh",
    lengths: Tensor | None = None,
    population: Statistics | None = None,
    eps: float = 1e-5,
    input_stats: InputStats = "step",
    padding: Padding = "exclude",
    min_rows: int = 1,
    zoneout_h: Tensor | float = 0.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Statistics]:
    """The batch-normalized simple RNN, ``h_t = phi(BN(W_h h_{t-1}) + BN(W_x x_t) + b)``.

    Arguments as in `bn_lstm`, with H features where that has 4H; returns the output ``[T, B, H]``,
    h_n ``[B, H]`` and the minibatch statistics.
    """
    a = RNNArguments(
        wx,
        None,
        weight_hh,
        bias,
        gamma_x,
        gamma_h,
        h0,
        lengths=lengths,
        **_zoneout(h=zoneout_h),
        eps=eps,
        input_stats=input_stats,
        padding=padding,
        min_rows=min_rows,
        nonlinearity=nonlinearity,
    )
    output, h_n, statistics = run(RNN, [RNN.with_population(a, population)], group)[0]
    return output, h_n, statistics


def bn_gru(
    wx: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    gamma_x: Tensor,
    gamma_h: Tensor,
    h0: Tensor,
    beta_n: Tensor | None,
    *,
    lengths: Tensor | None = None,
    population: Statistics | None = None,
    eps: float = 1e-5,
    input_stats: InputStats = "step",
    padding: Padding = "exclude",
    min_rows: int = 1,
    zoneout_h: Tensor | float = 0.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Statistics]:
    """The batch-normalized GRU, equations in `rbn.ops.reference.bn_gru`.

    beta_n ``[H]`` is the shift of the candidate's recurrent term. All else is as in `bn_rnn`, with
    3H features where `bn_lstm` has 4H, in torch's gate order r, z, n.
    """
    tensors = (wx, None, weight_hh, bias, gamma_x, gamma_h, h0, beta_n, lengths)
    a = RNNArguments(
        *tensors,
        nonlinearity="gates",
        eps=eps,
        input_stats=input_stats,
        padding=padding,
        min_rows=min_rows,
        **_zoneout(h=zoneout_h),
    )
    output, h_n, statistics = run(GRU, [GRU.with_population(a, population)], group)[0]
    return output, h_n, statistics


def _zoneout(**given: Tensor | float) -> dict[str, Any]:
    """Split zoneout arguments into masks and rates, under the operators' argument names."""
    arguments: dict[str, Any] = {}
    for state, value in given.items():
        masked = isinstance(value, Tensor)
        arguments[f"mask_{state}"] = value if masked else None
        arguments[f"rate_{state}"] = 0.0 if masked else value
    return arguments


def symbol_rows(symbols: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The input term W_x x_t of one-hot inputs x_t: columns of W_x.

    On a GPU, the gradient for up to 256 symbols is deterministic: it is summed in float32 in a
    fixed order and rounded once, to the dtype of W_x. With more symbols, in float64, or when
    compiled, PyTorch computes the gradient; its last bits may differ from run to run.

    Args:
        symbols: int64 ``[T, B]``, from 0 to I - 1. Other values raise an error on the CPU and
            trigger a device-side assertion on a GPU.
        weight: W_x, ``[4H, I]``.
        dtype: dtype of the result.

    Returns:
        ``[T, B, 4H]``.
    """
    rows: Tensor = select("symbol_rows", weight)(symbols, weight, dtype)
    return rows


def linear_cross_entropy(
    input: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, reduction: str = "mean"
) -> Tensor:
    """The cross-entropy of a linear layer's softmax, without returning the scores.

    Computes ``F.cross_entropy(F.linear(input, weight, bias).float(), targets)``, and follows
    autocast as that would. A fused kernel runs on a GPU, in float32 and half precision, for at most
    1024 classes. It does not round the scores to half precision and has no second derivative.

    Args:
        input: ``[..., H]``.
        weight: ``[classes, H]``.
        bias: ``[classes]``, or None.
        targets: the correct classes, integers ``[...]`` from 0 to ``classes - 1``. A CPU refuses
            other values. On a GPU, which cannot check them without waiting, they make the loss NaN
            if the fused kernel runs; otherwise `F.cross_entropy` handles them.
        reduction: ``"mean"`` or ``"sum"``, over all targets.

    Returns:
        The loss in nats, a float32 scalar.
    """
    check_targets(input, targets, reduction)
    loss: Tensor = select("linear_cross_entropy", input)(input, weight, bias, targets, reduction)
    return loss
