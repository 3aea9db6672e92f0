"""The fused recurrences as PyTorch operators: `torch.ops.rbn.lstm` and `torch.ops.rbn.rnn`.

Each is a custom operator with a fake implementation (so that `torch.compile` traces through it
without running it) and an autograd formula whose backward pass is a second custom operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.cpu import compiled_lstm, fused_lstm, fused_rnn, scan
from rbn.ops.custom import Formula, Operator, like_inputs, results
from rbn.ops.types import compute_dtype

_LSTM_ARGS = (
    "Tensor wx, Tensor weight_hh, Tensor? bias, Tensor? gamma_x, Tensor? gamma_h, "
    "Tensor? gamma_c, Tensor? beta_c, Tensor h0, Tensor c0, Tensor? lengths, "
    "Tensor[] population, Tensor? mask_c, Tensor? mask_h, float rate_c, float rate_h, "
    "str norm, float eps, str input_stats, str padding, bool pass_normalized_cell, bool save"
)
_RNN_ARGS = (
    "Tensor wx, Tensor weight_hh, Tensor? bias, Tensor gamma_x, Tensor gamma_h, Tensor h0, "
    "Tensor? lengths, Tensor[] population, Tensor? mask_h, float rate_h, float eps, "
    "str input_stats, str padding, str nonlinearity, bool save"
)


# LSTM, plain, batch-normalized and layer-normalized ----------------------------------------------


@torch.library.custom_op(
    "rbn::lstm",
    mutates_args=(),
    device_types="cpu",
    schema=f"({_LSTM_ARGS}) -> {results(len(fused_lstm.Outputs._fields))}",
)
def _lstm(*args: Any) -> tuple[Tensor, ...]:
    """`rbn.ops.cpu.fused_lstm.forward` as an operator."""
    a = fused_lstm.Inputs(*args)
    return tuple((compiled_lstm if compiled_lstm.usable(a) else fused_lstm).forward(a))


@_lstm.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = fused_lstm.Inputs(*args)
    T, B, G = a.wx.shape
    H = G // 4
    full = compute_dtype(a.wx.dtype)

    def new(*shape: int, dtype: torch.dtype = full) -> Tensor:
        return a.wx.new_empty(shape, dtype=dtype)

    moments = [new(*shape) for shape in fused_lstm.statistics_shapes(a) for _ in range(2)]
    batch_stats = a.norm == "batch" and not a.population
    include = a.lengths is not None and batch_stats and a.padding == "include"
    own_cell = a.mask_c is not None or a.rate_c != 0 or a.pass_normalized_cell or include
    own_hidden = a.lengths is not None or a.wx.dtype != full
    saved = [
        (4 * H, a.gamma_h is not None),
        (4 * H, True),
        (H, True),
        (H, own_cell),
        (H, True),
        (H, own_hidden),
    ]
    return (
        new(T, B, H, dtype=a.wx.dtype),
        new(B, H, dtype=a.wx.dtype),
        new(B, H, dtype=a.wx.dtype),
        *moments,
        *(new(T * B, f) if a.save and present else new(0) for f, present in saved),
    )


@torch.library.custom_op(
    "rbn::lstm_backward",
    mutates_args=(),
    device_types="cpu",
    schema=(
        f"(Tensor? doutput, Tensor? dh_n, Tensor? dc_n, Tensor[] results, {_LSTM_ARGS}) -> "
        f"{results(len(fused_lstm.Grads._fields))}"
    ),
)
def _lstm_backward(
    doutput: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    results: Sequence[Tensor],
    *args: Any,
) -> tuple[Tensor, ...]:
    """`rbn.ops.cpu.fused_lstm.backward` as an operator."""
    a, r = fused_lstm.Inputs(*args), fused_lstm.Outputs(*results)
    module = compiled_lstm if compiled_lstm.usable(a) else fused_lstm
    with torch.autocast("cpu", enabled=False):  # where backward() is called under it
        return tuple(module.backward(a, r, doutput, dh_n, dc_n))


@_lstm_backward.register_fake
def _(
    doutput: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    results: Sequence[Tensor],
    *args: Any,
) -> tuple[Tensor, ...]:
    a = fused_lstm.Inputs(*args)
    return like_inputs(a, fused_lstm.Grads._fields)


# The simple RNN, batch-normalized ----------------------------------------------------------------


@torch.library.custom_op(
    "rbn::rnn",
    mutates_args=(),
    device_types="cpu",
    schema=f"({_RNN_ARGS}) -> {results(len(fused_rnn.Outputs._fields))}",
)
def _rnn(*args: Any) -> tuple[Tensor, ...]:
    """`rbn.ops.cpu.fused_rnn.forward` as an operator."""
    return tuple(fused_rnn.forward(fused_rnn.Inputs(*args)))


@_rnn.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = fused_rnn.Inputs(*args)
    T, B, H = a.wx.shape
    full = compute_dtype(a.wx.dtype)

    def new(*shape: int, dtype: torch.dtype = full) -> Tensor:
        return a.wx.new_empty(shape, dtype=dtype)

    include = a.lengths is not None and not a.population and a.padding == "include"
    saved = [
        True,
        a.mask_h is not None or a.rate_h != 0 or include,
        a.lengths is not None or a.wx.dtype != full,
    ]
    return (
        new(T, B, H, dtype=a.wx.dtype),
        new(B, H, dtype=a.wx.dtype),
        *(new(*shape) for shape in fused_rnn.statistics_shapes(a) for _ in range(2)),
        *(new(T * B, H) if a.save and present else new(0) for present in saved),
    )


@torch.library.custom_op(
    "rbn::rnn_backward",
    mutates_args=(),
    device_types="cpu",
    schema=(
        f"(Tensor? doutput, Tensor? dh_n, Tensor[] results, {_RNN_ARGS}) -> "
        f"{results(len(fused_rnn.Grads._fields))}"
    ),
)
def _rnn_backward(
    doutput: Tensor | None, dh_n: Tensor | None, results: Sequence[Tensor], *args: Any
) -> tuple[Tensor, ...]:
    """`rbn.ops.cpu.fused_rnn.backward` as an operator."""
    with torch.autocast("cpu", enabled=False):  # where backward() is called under it
        return tuple(
            fused_rnn.backward(fused_rnn.Inputs(*args), fused_rnn.Outputs(*results), doutput, dh_n)
        )


@_rnn_backward.register_fake
def _(
    doutput: Tensor | None, dh_n: Tensor | None, results: Sequence[Tensor], *args: Any
) -> tuple[Tensor, ...]:
    return like_inputs(fused_rnn.Inputs(*args), fused_rnn.Grads._fields)


lstm_op = Operator(
    _lstm,
    _lstm_backward,
    Formula(fused_lstm.Inputs, fused_lstm.Grads._fields, results=3),
    in_onnx=scan.lstm,
)
rnn_op = Operator(
    _rnn,
    _rnn_backward,
    Formula(fused_rnn.Inputs, fused_rnn.Grads._fields, results=2),
    in_onnx=scan.rnn,
)
