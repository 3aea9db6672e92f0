"""One time step of each recurrence, built from PyTorch's own operators, for streaming.

The operators in `rbn.ops` have a set-up cost that pays off over many steps but exceeds the cost of
a single one. These functions normalize with population statistics or not at all, run on the CPU and
on CUDA, and are differentiable any number of times. In float32 a step is one call of the compiled
kernel on the CPU (batch size one), and an LSTM step on a GPU one launch, or two products and one
launch. Statistics must not change before the backward pass.
"""

from __future__ import annotations

import functools
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
States = tuple[Tensor, ...]  # h, or h and c
Step = Callable[..., States]


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
    states: States,
    rows: Rows = (None, None, None),
    eps: float = 0.0,
    zoneout: tuple[float, ...] = (0.0, 0.0),
    pass_normalized_cell: bool = False,
) -> States:
    """One step of the plain LSTM (without gammas) or of the batch-normalized one.

    Args:
        x: ``[B, I]``.
        weights: the parameters, as in `rbn.ops.bn_lstm`.
        states: the previous hidden state and cell, ``[B, H]`` each.
        rows: the population statistics of this step.
        eps: added to every variance.
        zoneout: the rates (cell, hidden).
        pass_normalized_cell: return BN(c) as the new cell (an ablation).

    Returns:
        The new h and c, ``[B, H]`` each.
    """
    options = (rows, eps, zoneout, pass_normalized_cell)
    if x.is_cuda and x.dtype == torch.float32:
        gpu = dispatch.gpu_kernels(x)
        kernel = None if gpu is None else gpu.lstm_cell_step
    else:
        kernel = inference.step if _compiled(x) else None
    return _run(_lstm, kernel, x, weights, states, options)


def ln_lstm(
    x: Tensor, weights: Weights, states: States, eps: float, zoneout: tuple[float, ...]
) -> States:
    """One step of the layer-normalized LSTM; arguments and results as in `lstm`."""
    kernel = _LAYER_LSTM if _compiled(x) else None
    return _run(_ln_lstm, kernel, x, weights, states, ((), eps, zoneout))


def bn_rnn(
    x: Tensor,
    weights: Weights,
    states: States,
    nonlinearity: str,
    rows: Rows,
    eps: float,
    zoneout: tuple[float, ...],
) -> States:
    """One step of the batch-normalized simple RNN or GRU: the new h ``[B, H]``.

    Arguments as in `lstm`. nonlinearity: ``"tanh"``, ``"relu"``, or ``"gates"`` for the GRU, whose
    beta_n is the last of the weights.
    """
    plain, kernel = _ONE_STATE[nonlinearity]
    options = (rows, eps, zoneout)
    return _run(plain, kernel if _compiled(x) else None, x, weights, states, options)


def _compiled(x: Tensor) -> bool:
    """Whether the compiled CPU kernel runs a step with this input."""
    return (
        x.dtype == torch.float32
        and x.shape[0] == 1
        and x.device.type == "cpu"
        and inference.load() is not None
    )


def _run(
    plain: Step,
    kernel: Step | None,
    x: Tensor,
    weights: Weights,
    states: States,
    options: tuple[Any, ...],
) -> States:
    """Run a step, with the kernel if there is one."""
    if kernel is None:
        return plain(x, weights, states, *options)
    if not torch.is_grad_enabled():
        return kernel(x, weights, states, *options)
    tensors = (x, *weights, *states)
    if not _any_requires_grad(tensors):
        return kernel(x, weights, states, *options)
    results: States = _apply(plain, kernel, options, *tensors)  # type: ignore[no-untyped-call]
    return results


