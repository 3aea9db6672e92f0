"""The GPU's LSTM as a PyTorch operator, `torch.ops.rbn.gpu_lstm`, with its autograd formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.custom import Formula, Operator, like_inputs, results
from rbn.ops.gpu.lstm import forward, signature
from rbn.ops.gpu.lstm.kernel_arguments import VECTORS

# None has a default: PyTorch would leave out what equals it, and then find a gradient too many.
_ARGS = (
    "Tensor wx, Tensor weight_hh, Tensor? bias, Tensor? gamma_x, Tensor? gamma_h, "
    "Tensor? gamma_c, Tensor? beta_c, Tensor h0, Tensor c0, Tensor? lengths, "
    "Tensor[] population, Tensor? mask_c, Tensor? mask_h, float rate_c, float rate_h, "
    "str norm, float eps, str input_stats, str padding, bool pass_normalized_cell, bool save, "
    "bool tf32"
)


@torch.library.custom_op(
    "rbn::gpu_lstm",
    mutates_args=(),
    schema=f"({_ARGS}) -> {results(len(signature.Outputs._fields))}",
)
def _lstm(*args: Any) -> tuple[Tensor, ...]:
    """`rbn.ops.gpu.lstm.forward.forward` as an operator, whose results may not share memory."""
    return tuple(forward.forward(signature.Inputs(*args), apart=True))


def _forward(*args: Any) -> tuple[Tensor, ...]:
    """The same called directly."""
    return forward.forward(signature.Inputs(*args))


@_lstm.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = signature.Inputs(*args)
    T, B, G = a.wx.shape[-3:]
    H = G // 4

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return a.wx.new_empty(shape, dtype=dtype)

    output = new(*a.lead, T, B, H, dtype=a.wx.dtype)
    room = new(*a.lead, T + 1, B, signature.stride_of(H), dtype=a.wx.dtype)
    if not a.include and signature.stride_of(H) == H:
        output = signature.steps_of(room, H)
    return (
        output,
        new(*a.lead, B, H, dtype=a.wx.dtype),
        new(*a.lead, B, H, dtype=a.wx.dtype),
        *(new(*shape) for shape in signature.statistics_shapes(a) for _ in range(2)),
        new(signature.saved_products(a), dtype=a.wx.dtype),
        new(signature.saved_cells(a) if a.save else 0),
        room.narrow(-1, 0, H) if a.include and a.save else new(0, dtype=a.wx.dtype),
    )


@torch.library.custom_op(
    "rbn::gpu_lstm_backward",
    mutates_args=(),
    schema=(
        f"(Tensor? doutput, Tensor? dh_n, Tensor? dc_n, Tensor[] results, {_ARGS}) -> "
        f"{results(len(signature.Grads._fields))}"
    ),
)
def _lstm_backward(
    doutput: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    results: Sequence[Tensor],
    *args: Any,
) -> tuple[Tensor, ...]:
    """`rbn.ops.gpu.lstm.forward.backward` as an operator, whose results may not share memory."""
    found = _backward(doutput, dh_n, dc_n, results, args, consume=False)
    parts = {name: getattr(found, name).clone() for name in VECTORS}
    return tuple(found._replace(**parts))


def _backward(
    doutput: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    results: Sequence[Tensor],
    args: tuple[Any, ...],
    consume: bool,
) -> signature.Grads:
    a, r = signature.Inputs(*args), signature.Outputs(*results)
    device = a.wx.device.type
    if not torch.is_autocast_enabled(device):
        return forward.backward(a, r, doutput, dh_n, dc_n, consume)
    with torch.autocast(device, enabled=False):  # where backward() is called under it
        return forward.backward(a, r, doutput, dh_n, dc_n, consume)


def _consuming(
    doutput: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    results: Sequence[Tensor],
    *args: Any,
) -> tuple[Tensor, ...]:
    """The same, over what was saved."""
    return _backward(doutput, dh_n, dc_n, results, args, consume=True)


@_lstm_backward.register_fake
def _(
    doutput: Tensor | None,
    dh_n: Tensor | None,
    dc_n: Tensor | None,
    results: Sequence[Tensor],
    *args: Any,
) -> tuple[Tensor, ...]:
    return like_inputs(signature.Inputs(*args), signature.Grads._fields)


lstm_op = Operator(
    _lstm,
    _lstm_backward,
    Formula(signature.Inputs, signature.Grads._fields, results=3),
    _consuming,
    _forward,
)
