"""What the recurrences take and give besides plain tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

InputStats = Literal["step", "sequence"]
Padding = Literal["exclude", "include"]
Nonlinearity = Literal["tanh", "relu"]
InitialState = Literal["learned", "zeros"]
Ablation = Literal["shared_stats", "joint_terms", "pass_normalized_cell", "raw_output"]

# As long as all rows of the states and of the input are alike, before the first input that differs,
# a recurrent or cell term whose variance over the minibatch is at most this part of eps passes no
# gradient on to earlier steps. Nothing that the rows share can part them, so gradients cancel, but
# each by itself grows by gamma / sqrt(eps) with every such step, and what rounding leaves of
# them can outweigh all else. Leaving them out is exact for everything that the rows share; what
# would part them, a W_x or a map to h0 that is exactly 0, gets none. Alike are rows whose terms
# have such a variance, too: what differs by less than that counts as rounding.
# kernel.c, device.py and common.cuh have the same number; `rbn.ops.alike` finds the steps.
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
    """The type in which statistics, states and sums are held for inputs of type `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def valid_steps(lengths: Tensor | None, steps: int) -> Tensor | None:
    """Which positions are not padding: bool ``[T, B]``, or None where there is no padding."""
    if lengths is None:
        return None
    return torch.arange(steps, device=lengths.device)[:, None] < lengths


def readable(values: Tensor) -> bool:
    """Whether the host can look at values without waiting: on a CPU, and not traced."""
    opaque = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return values.device.type == "cpu" and not opaque


def check_lengths(values: list[int], steps: int) -> None:
    """Refuse lengths that are not within 1 and the number of steps."""
    for row, length in enumerate(values):
        if not 1 <= length <= steps:
            raise ValueError(
                f"lengths must lie between 1 and the number of steps {steps}, "
                f"got {length} at position {row}"
            )
