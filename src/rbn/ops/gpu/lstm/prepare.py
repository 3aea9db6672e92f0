"""Prepares the buffers of the CUDA C++ kernels with `rbn.ops.gpu.lstm.prepare_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu.lstm.kernel_arguments import LSTMCall
from rbn.ops.gpu.lstm.persistent.tiles import power_of_two
from rbn.ops.gpu.lstm.prepare_kernels import begin, pad_rows
from rbn.ops.gpu.lstm.workspace import Workspace
from rbn.ops.gpu.runtime.launch_cache import launch_by_key, launch_cached
from rbn.ops.input_term import factors, padding

_BLOCK = 1024
_PRESENT = ("BIAS", "GAMMA_X", "GAMMA_H", "GAMMA_C", "BETA_C")
_WIDEST = 256  # columns per row that the kernel pads, at most


def padded_factors(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`factors` of the input ``[T, B, I]`` and W_x ``[4H, I]``, in one launch.

    The returned input can be viewed as one matrix ``[T * B, I']``.
    """
    more = padding(x)
    if not more:
        return x if x.is_contiguous() else x.flatten(0, 1).view(x.shape), weight
    T, B, columns = x.shape
    width = columns + more
    if width > _WIDEST or not (x.is_contiguous() and weight.is_contiguous()):
        return factors(x, weight)
    n, m = T * B, weight.shape[0]
    padded = x.new_empty(n + m, width)
    block = power_of_two(width)
    of_one = 2048 // block
    launch_cached(
        pad_rows,
        (-(-(n + m) // of_one), 1),
        (x.data_ptr(), weight.data_ptr(), padded.data_ptr()),
        lambda: [x, weight, padded],
        (n, m),
        {"COLUMNS": columns, "WIDTH": width, "ROWS": of_one, "BLOCK": block},
        (x.dtype,),
        x,
    )
    view = padded.as_strided
    rows = view((T, B, width), (B * width, width, 1))
    return rows, view((m, width), (width, 1), n * width)


def begin_states(call: LSTMCall, hs: Tensor, space: Workspace) -> None:
    """Copy h0 and c0 into their buffers, make `LSTMCall.joined` if needed, and zero `clear`.

    hs: ``[..., T + 1, B, stride]``.
    """
    h0, h_r, h_b = _with_strides(call, call.a.h0)
    c0, c_r, c_b = _with_strides(call, call.a.c0)
    joined = hs  # a placeholder that the kernel does not read
    given = call.to_join() or (None,) * 5
    vectors = [hs if v is None else v.contiguous() for v in given]
    size = sum([v.numel() for v in given if v is not None])
    if size:
        joined = call.joined = torch.empty(size, dtype=torch.float32, device=hs.device)
    tensors, strides = [h0, c0, *vectors, hs], (h_r, h_b, c_r, c_b)

    def arguments() -> Any:
        stride, cell, clear = hs.shape[-1], space.cell(), space.clear()
        of_one, units, zeros = call.B * stride, call.R * call.H, clear.numel()
        present = [v is not None for v in given]
        return (
            (-(-max(call.R * of_one, zeros, 4 * units) // _BLOCK), 1),
            [*tensors, cell, joined, clear if zeros else cell],
            (call.R * of_one, of_one, (call.T + 1) * of_one, *strides, zeros),
            {"H": call.H, "STRIDE": stride, "UNITS": units}
            | dict(zip(_PRESENT, present, strict=True))
            | {"BLOCK": _BLOCK},
        )

    kinds = [None if v is None else v.dtype for v in given]
    known = (call.plan, h0.dtype, c0.dtype, *kinds, *strides)
    at = [tensor.data_ptr() for tensor in tensors]
    addresses = (*at, space.at["c_n"], joined.data_ptr(), space.at["clear"])
    launch_by_key(begin, known, addresses, arguments, hs)


def _with_strides(call: LSTMCall, state: Tensor) -> tuple[Tensor, int, int]:
    """A state that kernels can read, with its strides between recurrences and between rows.

    The row stride is 0 if all rows share the state.
    """
    if not state.is_contiguous() and state.stride(-1) != 1:
        state = state.contiguous()
    if call.shared(state):
        return state, state.stride(0) if call.lead else 0, 0
    return state, state.stride(0) if call.lead else 0, state.stride(-2)