class _Step(torch.autograd.Function):
    """A step with a gradient. The forward pass uses a kernel; backward recomputes it."""

    @staticmethod
    def forward(
        ctx: Any, plain: Step, kernel: Step, options: tuple[Any, ...], *tensors: Any
    ) -> States:
        ctx.plain, ctx.options = plain, options
        ctx.save_for_backward(*tensors)
        return kernel(*_grouped(tensors), *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, so that a tensor passed twice gets the gradient of each use.
            tensors: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
            wanted = [t for t in tensors if t is not None and t.requires_grad]
            outputs = ctx.plain(*_grouped(tensors), *ctx.options)
            result = iter(
                torch.autograd.grad(outputs, wanted, gradients, create_graph=create_graph)
            )
        own = (next(result) if t is not None and t.requires_grad else None for t in tensors)
        return None, None, None, *own


# Skips the Python code of `apply` that handles `torch.func` transforms, which never reach this.
_apply = super(torch.autograd.Function, _Step).apply


def _grouped(tensors: Sequence[Any]) -> tuple[Tensor, Weights, States]:
    """The input, the weights and the states."""
    end = 1 + len(Weights._fields)
    return tensors[0], Weights(*tensors[1:end]), tuple(tensors[end:])


def _lstm(
    x: Tensor,
    weights: Weights,
    states: States,
    rows: Rows,
    eps: float,
    zoneout: tuple[float, ...],
    pass_normalized_cell: bool,
) -> States:
    """`lstm` from PyTorch's operators."""
    weight_ih, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta_c = weights
    (of_x, of_h, of_c), (h, c) = rows, states
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


def _ln_lstm(
    x: Tensor, weights: Weights, states: States, rows: Rows, eps: float, zoneout: tuple[float, ...]
) -> States:
    """`ln_lstm` from PyTorch's operators. rows: none."""
    weight_ih, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta_c = weights
    h, c = states
    hidden = (weight_hh.shape[1],)
    features = (weight_hh.shape[0],)
    wx = F.layer_norm(F.linear(x, weight_ih), features, gamma_x, bias, eps)
    wh = F.layer_norm(F.linear(h, weight_hh), features, gamma_h, None, eps)
    o, new_c = _gates(wx, wh, c)
    new_h = o * torch.tanh(F.layer_norm(new_c, hidden, gamma_c, beta_c, eps))
    return _zoneout(zoneout[1], h, new_h), _zoneout(zoneout[0], c, new_c)


def _bn_rnn(
    nonlinearity: Callable[[Tensor], Tensor],
    x: Tensor,
    weights: Weights,
    states: States,
    rows: Rows,
    eps: float,
    zoneout: tuple[float, ...],
) -> States:
    """`bn_rnn` from PyTorch's operators."""
    weight_ih, weight_hh, bias, gamma_x, gamma_h, _, _ = weights
    assert gamma_x is not None
    assert gamma_h is not None
    (h,) = states
    wx = _bn(F.linear(x, weight_ih), gamma_x, bias, rows[0], eps)
    pre = wx + _bn(F.linear(h, weight_hh), gamma_h, None, rows[1], eps)
    return (_zoneout(zoneout[0], h, nonlinearity(pre)),)


def _bn_gru(
    x: Tensor, weights: Weights, states: States, rows: Rows, eps: float, zoneout: tuple[float, ...]
) -> States:
    """The GRU's step from PyTorch's operators."""
    weight_ih, weight_hh, bias, gamma_x, gamma_h, _, beta_n = weights
    assert gamma_x is not None
    assert gamma_h is not None
    (h,) = states
    r, z, n = _bn(F.linear(x, weight_ih), gamma_x, bias, rows[0], eps).chunk(3, dim=1)
    r_h, z_h, n_h = _bn(F.linear(h, weight_hh), gamma_h, None, rows[1], eps).chunk(3, dim=1)
    n_h = n_h if beta_n is None else n_h + beta_n
    n = torch.tanh(torch.addcmul(n, torch.sigmoid(r + r_h), n_h))
    return (_zoneout(zoneout[0], h, torch.lerp(n, h, torch.sigmoid(z + z_h))),)


_LAYER_LSTM: Step = functools.partial(inference.cell_step, "layer_lstm")
_ONE_STATE: dict[str, tuple[Step, Step]] = {
    "tanh": (
        functools.partial(_bn_rnn, torch.tanh),
        functools.partial(inference.cell_step, "tanh"),
    ),
    "relu": (
        functools.partial(_bn_rnn, torch.relu),
        functools.partial(inference.cell_step, "relu"),
    ),
    "gates": (_bn_gru, functools.partial(inference.cell_step, "gru")),
}


def _any_requires_grad(tensors: Sequence[Tensor | None]) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


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
