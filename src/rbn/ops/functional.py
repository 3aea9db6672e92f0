"""The recurrences as functions, whichever backend runs them.

All work on one layer and one direction. ``wx`` is the input term W_x x_t of every step, not yet
normalized and without a bias: a matrix product, or a look-up of rows for one-hot inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rbn.ops.checks import (
    check_masks,
    check_sequence_lengths,
    check_shapes,
    check_targets,
    constant_statistics,
)
from rbn.ops.dispatch import (
    may_take_feature,
    run,
    run_from_inputs,
    run_from_one_feature,
    run_together,
    select,
)
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
        gamma_c: scale of the cell, ``[H]``; None leaves the output's cell unnormalized (an
            ablation), beta_c is still added.
        beta_c: shift of the cell, ``[H]``.
        h0: initial hidden state, ``[B, H]``.
        c0: initial cell, ``[B, H]``.
        lengths: unpadded steps of each row, integers ``[B]``, each from 1 to T.
        population: statistics to normalize with, constants without a gradient; None uses those
            of the minibatch.
        eps: added to every variance.
        input_stats: minibatch statistics of the input term for each step, or over the sequence.
        padding: whether padded rows count in minibatch statistics.
        zoneout_c: units of the cell that keep their value: bool ``[T, B, H]``, or the rate.
        zoneout_h: the same for the hidden state.
        pass_normalized_cell: the next step continues from BN(c_t) (an ablation).
        group: processes whose rows make one minibatch; statistics and gradients are those of all
            rows together. All must call it, and its backward pass, with the same T; B may differ
            and be 0. Runs the reference. None: the minibatch is this process's.

    Returns:
        The output ``[T, B, H]`` (zero where padded), h_n and c_n ``[B, H]`` after each row's last
        unpadded step, and the minibatch statistics (all None where `population` is given).
    """
    H = check_shapes(
        wx,
        4,
        may_be_empty=group is not None,
        weight_hh=weight_hh,
        bias=bias,
        gamma_x=gamma_x,
        gamma_h=gamma_h,
        gamma_c=gamma_c,
        beta_c=beta_c,
        h0=h0,
        c0=c0,
    )
    check_sequence_lengths(lengths, wx)
    check_masks(wx, H, zoneout_c=zoneout_c, zoneout_h=zoneout_h)
    x, c = None if gamma_x is None else 4 * H, None if gamma_c is None else H
    population = constant_statistics(population, wx, x=x, h=4 * H, c=c)
    result: tuple[Tensor, Tensor, Tensor, Statistics] = run(
        "bn_lstm",
        wx,
        wx,
        weight_hh,
        bias,
        gamma_x,
        gamma_h,
        gamma_c,
        beta_c,
        h0,
        c0,
        lengths=lengths,
        population=population,
        eps=eps,
        input_stats=input_stats,
        padding=padding,
        zoneout_c=zoneout_c,
        zoneout_h=zoneout_h,
        pass_normalized_cell=pass_normalized_cell,
        group=group,
    )
    return result


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
    H = check_shapes(wx, 4, weight_hh=weight_hh, bias=bias, beta_c=beta_c, h0=h0, c0=c0)
    check_sequence_lengths(lengths, wx)
    check_masks(wx, H, zoneout_c=zoneout_c, zoneout_h=zoneout_h)
    result: tuple[Tensor, Tensor, Tensor] = run(
        "lstm",
        wx,
        wx,
        weight_hh,
        bias,
        beta_c,
        h0,
        c0,
        lengths=lengths,
        zoneout_c=zoneout_c,
        zoneout_h=zoneout_h,
    )
    return result


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
    H = check_shapes(
        wx,
        4,
        weight_hh=weight_hh,
        bias=bias,
        gamma_x=gamma_x,
        gamma_h=gamma_h,
        gamma_c=gamma_c,
        beta_c=beta_c,
        h0=h0,
        c0=c0,
    )
    check_sequence_lengths(lengths, wx)
    check_masks(wx, H, zoneout_c=zoneout_c, zoneout_h=zoneout_h)
    result: tuple[Tensor, Tensor, Tensor] = run(
        "ln_lstm",
        wx,
        wx,
        weight_hh,
        bias,
        gamma_x,
        gamma_h,
        gamma_c,
        beta_c,
        h0,
        c0,
        lengths=lengths,
        eps=eps,
        zoneout_c=zoneout_c,
        zoneout_h=zoneout_h,
    )
    return result


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
    zoneout_h: Tensor | float = 0.0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Statistics]:
    """The batch-normalized simple RNN, ``h_t = phi(BN(W_h h_{t-1}) + BN(W_x x_t) + b)``.

    Arguments as in `bn_lstm`, with H features where that has 4H; returns the output ``[T, B, H]``,
    h_n ``[B, H]`` and the minibatch statistics.
    """
    H = check_shapes(
        wx,
        1,
        may_be_empty=group is not None,
        weight_hh=weight_hh,
        bias=bias,
        gamma_x=gamma_x,
        gamma_h=gamma_h,
        h0=h0,
    )
    check_sequence_lengths(lengths, wx)
    check_masks(wx, H, zoneout_h=zoneout_h)
    population = constant_statistics(population, wx, x=H, h=H)
    result: tuple[Tensor, Tensor, Statistics] = run(
        "bn_rnn",
        wx,
        wx,
        weight_hh,
        bias,
        gamma_x,
        gamma_h,
        h0,
        nonlinearity=nonlinearity,
        lengths=lengths,
        population=population,
        eps=eps,
        input_stats=input_stats,
        padding=padding,
        zoneout_h=zoneout_h,
        group=group,
    )
    return result


