"""Types and small helpers shared by all recurrences."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

InputStats = Literal["step", "sequence"]
Padding = Literal["exclude", "include"]
Nonlinearity = Literal["tanh", "relu"]
InitialState = Literal["learned", "zeros"]
Ablation = Literal["shared_stats", "joint_terms", "pass_normalized_cell", "raw_output"]

# The threshold for constant terms. While all rows of the minibatch are identical (blank leading
# pixels, say), a recurrent or cell term has no variance, and each such step would multiply its
# gradient by gamma / sqrt(eps). The gradients of all rows cancel, but the rounding errors left over
# can outweigh everything else. So in those steps a term whose variance is at most CONSTANT * eps
# passes no gradient to earlier steps. This is exact for everything that the rows share; only a W_x
# or a map to h0 that is exactly 0 and would make the rows differ gets no gradient.
# `rbn.ops.identical_rows` finds these steps. The C kernel and the CUDA kernels are compiled with
# this number.
CONSTANT = 5e-6


class Statistics(NamedTuple):
    """Mean and biased variance of each normalized term, one row per time step.

    As the result of a training call these are the minibatch estimates, ``[T, features]`` each
    (``[1, features]`` for an input term with sequencewise statistics). As the ``population``
    argument of an inference call they may have any number of rows ``S >= 1``: step ``t`` uses row
    ``min(t, S - 1)``, so the last row serves every step beyond it. A term that a variant does not
    normalize is ``None``.
    """

    mean_x: Tensor | None = None
    var_x: Tensor | None = None
    mean_h: Tensor | None = None
    var_h: Tensor | None = None
    mean_c: Tensor | None = None
    var_c: Tensor | None = None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, states and sums for inputs of `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def valid_steps(lengths: Tensor | None, steps: int) -> Tensor | None:
    """Which positions are not padding: bool ``[T, B]``, or None without lengths."""
    if lengths is None:
        return None
    return torch.arange(steps, device=lengths.device)[:, None] < lengths


def readable(values: Tensor) -> bool:
    """Whether the host can read values without waiting: on a CPU, and not traced."""
    opaque = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return values.device.type == "cpu" and not opaque


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to a device. The host does not wait for a GPU's earlier work, unless traced."""
    if readable(values) and device.type == "cuda":  # no compiler can trace `pin_memory`
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def check_lengths(values: list[int], steps: int) -> None:
    """Reject lengths outside 1 to the number of steps."""
    for row, length in enumerate(values):
        if not 1 <= length <= steps:
            raise ValueError(
                f"lengths must lie between 1 and the number of steps {steps}, "
                f"got {length} at position {row}"
            )
