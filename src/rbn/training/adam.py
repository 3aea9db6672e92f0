"""Adam with one kernel for the step and one for the gradient norm.

PyTorch's fused step gives each block 65,536 numbers. A model with a few million parameters has too
few such blocks: half of an H200 is idle during the step. PyTorch's gradient norm takes several
kernels. Both matter when a training step takes about a millisecond.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_MAX_TENSORS = 64  # per kernel; each has five pointers
_BLOCK = 1024  # numbers that one program updates
_MAX_PARTS = 4096  # norms that one program combines afterwards


def supports(tensors: Sequence[Tensor]) -> bool:
    """Whether one kernel can process all these tensors."""
    return (
        0 < len(tensors) <= _MAX_TENSORS
        and all(
            t.is_cuda
            and t.layout == torch.strided
            and t.dtype == torch.float32
            and t.is_contiguous()
            and t.device == tensors[0].device
            and t.numel() > 0
            for t in tensors
        )
        and _triton_takes_tuples()
    )


@functools.cache
def _triton_takes_tuples() -> bool:
    """Whether Triton is installed, in a version whose kernels accept tuples."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 4)


def part_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Norms of parts of the tensors, ``[N]``. Their norm is the norm of all tensors."""
    from rbn.training.adam_kernels import norms

    rounds = 4
    while _programs(tensors, rounds * _BLOCK)[1] > max(_MAX_PARTS, len(tensors)):
        rounds *= 2
    first, count = _programs(tensors, rounds * _BLOCK)
    result = tensors[0].new_empty(count)
    with torch.cuda.device_of(result):
        norms[(count,)](
            *(tuple(tensors), result, first, tuple(t.numel() for t in tensors)),
            BLOCK=_BLOCK,
            ROUNDS=rounds,
        )
    return result


def _programs(tensors: Sequence[Tensor], numbers: int) -> tuple[tuple[int, ...], int]:
    """The index of each tensor's first program, and the number of programs.

    numbers: how many numbers one program processes.
    """
    first, count = [], 0
    for tensor in tensors:
        first.append(count)
        count += -(-tensor.numel() // numbers)
    return tuple(first), count


class _OneKernel(torch.optim.Optimizer):
    """Mixin for a PyTorch optimiser: one kernel for the step, if it supports the parameters."""

    def __init__(self, params: Any, *values: Any, **options: Any) -> None:
        if options.get("foreach") or options.get("fused") is False:
            raise ValueError(
                f"rbn.training.{type(self).__name__} is always fused: for foreach=True or "
                f"fused=False use torch.optim.{type(self).__name__}"
            )
        super().__init__(params, *values, **options | {"fused": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step. closure: recomputes the loss; its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        if all(map(self._supports, self.param_groups, groups)):
            for group, parameters in zip(self.param_groups, groups, strict=True):
                self._step(group, parameters)
        else:
            step = super().step  # wrapped in hooks once a plain optimiser of this class was created
            hooked = getattr(step, "hooked", False)
            step.__wrapped__(self) if hooked else step()  # type: ignore[attr-defined]
        return loss

    def _decay(self, group: dict[str, Any]) -> float:
        """The decoupled weight decay: AdamW's, 0 for Adam."""
        return float(group["weight_decay"]) if isinstance(self, torch.optim.AdamW) else 0.0

    def _supports(self, group: dict[str, Any], parameters: list[Tensor]) -> bool:
        unsupported = ("amsgrad", "maximize", "differentiable")
        gradients = [p.grad for p in parameters if p.grad is not None]
        rate = group["lr"]
        return (
            not any(group[name] for name in unsupported)
            and group["weight_decay"] == self._decay(group)
            and supports(parameters)
            and supports(gradients)
            and (not isinstance(rate, Tensor) or rate.is_cuda)
        )

    def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        states = [self.state[p] for p in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        steps = [state["step"] for state in states]
        skip = getattr(self, "found_inf", None)
        torch._foreach_add_(steps, 1)
        update(
            parameters,
            [p.grad for p in parameters if p.grad is not None],
            *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")),
            steps=steps,
            rate=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            decay=self._decay(group),
            divisor=getattr(self, "grad_scale", None),
            skip=skip,
        )
        if skip is not None:
            torch._foreach_sub_(steps, [skip.view(())] * len(steps))


class Adam(_OneKernel, torch.optim.Adam):
    """`torch.optim.Adam`, fused, with a kernel of its own if it supports the parameters.

    Options, state, `grad_scale` and `found_inf` are like PyTorch's, except that the gradients
    themselves stay scaled.
    """


class AdamW(_OneKernel, torch.optim.AdamW):
    """Like `Adam`, for `torch.optim.AdamW`: Adam with decoupled weight decay."""


def update(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    *,
    steps: Sequence[Tensor],
    rate: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float = 0.0,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """An Adam step, in place.

    Args:
        parameters: float32 and contiguous, like all lists of tensors here.
        gradients: gradients of the parameters.
        means: first moments.
        squares: second moments.
        steps: the number of this step, from 1, one scalar per parameter, on the device.
        rate: the learning rate, a number or a scalar on the device.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        decay: decoupled weight decay.
        divisor: scalar on the device that divides the gradients.
        skip: scalar on the device; if it is not 0, nothing changes.
    """
    from rbn.training.adam_kernels import update as kernel

    first, count = _programs(parameters, _BLOCK)
    unused = steps[0]  # a valid pointer for arguments that are not given
    with torch.cuda.device_of(unused):
        kernel[(count,)](
            *(tuple(t) for t in (parameters, gradients, means, squares, steps)),
            *(rate, unused if divisor is None else divisor, unused if skip is None else skip),
            *(first, tuple(p.numel() for p in parameters)),
            (*betas, *(math.log(b) if b > 0 else -1e9 for b in betas), eps, decay),
            RATE_TENSOR=isinstance(rate, Tensor),
            DIVIDES=divisor is not None,
            SKIPS=skip is not None,
            BLOCK=_BLOCK,
        )