_OPS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "bn_lstm": bn_lstm,
    "lstm": lstm,
    "ln_lstm": ln_lstm,
    "bn_rnn": bn_rnn,
}


def side_by_side(op: str, calls: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Several calls of a recurrence that do not depend on each other, such as two directions.

    On a GPU with room for them they are one launch.

    Args:
        op: ``"bn_lstm"``, ``"lstm"``, ``"ln_lstm"`` or ``"bn_rnn"``.
        calls: the arguments of each call by name. All have the same shapes, options and lengths.

    Returns:
        What the recurrence returns for each of them.
    """
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}")
    found = run_together(op, calls) if len(calls) > 1 else None
    return [_OPS[op](**call) for call in calls] if found is None else found


def symbol_rows(symbols: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The input term W_x x_t of one-hot inputs x_t: columns of W_x.

    On a GPU the gradient of up to 256 symbols is made in float32, in the same order every time, and
    rounded once, to the type of W_x. That of more symbols, in float64, or compiled is PyTorch's,
    which may differ in its last bits from run to run.

    Args:
        symbols: int64 ``[T, B]``, from 0 to I - 1. Others are an error on the CPU and a failed
            assertion of the device on a GPU.
        weight: W_x, ``[4H, I]``.
        dtype: of the result.

    Returns:
        ``[T, B, 4H]``.
    """
    rows: Tensor = run("symbol_rows", weight, symbols, weight, dtype)
    return rows


def linear_cross_entropy(
    input: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, reduction: str = "mean"
) -> Tensor:
    """The cross-entropy of a linear layer's softmax, without the scores as a result.

    ``F.cross_entropy(F.linear(input, weight, bias).float(), targets)``, and under autocast what
    that would be there. On a GPU, in float32 and half precision and for at most 1024 classes, the
    scores are not rounded to half precision, and there is no second derivative.

    Args:
        input: ``[..., H]``.
        weight: ``[classes, H]``.
        bias: ``[classes]``, or None.
        targets: the right classes, integers ``[...]`` from 0 to ``classes - 1``. Others are refused
            on a CPU. On a GPU, which cannot say so, they make the loss NaN where its kernels run,
            and mean what they mean in `F.cross_entropy` elsewhere.
        reduction: ``"mean"`` or ``"sum"``, over all targets.

    Returns:
        The loss in nats, a float32 scalar.
    """
    check_targets(input, targets, reduction)
    loss: Tensor = select("linear_cross_entropy", input)(input, weight, bias, targets, reduction)
    return loss


def takes_features(op: str, x: Tensor) -> bool:
    """Whether `from_one_feature` may take an input ``[T, B, F]``: it has one feature, for example.

    Nothing is made for that yet; `from_one_feature` may still decline.
    """
    return op in _OPS and x.shape[-1] == 1 and may_take_feature(op, x)


def from_one_feature(
    op: str, calls: Sequence[dict[str, Any]], weights: Sequence[Tensor]
) -> list[tuple[Any, ...]] | None:
    """`side_by_side` of inputs that `takes_features`, whose input terms need not be made.

    Args:
        op: the name of the recurrence.
        calls: the arguments of each call by name. In the place of the input term is the input,
            expanded to the shape of it.
        weights: W_x ``[4H, 1]`` for each call, in the type of the input.

    Returns:
        What the recurrence returns for each call; None where the input terms have to be made.
    """
    return run_from_one_feature(op, calls, weights)


def from_inputs(
    op: str, calls: Sequence[dict[str, Any]], weights: Sequence[Tensor]
) -> list[tuple[Any, ...]] | None:
    """`side_by_side` with the products of the inputs, all in one node of autograd.

    Args:
        op: the name of the recurrence.
        calls: the arguments of each call by name, all of them. In the place of the input term is
            the input ``[T, B, I]``, and initial states that all rows share may be ``[H]``.
        weights: W_x ``[4H, I]`` for each call, in the type of the input.

    Returns:
        What the recurrence returns for each call; None where input terms and states have to be
        made first.
    """
    return run_from_inputs(op, calls, weights)
