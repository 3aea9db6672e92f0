"""How many thread-block clusters fit on a GPU."""

from __future__ import annotations

import functools

import torch

from rbn.ops.gpu.runtime import driver, nvrtc

_THREADS = 256


@functools.lru_cache(maxsize=64)
def clusters(size: int, device: int) -> int:
    """How many clusters of `size` blocks fit on the GPU, with each block on its own multiprocessor.

    0 if the GPU refuses clusters of this size. Asks for a kernel that does nothing, which is quick
    to compile.
    """
    with torch.cuda.device(device):
        code = nvrtc.compiled("empty", {}, nvrtc.architecture_of(device))
        shared = driver.shared_limit(device)  # all that a multiprocessor has
        empty = driver.Kernel(code, "empty", _THREADS, shared, size, down=True)
    return empty.at_once // size
