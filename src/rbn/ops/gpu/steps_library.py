"""`torch.ops.rbn.gpu_ln_lstm` and `torch.ops.rbn.gpu_bn_rnn`, with their autograd formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.custom import Formula, Operator, like_inputs, results
from rbn.ops.gpu.bn_rnn import rnn_steps
from rbn.ops.gpu.ln_lstm import ln_steps

_LSTM_ARGS = (
    "Tensor wx, Tensor weight_hh, Tensor? bias, Tensor gamma_x, Tensor gamma_h, Tensor gamma_c, "
    "Tensor beta_c, Tensor h0, Tensor c0, Tensor? lengths, Tensor[] population, Tensor? mask_c, "
    "Tensor? mask_h, float rate_c, float rate_h, float eps, bool save"
)
_RNN_ARGS = (
    "Tensor wx, Tensor weight_hh, Tensor? bias, Tensor gamma_x, Tensor gamma_h, Tensor h0, "
    "Tensor? lengths, Tensor[] population, Tensor? mask_h, float rate_h, float eps, "
    "str input_stats, str padding, str nonlinearity, bool save"
)


# Layer-normalized LSTM ---------------------------------------------------------------------------


@torch.library.custom_op(
    "rbn::gpu_ln_lstm",
    mutates_args=(),
    schema=f"({_LSTM_ARGS}) -> {results(len(ln_steps.Outputs._fields))}",
)
def _ln_lstm(*args: Any) -> tuple[Tensor, ...]:
    """`rbn.ops.gpu.ln_lstm.ln_steps.forward` as an operator."""
    return tuple(ln_steps.forward(ln_steps.Inputs(*args)))


@_ln_lstm.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    return tuple(ln_steps.empty_outputs(ln_steps.Inputs(*args)))


@torch.library.custom_op(
    "rbn::gpu_ln_lstm_backward",
    mutates_args=(),
    schema=(
        f"(Tensor? doutput, Tensor? dh_n, Tensor? dc_n, Tensor[] results, {_LSTM_ARGS}) -> "
        f"{results(len(ln_steps.Grads._fields))}"
    ),
)
def _ln_lstm_backward(
    doutput: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    results: Sequence[Tensor],
    *args: Any,
) -> tuple[Tensor, ...]:
    """`rbn.ops.gpu.ln_lstm.ln_steps.backward` as an operator."""
    a, r = ln_steps.Inputs(*args), ln_steps.Outputs(*results)
    with torch.autocast(a.wx.device.type, enabled=False):  # where backward() is called under it
        return tuple(ln_steps.backward(a, r, doutput, dh_n, dc_n))


@_ln_lstm_backward.register_fake
def _(
    doutput: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    results: Sequence[Tensor],
    *args: Any,
) -> tuple[Tensor, ...]:
    return like_inputs(ln_steps.Inputs(*args), ln_steps.Grads._fields)


ln_lstm_op = Operator(
    _ln_lstm,
    _ln_lstm_backward,
    Formula(ln_steps.Inputs, ln_steps.Grads._fields, results=3),
)


# Batch-normalized simple RNN ---------------------------------------------------------------------


@torch.library.custom_op(
    "rbn::gpu_bn_rnn",
    mutates_args=(),
    schema=f"({_RNN_ARGS}) -> {results(len(rnn_steps.Outputs._fields))}",
)
def _bn_rnn(*args: Any) -> tuple[Tensor, ...]:
    """`rbn.ops.gpu.bn_rnn.rnn_steps.forward` as an operator."""
    return tuple(rnn_steps.forward(rnn_steps.Inputs(*args)))


@_bn_rnn.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    return tuple(rnn_steps.empty_outputs(rnn_steps.Inputs(*args)))


@torch.library.custom_op(
    "rbn::gpu_bn_rnn_backward",
    mutates_args=(),
    schema=(
        f"(Tensor? doutput, Tensor? dh_n, Tensor[] results, {_RNN_ARGS}) -> "
        f"{results(len(rnn_steps.Grads._fields))}"
    ),
)
def _bn_rnn_backward(
    doutput: Tensor | None, dh_n: Tensor | None, results: Sequence[Tensor], *args: Any
) -> tuple[Tensor, ...]:
    """`rbn.ops.gpu.bn_rnn.rnn_steps.backward` as an operator."""
    a, r = rnn_steps.Inputs(*args), rnn_steps.Outputs(*results)
    with torch.autocast(a.wx.device.type, enabled=False):  # where backward() is called under it
        return tuple(rnn_steps.backward(a, r, doutput, dh_n))


@_bn_rnn_backward.register_fake
def _(
    doutput: Tensor | None, dh_n: Tensor | None, results: Sequence[Tensor], *args: Any
) -> tuple[Tensor, ...]:
    return like_inputs(rnn_steps.Inputs(*args), rnn_steps.Grads._fields)


bn_rnn_op = Operator(
    _bn_rnn,
    _bn_rnn_backward,
    Formula(rnn_steps.Inputs, rnn_steps.Grads._fields, results=2),
)
