"""One time step of each recurrence, built from PyTorch's own operators, for streaming.

The operators in `rbn.ops` have a set-up cost that pays off over many steps but exceeds the cost of
a single one. These functions normalize with population statistics or not at all, run on the CPU and
on CUDA, and are differentiable any number of times. In float32 an LSTM step is one call of the
compiled kernel on the CPU (batch size one), and on a GPU one launch, or two products and one
launch. Statistics must not change before the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops import dispatch
from rbn.ops.cpu import inference
from rbn.ops.cpu.inference import Row, Weights
from rbn.ops.operator import is_traced

Rows = Sequence[Row | None]  # of the terms x, h and c


def supported(x: Tensor) -> bool:
    """Whether these functions may run for an input like this, in the current context."""
    return (
        dispatch.chosen_by_device()
        and x.dtype in (torch.float32, torch.float64)
        and x.device.type in ("cpu", "cuda")
        and not is_traced(x)
    )


def kernel_covers(weight: Tensor, *tensors: Tensor) -> bool:
    """Whether the compiled CPU kernel can run with these tensors (it has no backward pass)."""
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and supported(weight)
        and not torch.is_autocast_enabled("cpu")
        and not any(is_traced(tensor) for tensor in tensors)
        and not (torch.is_grad_enabled() and _any_requires_grad(tensors))
        and inference.load() is not None
    )


def lstm(
    x: Tensor,
    weights: Weights,
    h: Tensor,
    c: Tensor,
    rows: Rows = (None, None, None),
    eps: float = 0.0,
    zoneout: tuple[float, ...] = (0.0, 0.0),
    pass_normalized_cell: bool = False,
) -> tuple[Tensor, Tensor]:
    """One step of the plain LSTM (without gammas) or of the batch-normalized one.

    Args:
        x: ``[B, I]``.
        weights: the parameters, as in `rbn.ops.bn_lstm`.
        h: the previous hidden state, ``[B, H]``.
        c: the previous cell, ``[B, H]``.
        rows: the population statistics of this step.
        eps: added to every variance.
        zoneout: the rates (cell, hidden).
        pass_normalized_cell: return BN(c) as the new cell (an ablation).

    Returns:
        The new h and c, ``[B, H]`` each.
    """
    tensors = (x, *weights, h, c)
    options = (rows, eps, zoneout, pass_normalized_cell)
    if torch.is_grad_enabled() and _any_requires_grad(tensors):
        results: tuple[Tensor, Tensor] = _apply(options, *tensors)  # type: ignore[no-untyped-call]
        return results
    return _fastest(x)(x, weights, h, c, *options)


def _lstm(
    x: Tensor,
    weights: Weights,
    h: Tensor,
    c: Tensor,
    rows: Rows,
    eps: float,
    zoneout: tuple[float, ...],
    pass_normalized_cell: bool,
) -> tuple[Tensor, Tensor]:
    """`lstm` from PyTorch's operators."""
    weight_ih, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta_c = weights
    of_x, of_h, of_c = rows
    wx, wh = F.linear(x, weight_ih), F.linear(h, weight_hh)
    if gamma_h is None:
        wx = wx if bias is None else wx + bias
    elif gamma_x is None:  # one normalization of the sum
        wx = _bn(wx + wh, gamma_h, bias, of_h, eps)
        wh = torch.zeros_like(wx)
    else:
        wx, wh = _bn(wx, gamma_x, bias, of_x, eps), _bn(wh, gamma_h, None, of_h, eps)
    o, new_c = _gates(wx, wh, c)
    if gamma_c is not None:
        read = _bn(new_c, gamma_c, beta_c, of_c, eps)
    else:
        read = new_c if beta_c is None else new_c + beta_c
    new_h = o * torch.tanh(read)
    if pass_normalized_cell:
        new_c = read
    return _zoneout(zoneout[1], h, new_h), _zoneout(zoneout[0], c, new_c)


