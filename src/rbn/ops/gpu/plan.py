"""Which blocks a recurrence is cut into, and whether it runs as one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Elements of the tile of gates that a program holds in registers, at most.
_TILE = 32768
# Columns of h that are read at once while the weights stay on the chip, at most.
_RESIDENT = 256


@dataclass(frozen=True)
class Plan:
    """How one launch is cut.

    Attributes:
        rows: rows of a tile, a power of two that holds the batch.
        units: hidden units that a program owns, a power of two.
        programs: programs of one recurrence.
        k_forward: columns of h that a product takes at once.
        k_backward: the same of d(W_h h).
        warps_forward: of a program.
        warps_backward: the same.
        persistent: one launch for all steps; otherwise one for each.
    """

    rows: int
    units: int
    programs: int
    k_forward: int
    k_backward: int
    warps_forward: int
    warps_backward: int
    persistent: bool


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@torch.compiler.assume_constant_result
def multiprocessors(device: int) -> int:
    """How many programs of a large kernel run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def tf32_allowed() -> bool:
    """Whether products of float32 may be made in tf32: as cuDNN's recurrent networks do."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # newer settings than that, which differ for convolutions
        rnn: Any = torch.backends.cudnn.rnn
        return bool(rnn.fp32_precision == "tf32")


def make_plan(recurrences: int, batch: int, hidden: int, processors: int | None) -> Plan | None:
    """The plan for R recurrences of ``[B, H]``, or None where the batch is too large for a tile.

    processors: programs that can run at the same time; None launches step by step.
    """
    rows = max(16, power_of_two(batch))
    units = 4
    while processors and -(-hidden // units) * recurrences > processors and units < 64:
        units *= 2
    if rows * 4 * units > _TILE:
        return None
    programs = -(-hidden // units)
    persistent = processors is not None and programs * recurrences <= processors
    k = max(16, power_of_two(hidden))
    wide = rows * units >= 2048
    return Plan(
        rows=rows,
        units=units,
        programs=programs,
        k_forward=k if k <= _RESIDENT else 64,
        k_backward=128 if hidden >= 32 else max(16, power_of_two(4 * hidden)),
        warps_forward=8 if wide else 4,
        warps_backward=8 if wide else 4,
        persistent=persistent,
    )
