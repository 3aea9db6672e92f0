"""The tiles of the persistent Triton kernels, and the device properties they depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rbn.ops.compiling import constant_result
from rbn.ops.gpu.runtime.driver import shared_limit

# Elements of the tile of gates that a program holds in registers, at most: 32 per thread. With
# twice as many (512 rows of 8 units) a step took 17 times as long as step by step, on an H200.
_TILE = 8192
# Columns of h that are read at once while the weights stay on the chip, at most.
_RESIDENT = 256


@dataclass(frozen=True)
class Tiles:
    """The tiling of one launch.

    Attributes:
        rows: rows of a tile, a power of two that holds the batch.
        units: hidden units per program, a power of two.
        programs: programs per recurrence.
        k_forward: columns of h that a product takes at once.
        k_backward: columns of d(W_h h) that a product takes at once.
        warps_forward: warps per program, forward.
        warps_backward: warps per program, backward.
        stages_forward: software pipeline stages of a product, forward; 1 means no prefetching.
        stages_backward: the same, backward.
        persistent: one launch for all steps; otherwise one per step.
    """

    rows: int
    units: int
    programs: int
    k_forward: int
    k_backward: int
    warps_forward: int
    warps_backward: int
    stages_forward: int
    stages_backward: int
    persistent: bool


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@constant_result
def multiprocessors(device: int) -> int:
    """The number of multiprocessors: so many programs of a large kernel run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@constant_result
def shared_memory(device: int) -> int:
    """Bytes of shared memory that a program may have."""
    return shared_limit(device)


@constant_result
def widens(device: int) -> bool:
    """Whether half-precision products run in float32.

    GPUs before Ampere have no bfloat16 products, and Triton itself widens float16 ones there.
    """
    return torch.cuda.get_device_capability(device) < (8, 0)


def has_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies in this dtype; otherwise products run in float32."""
    if device.type != "cuda":
        return False  # the interpreter
    return dtype == torch.float32 or not widens(device.index or 0)


def tf32_allowed() -> bool:
    """Whether float32 products may use tf32; follows the setting of cuDNN's recurrent networks."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # newer settings are in use that differ for convolutions
        rnn: Any = torch.backends.cudnn.rnn
        return bool(rnn.fp32_precision == "tf32")


def _stages(pitch: int, tile: int, shared: int | None) -> int:
    """The number of pipeline stages of a product.

    pitch: bytes from one row of the exchanged data to the next. If rows do not start at multiples
    of 16 bytes, asynchronous copies go through the L1 cache, which may hold the data of the step
    before. So those are read without prefetching, past the cache. tile: bytes of a stage.
    """
    return 3 if pitch % 16 == 0 and (shared is None or 3 * tile <= shared) else 1


def make_tiles(
    recurrences: int,
    batch: int,
    hidden: int,
    processors: int | None,
    itemsize: int = 4,
    shared: int | None = None,
    widened: bool = False,
) -> Tiles | None:
    """The tiles for R recurrences of ``[B, H]``, or None if the batch is too large for a tile.

    processors: programs that can run at the same time; None launches step by step. itemsize: bytes
    per element of h. shared: bytes of shared memory that a program may use; None for no limit.
    widened: whether products run in float32 for any dtype, see `has_product`.
    """
    factor = 4 if widened else itemsize
    rows = max(16, power_of_two(batch))
    units = 4
    while processors and -(-hidden // units) * recurrences > processors and units < 64:
        units *= 2
    if rows * 4 * units > _TILE:
        return None

    def fitted(k: int, columns: int, pitch: int) -> tuple[int, int]:
        """How many columns a product takes at once, and its number of pipeline stages."""
        tile = (rows + columns) * factor
        while shared is not None and tile * k > shared and k > 16:
            k //= 2
        return k, _stages(pitch, tile * k, shared)

    if shared is not None and (rows + 4 * units) * factor * 16 > shared:
        return None
    k = max(16, power_of_two(hidden))
    k_forward, stages_forward = fitted(k if k <= _RESIDENT else 64, 4 * units, hidden * itemsize)
    k_backward, stages_backward = fitted(
        128 if hidden >= 32 else max(16, power_of_two(4 * hidden)), units, 4 * hidden * itemsize
    )
    programs = -(-hidden // units)
    wide = rows * units >= 2048
    return Tiles(
        rows=rows,
        units=units,
        programs=programs,
        k_forward=k_forward,
        k_backward=k_backward,
        warps_forward=8 if wide else 4,
        warps_backward=8 if wide else 4,
        stages_forward=stages_forward,
        stages_backward=stages_backward,
        persistent=processors is not None and programs * recurrences <= processors,
    )
