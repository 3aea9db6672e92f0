"""A kernel that only runs grid barriers, for the lower bound of the GPU benchmark."""

import triton
import triton.language as tl


@triton.jit
def barriers(counter, rounds, PROGRAMS: tl.constexpr):
    """All programs wait for each other `rounds` times."""
    for k in range(rounds):
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release", scope="gpu")
        while tl.load(counter, volatile=True) < (k + 1) * PROGRAMS:
            pass
        tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()