class _LSTMStep(torch.autograd.Function):
    """`lstm` with a gradient. The forward pass uses the fast kernels; backward recomputes it."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Any) -> tuple[Tensor, Tensor]:
        ctx.options = options
        ctx.save_for_backward(*tensors)
        x, *weights, h, c = tensors
        return _fastest(x)(x, Weights(*weights), h, c, *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, so that a tensor passed twice gets the gradient of each use.
            tensors: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
            wanted = [t for t in tensors if t is not None and t.requires_grad]
            x, *weights, h, c = tensors
            outputs = _lstm(x, Weights(*weights), h, c, *ctx.options)
            result = iter(
                torch.autograd.grad(outputs, wanted, gradients, create_graph=create_graph)
            )
        return None, *(next(result) if t is not None and t.requires_grad else None for t in tensors)


# Skips the Python code of `apply` that handles `torch.func` transforms, which never reach this.
_apply = super(torch.autograd.Function, _LSTMStep).apply


def ln_lstm(
    x: Tensor, weights: Weights, h: Tensor, c: Tensor, eps: float, zoneout: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """One step of the layer-normalized LSTM; arguments and results as in `lstm`."""
    weight_ih, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta_c = weights
    hidden = (weight_hh.shape[1],)
    features = (weight_hh.shape[0],)
    wx = F.layer_norm(F.linear(x, weight_ih), features, gamma_x, bias, eps)
    wh = F.layer_norm(F.linear(h, weight_hh), features, gamma_h, None, eps)
    o, new_c = _gates(wx, wh, c)
    new_h = o * torch.tanh(F.layer_norm(new_c, hidden, gamma_c, beta_c, eps))
    return _zoneout(zoneout[1], h, new_h), _zoneout(zoneout[0], c, new_c)


def bn_rnn(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    gamma_x: Tensor,
    gamma_h: Tensor,
    h: Tensor,
    nonlinearity: str,
    rows: Rows,
    eps: float,
    zoneout: tuple[float, ...],
) -> Tensor:
    """One step of the batch-normalized simple RNN: the new h ``[B, H]``; arguments as in `lstm`."""
    wx = _bn(F.linear(x, weight_ih), gamma_x, bias, rows[0], eps)
    pre = wx + _bn(F.linear(h, weight_hh), gamma_h, None, rows[1], eps)
    return _zoneout(zoneout[0], h, torch.tanh(pre) if nonlinearity == "tanh" else torch.relu(pre))


def bn_gru(
    x: Tensor, weights: Sequence[Any], h: Tensor, rows: Rows, eps: float, zoneout: tuple[float, ...]
) -> Tensor:
    """One step of the batch-normalized GRU: the new h ``[B, H]``; arguments as in `lstm`."""
    weight_ih, weight_hh, bias, gamma_x, gamma_h, beta_n = weights
    r, z, n = _bn(F.linear(x, weight_ih), gamma_x, bias, rows[0], eps).chunk(3, dim=1)
    r_h, z_h, n_h = _bn(F.linear(h, weight_hh), gamma_h, None, rows[1], eps).chunk(3, dim=1)
    n_h = n_h if beta_n is None else n_h + beta_n
    n = torch.tanh(torch.addcmul(n, torch.sigmoid(r + r_h), n_h))
    return _zoneout(zoneout[0], h, torch.lerp(n, h, torch.sigmoid(z + z_h)))


def _any_requires_grad(tensors: Sequence[Tensor | None]) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _fastest(x: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """The fastest function that computes an LSTM step for an input like this."""
    if x.dtype != torch.float32:
        return _lstm
    if x.is_cuda:
        gpu = dispatch.gpu_kernels(x)
        return _lstm if gpu is None else gpu.lstm_cell_step
    if x.shape[0] == 1 and x.device.type == "cpu" and inference.load() is not None:
        return inference.step
    return _lstm


def _bn(term: Tensor, gamma: Tensor, beta: Tensor | None, row: Row | None, eps: float) -> Tensor:
    """Equation 5 with population statistics."""
    assert row is not None
    mean, var = row.mean[row.row], row.var[row.row]
    normalized: Tensor = torch.native_batch_norm(
        term, gamma, beta, mean, var, training=False, momentum=0.0, eps=eps
    )[0]
    return normalized


def _gates(wx: Tensor, wh: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The output gate and the new cell, from the two terms of the pre-activations."""
    hidden = c.shape[1]
    differentiable = torch.is_grad_enabled() and _any_requires_grad((wx, wh, c))
    if wx.is_cuda and not differentiable:  # one kernel, which returns all four gates
        _, cell, gates = torch.ops.aten._thnn_fused_lstm_cell(wx, wh, c)
        return gates.view(wx.shape)[:, 3 * hidden :], cell
    both = wx + wh
    i, f, _, o = torch.sigmoid(both).chunk(4, dim=1)
    return o, torch.addcmul(f * c, i, torch.tanh(both.narrow(1, 2 * hidden, hidden)))


def _zoneout(rate: float, previous: Tensor, new: Tensor) -> Tensor:
    """The expected value of zoneout."""
    return torch.lerp(new, previous, rate) if rate else new
