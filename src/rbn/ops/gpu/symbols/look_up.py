"""Symbols as inputs: a look-up of weight rows, whose gradient needs no sorting or atomics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops import reference
from rbn.ops.gpu.runtime.device import has_product
from rbn.ops.gpu.runtime.launch_cache import launch_cached
from rbn.ops.gpu.symbols.row_sums import add_shares, symbol_sums
from rbn.ops.operator import is_traced, one_by_one

MOST = 256  # symbols; with more, products with one-hot vectors would cost more than sorting
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Two programs per multiprocessor of an H200, enough to saturate the memory of any GPU. The number
# is the same on all GPUs, and so is the order of the sums.
_PROGRAMS = 264
_AT_ONCE = 8


def symbol_rows(symbols: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """See `rbn.ops.symbol_rows`.

    Compilers, more than `MOST` symbols and float64 use PyTorch's look-up, whose gradient may differ
    in its last bits from run to run.
    """
    known = weight.shape[1] <= MOST and weight.dtype in _TYPES and dtype in _TYPES
    if not known or is_traced(symbols):
        return reference.symbol_rows(symbols, weight, dtype)
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return _look_up(symbols, weight, dtype)
    rows: Tensor = _apply(symbols.contiguous(), weight, dtype)  # type: ignore[no-untyped-call]
    return rows


def _look_up(symbols: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Like the reference, but rounds and transposes in a single copy."""
    columns = weight.t()
    if weight.dtype == dtype:
        columns = columns.contiguous()
    else:
        columns = columns.to(dtype, memory_format=torch.contiguous_format)
    return F.embedding(symbols, columns)


class _SymbolRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, symbols: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(symbols)
        ctx.set_materialize_grads(False)
        ctx.weight = weight.shape[1], weight.dtype
        return _look_up(symbols, weight, dtype)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        (symbols,) = ctx.saved_tensors
        count, dtype = ctx.weight
        if torch.is_grad_enabled():  # create_graph: PyTorch's gradient is differentiable
            rows = torch.ops.aten.embedding_dense_backward(grad, symbols, count, -1, False)
            return None, rows.t().to(dtype), None
        return None, gradient(symbols, grad, count, dtype), None


# Skips the Python code of `apply` that handles `torch.func` transforms, which never reach this.
_apply = super(torch.autograd.Function, _SymbolRows).apply


def _tile(count: int, dtype: torch.dtype, widened: bool) -> tuple[int, int, int, int, int]:
    """The symbols, rows and columns of a program, its warps, and the tiles it prefetches.

    The sums of more than 64 symbols and 128 columns do not fit into the registers.
    widened: whether products are computed in float32; then factors take twice the shared memory.
    """
    symbols = max(32, 1 << (count - 1).bit_length())
    rows = 32 if widened or dtype == torch.float32 else 64
    return symbols, rows, 128 if symbols <= 64 else 64, 4 if symbols <= 128 else 8, 4


def gradient(symbols: Tensor, grad: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The sum of the rows of `grad` for each symbol: ``[G, count]``.

    Sums are in float32, always in the same order, and rounded once. A row that is not finite makes
    the sums of all symbols non-finite, as it would with one-hot vectors.

    symbols: int64 ``[...]``. grad: ``[..., G]``.
    """
    grad = grad.contiguous()
    N, G = symbols.numel(), grad.shape[-1]
    # In float32 a number is split into three bfloat16 numbers.
    factor = torch.bfloat16 if grad.dtype == torch.float32 else grad.dtype
    widened = not has_product(grad.device, factor)
    padded, rows, columns, warps, stages = _tile(count, grad.dtype, widened)
    blocks, tiles = -(-G // columns), -(-N // rows)
    shares = max(1, min(_PROGRAMS // blocks, tiles))
    tiles = -(-tiles // shares)  # per share
    sums = torch.empty(shares, count, G, dtype=torch.float32, device=grad.device)
    out = torch.empty(G, count, dtype=dtype, device=grad.device)
    at = sums.data_ptr()
    launch_cached(
        symbol_sums,
        (blocks, shares),
        (symbols.data_ptr(), grad.data_ptr(), at),
        lambda: (symbols, grad, sums),
        (N, count, tiles),
        {
            "G": G,
            "SYMBOLS": padded,
            "ROWS": rows,
            "COLUMNS": columns,
            "WIDEN": widened,
            "num_warps": warps,
            "num_stages": stages,
        },
        (symbols.dtype, grad.dtype),
        grad,
    )
    columns = max(8, 1024 // padded)
    launch_cached(
        add_shares,
        (-(-G // columns), 1),
        (at, out.data_ptr()),
        lambda: (sums, out),
        (shares, count),
        {"G": G, "SYMBOLS": padded, "COLUMNS": columns, "AT_ONCE": _AT_ONCE},
        (dtype,),
        grad,
    )
    return out
