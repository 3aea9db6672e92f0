"""Properties of a GPU on which the kernels depend, and the size of a Triton tile."""

from __future__ import annotations

import torch

from rbn.ops.compiling import constant_result


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@constant_result
def multiprocessors(device: int) -> int:
    """The number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies in this dtype; otherwise products run in float32.

    GPUs before Ampere have no bfloat16 products, and Triton itself widens float16 ones there.
    """
    if device.type != "cuda":
        return False  # the interpreter
    return dtype == torch.float32 or torch.cuda.get_device_capability(device) >= (8, 0)
