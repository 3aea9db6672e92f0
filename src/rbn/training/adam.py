"""Adam whose step, and the norm of whose gradients, are one kernel each for the whole card.

PyTorch's fused step gives 65,536 numbers to a block, which a model of a few million parameters does
not have many of: half of an H200 has nothing to do, for as long as one block takes. Its norms are
made of several kernels. Both are noticed where a training step takes a millisecond.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_MOST = 64  # tensors of a kernel, each with five addresses
_BLOCK = 1024  # numbers of a program's turn
_PARTS = 4096  # norms that are added by one program afterwards


def suit(tensors: Sequence[Tensor]) -> bool:
    """Whether there is a kernel for these together."""
    return (
        0 < len(tensors) <= _MOST
        and all(
            t.is_cuda
            and t.layout == torch.strided
            and t.dtype == torch.float32
            and t.is_contiguous()
            and t.device == tensors[0].device
            and t.numel() > 0
            for t in tensors
        )
        and _has_tuples()
    )


@functools.cache
def _has_tuples() -> bool:
    """Whether Triton is there, of the versions whose kernels take tuples."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 4)


def part_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norms of parts of the tensors, ``[N]``; that of these is the norm of all together."""
    from rbn.training.adam_kernels import norms

    rounds = 4
    while _programs(tensors, rounds * _BLOCK)[1] > max(_PARTS, len(tensors)):
        rounds *= 2
    first, count = _programs(tensors, rounds * _BLOCK)
    found = tensors[0].new_empty(count)
    with torch.cuda.device_of(found):
        norms[(count,)](
            *(tuple(tensors), found, first, tuple(t.numel() for t in tensors)),
            BLOCK=_BLOCK,
            ROUNDS=rounds,
        )
    return found


def _programs(tensors: Sequence[Tensor], numbers: int) -> tuple[tuple[int, ...], int]:
    """The first program of each tensor, and how many there are, with so many numbers each."""
    first, count = [], 0
    for tensor in tensors:
        first.append(count)
        count += -(-tensor.numel() // numbers)
    return tuple(first), count


class _OneKernel(torch.optim.Optimizer):
    """The step of an optimiser of PyTorch's that comes after it, by a kernel where that suits."""

    def __init__(self, params: Any, *values: Any, **options: Any) -> None:
        if options.get("foreach") or options.get("fused") is False:
            raise ValueError(
                f"rbn.training.{type(self).__name__} is fused: without that, or with foreach, use "
                f"torch.optim.{type(self).__name__}"
            )
        super().__init__(params, *values, **options | {"fused": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step. closure: computes the loss anew, which is then returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        if all(self._suits(*found) for found in zip(self.param_groups, groups, strict=True)):
            for group, parameters in zip(self.param_groups, groups, strict=True):
                self._step(group, parameters)
        else:
            step = super().step  # which has hooks of its own if there was such an optimiser
            hooked = getattr(step, "hooked", False)
            step.__wrapped__(self) if hooked else step()  # type: ignore[attr-defined]
        return loss

    def _decay(self, group: dict[str, Any]) -> float:
        """By which a step makes parameters smaller, times the learning rate."""
        return float(group["weight_decay"]) if isinstance(self, torch.optim.AdamW) else 0.0

    def _suits(self, group: dict[str, Any], parameters: list[Tensor]) -> bool:
        more = ("amsgrad", "maximize", "differentiable")
        gradients = [p.grad for p in parameters if p.grad is not None]
        rate = group["lr"]
        return (
            not any(group[name] for name in more)
            and group["weight_decay"] == self._decay(group)
            and suit(parameters)
            and suit(gradients)
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
    """`torch.optim.Adam`, fused, with a kernel of its own where that suits the parameters.

    Options, state and what it is told about scaled gradients are PyTorch's; gradients keep their
    scale.
    """


class AdamW(_OneKernel, torch.optim.AdamW):
    """`torch.optim.AdamW`, likewise: with weight decay that is none of the gradients."""


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
    """A step of Adam, in place. Its number, from 1, the divisor and `skip` are on the device.

    decay: parameters are made smaller by so much times the rate before.
    """
    from rbn.training.adam_kernels import update as kernel

    first, count = _programs(parameters, _BLOCK)
    given = steps[0]  # an address where there is none
    with torch.cuda.device_of(given):
        kernel[(count,)](
            *(tuple(t) for t in (parameters, gradients, means, squares, steps)),
            *(rate, given if divisor is None else divisor, given if skip is None else skip),
            *(first, tuple(p.numel() for p in parameters)),
            (*betas, *(math.log(b) if b > 0 else -1e9 for b in betas), eps, decay),
            RATE_THERE=isinstance(rate, Tensor),
            DIVIDES=divisor is not None,
            SKIPS=skip is not None,
            BLOCK=_BLOCK,
        )
