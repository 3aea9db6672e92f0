"""A kernel that does nothing but meet, for the floor of the GPU benchmark."""

import triton
import triton.language as tl

from rbn.ops.gpu.runtime.triton_functions import arrive, wait


@triton.jit
def barriers(counter, rounds, PROGRAMS: tl.constexpr):
    """All programs wait for each other, `rounds` times."""
    for k in range(rounds):
        arrive(counter)
        wait(counter, (k + 1) * PROGRAMS)
