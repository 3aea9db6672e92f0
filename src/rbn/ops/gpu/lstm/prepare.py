"""Prepares the buffers of the CUDA C++ kernels with `rbn.ops.gpu.lstm.prepare_kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu.lstm import prepare_kernels
from rbn.ops.gpu.lstm.constant_terms import BLOCK, PROGRAMS
from rbn.ops.gpu.lstm.input_moments import input_moments, write_constants
from rbn.ops.gpu.lstm.kernel_arguments import LSTMCall
from rbn.ops.gpu.lstm.prepare_kernels import begin, pad_rows
from rbn.ops.gpu.lstm.workspace import Scratch, Workspace
from rbn.ops.gpu.runtime.device import power_of_two
from rbn.ops.gpu.runtime.launch_cache import launch_by_key, launch_cached
from rbn.ops.input_term import factors, padding
from rbn.ops.types import CONSTANT

_BLOCK = 1024
_MOMENTS_COLUMNS = 128  # per program; 64 or 256 take a fifth longer at 128 rows
_CONSTANTS_COLUMNS = 64  # per program
_TILE = 32  # rows and columns of the tiles in which W_h is transposed
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


def begin_states(
    call: LSTMCall, hs: Tensor, new: Workspace, at: dict[str, int] | None = None
) -> None:
    """Copy h0 and c0 into their buffers and `VECTORS` into `new`; zero what must start as zero.

    hs: ``[..., T + 1, B, stride]``. at: if given, the launch also computes each step's statistics
    of the input term and writes them to these addresses in `new`.
    """
    plan = call.plan
    h0, h_r, h_b = _with_strides(call, call.a.h0)
    c0, c_r, c_b = _with_strides(call, call.a.c0)
    given = call.given_vectors()
    tensors = [h0, c0, *[hs if v is None else v.contiguous() for v in given], hs]
    term, own = call.term, new.first
    lengths = call.lengths if at and call.a.lengths is not None else term
    moments = (own, own) if at is None else (at["mean_x"], at["var_x"])

    def arguments() -> Any:
        _, R, T, B, H = plan.sizes
        stride, clear = hs.shape[-1], plan.cell + plan.clear
        of_one, units = B * stride, R * H
        ends = (0, plan.cell), (plan.cell, plan.clear), (clear, plan.vectors)
        cell, zeros, joined = [new.part(*end) for end in ends]
        means = new.input_moments() if at else (cell, cell)
        blocks, steps = -(-max(R * of_one, plan.clear, 4 * units) // _BLOCK), R * T * bool(at)
        return (
            (max(blocks, steps), 1 + bool(at) * -(-4 * H // _MOMENTS_COLUMNS)),
            [*tensors, cell, joined, zeros.view(torch.int32), term, *means, lengths],
            (R * of_one, of_one, (T + 1) * of_one, h_r, h_b, c_r, c_b, plan.clear, steps, T, B),
            {"H": H, "STRIDE": stride, "UNITS": units}
            | {name: v is not None for name, v in zip(_PRESENT, given, strict=True)}
            | {"BLOCK": _BLOCK, "MOMENTS": bool(at)}
            | {
                "ROWS": _moments_rows(B),
                "COLUMNS": _MOMENTS_COLUMNS,
                "LENGTHS": lengths is not term,
            },
        )

    places = own, own + 4 * (plan.cell + plan.clear), own + 4 * plan.cell, term.data_ptr(), *moments
    addresses = (*[tensor.data_ptr() for tensor in tensors], *places, lengths.data_ptr())
    launch_by_key(begin, (plan, h_r, h_b, c_r, c_b), addresses, arguments, hs)


def write_input_moments(wx: Tensor, lengths: Tensor | None, mean: Tensor, var: Tensor) -> None:
    """Mean and var of wx ``[..., T, B, F]`` over the unpadded rows of every step."""
    *_, T, B, F = wx.shape
    tensors = wx, mean, var, wx if lengths is None else lengths  # wx: a placeholder, not read

    def arguments() -> Any:
        return (
            (wx.numel() // (B * F), -(-F // _MOMENTS_COLUMNS)),
            tensors,
            (T, B),
            {
                "F": F,
                "ROWS": _moments_rows(B),
                "COLUMNS": _MOMENTS_COLUMNS,
                "LENGTHS": lengths is not None,
            },
        )

    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    launch_by_key(input_moments, (wx.shape, wx.dtype, lengths is None), addresses, arguments, wx)


def fill_constants(mean: Tensor, var: Tensor, inv_n: Tensor, eps: float) -> None:
    """Give steps with too few rows the mean and variance over all rows of the other steps.

    Args:
        mean: float32 ``[..., T, F]``, changed in place.
        var: float32 ``[..., T, F]``, changed in place.
        inv_n: the second result of `row_counts`, ``[T]``.
        eps: added to every variance.
    """
    *_, T, F = mean.shape
    tensors = mean, var, inv_n
    columns = min(_CONSTANTS_COLUMNS, power_of_two(F))

    def arguments() -> Any:
        grid = mean.numel() // (T * F), -(-F // columns)
        return grid, tensors, (eps, T), {"F": F, "COLUMNS": columns}

    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    launch_by_key(write_constants, (mean.shape, eps), addresses, arguments, mean)


def _moments_rows(batch: int) -> int:
    """Rows of the batch that a program of `input_moments` reads at once."""
    return min(128, max(16, power_of_two(batch)))


def begin_backward(
    call: LSTMCall,
    weight: Tensor,
    at: dict[str, int],
    new: Scratch,
    zero_states: bool,
    moments: Callable[[], Sequence[Tensor | None]],
) -> None:
    """Zero memory; raise variances and transpose W_h if the plan requires it. One launch.

    at: the addresses of the variances. zero_states: whether to zero the gradients of the last
    states, too. moments: returns mean and var of the terms; called only if Triton must inspect
    them.
    """
    plan, a = call.plan, call.a
    states: list[Tensor | None] = [None, None]
    if plan.raises:  # a state whose rows share memory need not be compared
        both = [None if call.shared(s) or s.stride(-2) == 0 else s for s in (a.h0, a.c0)]
        states = [None if state is None else state.contiguous() for state in both]
    begin = 0 if zero_states else plan.scratch["zeroed"]
    compare = [state is not None for state in states]

    def arguments() -> Any:
        _, R, T, B, H = plan.sizes
        zeros = (plan.scratch["sums"] - begin) // 4
        blocks = -(-zeros // BLOCK), plan.raises * -(-4 * T * H // BLOCK)
        tiles = plan.transposes * -(-4 * H // _TILE) * -(-H // _TILE)
        given = (
            [weight if m is None else m for m in moments()[1::2]] if plan.raises else [weight] * 3
        )
        parts = [new.part(name, 1) for name in ("var_h", "var_c")]
        parts += [new.part("weight", 1).view(weight.dtype), new.memory.narrow(0, begin // 4, 1)]
        return (
            (min(PROGRAMS, max(1, *blocks, tiles)), R),
            [*[weight if s is None else s for s in states], *given, weight, *parts],
            (T, B, H, zeros, CONSTANT * a.eps, 2 * CONSTANT * a.eps),
            {
                **{"COMPARE_H": compare[0], "COMPARE_C": compare[1]},
                **{"CELL": a.gamma_c is not None},
                **{"MASKED": a.mask_c is not None or a.mask_h is not None},
                **{"RAISE": plan.raises, "TRANSPOSE": plan.transposes},
                **{"TILE": _TILE, "BLOCK": BLOCK},
            },
        )

    own, of_new = weight.data_ptr(), new.at
    addresses = (
        *[own if state is None else state.data_ptr() for state in states],
        *(at.get("var_x", own), at.get("var_h", own), at.get("var_c", own), own),
        *(of_new["var_h"], of_new["var_c"], of_new["weight"], of_new["dh"] + begin),
    )
    launch_by_key(
        prepare_kernels.begin_backward, (plan, *compare, zero_states), addresses, arguments, weight
    )


def _with_strides(call: LSTMCall, state: Tensor) -> tuple[Tensor, int, int]:
    """A state that kernels can read, with its strides between recurrences and between rows.

    The row stride is 0 if all rows share the state.
    """
    if not state.is_contiguous() and state.stride(-1) != 1:
        state = state.contiguous()
    if call.shared(state):
        return state, state.stride(0) if call.lead else 0, 0
    return state, state.stride(0) if call.lead else 0, state.stride(-2)
