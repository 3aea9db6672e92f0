"""A linear layer and the cross-entropy of its softmax: two kernels, and cuBLAS products.

The number of classes is padded to a multiple of 8, because cuBLAS has only slow kernels for rows
that are not a multiple of 16 bytes; this concerns all three products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rbn.ops import reference
from rbn.ops.gpu.cross_entropy.loss_kernels import cross_entropy_backward, cross_entropy_forward
from rbn.ops.gpu.runtime.device import power_of_two
from rbn.ops.gpu.runtime.launch_cache import launch_cached
from rbn.ops.gpu.stepwise import product
from rbn.ops.operator import is_traced, needs_grad, one_by_one, undifferentiable

LARGEST = 1024  # classes; a program keeps the scores of entire rows in registers
_NUMBERS = 2048  # scores per program
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TARGETS = (torch.int64, torch.uint8)


def linear_cross_entropy(
    input: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, reduction: str = "mean"
) -> Tensor:
    """See `rbn.ops.linear_cross_entropy`."""
    given = (input, weight, bias, targets)
    device = input.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else input.dtype
    if not _fits(*given, dtype, autocast):
        return reference.linear_cross_entropy(*given, reduction)
    scale = 1 / targets.numel() if reduction == "mean" else 1.0
    with torch.autocast(device, enabled=False):
        if needs_grad(given[:3]):
            result: Tensor = _apply(*given, dtype, scale)
            return result
        return _forward(*given, dtype, scale)[0]


def _fits(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    autocast: bool,
) -> bool:
    """Whether the kernels support the call; otherwise the reference runs it or raises."""
    parameters = [weight] if bias is None else [weight, bias]
    if is_traced(input) or any(type(p) not in (Tensor, nn.Parameter) for p in parameters):
        return False
    if dtype not in _TYPES or targets.dtype not in _TARGETS:
        return False
    known = _TYPES if autocast else (dtype,)  # autocast converts these
    if any(t.dtype not in known for t in (input, *parameters)):
        return False
    if any(t.device != input.device for t in (*parameters, targets)):
        return False
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1] or not weight.numel():
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    return len(weight) <= LARGEST and targets.numel() > 0


def _factors(input: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The input ``[N, H]``, and the weights ``[P, H]`` padded with zeros."""
    C, H = weight.shape
    x = input.reshape(-1, H).to(dtype)
    if C % 8 == 0:
        return x, weight.to(dtype)
    w = weight.new_empty(C + -C % 8, H, dtype=dtype)
    w[:C] = weight
    w[C:].zero_()
    return x, w


def _launch(kernel: Any, tensors: tuple[Tensor, ...], C: int, scale: float, bias: bool) -> None:
    """Launch a kernel over the scores ``[N, P]``, the first of the tensors."""
    N, P = tensors[0].shape
    rows, columns = _tile(P)
    launch_cached(
        kernel,
        (-(-N // rows), 1),
        tuple(tensor.data_ptr() for tensor in tensors),
        lambda: tensors,
        (N, scale),
        {"C": C, "P": P, "ROWS": rows, "COLUMNS": columns, "BIAS": bias},
        tuple(tensor.dtype for tensor in tensors),
        tensors[0],
    )


def _tile(P: int) -> tuple[int, int]:
    """Rows and columns of a program."""
    columns = power_of_two(P)
    return _NUMBERS // columns, columns


def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    scale: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss, and the tensors to save for its gradient."""
    x, w = _factors(input, weight.detach(), dtype)
    logits = product(x, w.t())
    N, P = logits.shape
    targets = targets.contiguous()
    added = logits if bias is None else bias.detach().contiguous()
    losses = logits.new_empty(-(-N // _tile(P)[0]))
    tensors = (logits, added, targets, losses)
    _launch(cross_entropy_forward, tensors, len(weight), scale, bias is not None)
    return losses.sum(), (x, w, logits, added, targets)


def _gradients(ctx: Any, dloss: Tensor) -> list[Tensor | None]:
    x, w, logits, added, targets = ctx.saved_tensors
    shape, types, C, scale = ctx.plain
    (N, P), has_bias = logits.shape, types[2] is not None
    dlogits = torch.empty_like(logits, dtype=x.dtype)
    dbias = logits.new_empty(P, -(-N // _tile(P)[0]) if has_bias else 1)
    tensors = (logits, added, targets, dloss, dlogits, dbias)
    _launch(cross_entropy_backward, tensors, C, scale, has_bias)
    results: list[Tensor | None] = [None] * 3
    if ctx.needs_input_grad[0]:
        results[0] = torch.mm(dlogits, w).view(shape).to(types[0])
    if ctx.needs_input_grad[1]:
        multiply = torch.mm if types[1] == x.dtype else product  # directly in the parameter's dtype
        results[1] = multiply(dlogits.t(), x)[:C].to(types[1])
    if ctx.needs_input_grad[2]:
        results[2] = dbias.sum(1)[:C].to(types[2])
    return results


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        scale: float,
    ) -> Tensor:
        loss, saved = _forward(input, weight, bias, targets, dtype, scale)
        ctx.save_for_backward(*saved)
        types = (input.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.plain = input.shape, types, len(weight), scale
        return loss

    @staticmethod
    @one_by_one
    def backward(ctx: Any, dloss: Tensor) -> Any:
        create_graph = torch.is_grad_enabled()
        with torch.no_grad(), torch.autocast(dloss.device.type, enabled=False):
            result = _gradients(ctx, dloss)
        if create_graph:
            result = undifferentiable("linear_cross_entropy", result, (*ctx.saved_tensors, dloss))
        return (*result, None, None, None)


# Skips the Python code of `apply` that handles `torch.func` transforms, which never reach this.
_apply: Any = super(torch.autograd.Function, _Node).apply
