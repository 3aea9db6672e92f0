"""The random numbers of one run, apart from those of others in the same process."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """What a process other than the first draws a step's random numbers from.

    So nothing of its state has to be saved, whatever number of processes goes on.
    """
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch's seeds are signed


class RandomState:
    """A stream of random numbers that begins at the process's present state.

    Inside `current` torch's default generators continue this stream; outside they are as they were.
    So runs that take turns draw the numbers that each would draw alone. On a GPU the generator's
    state object itself is exchanged, not its value: a CUDA graph captured inside `current` goes on
    drawing from the stream of its run, whichever others are replayed meanwhile.

    Args:
        device: of the run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._default: torch.Generator | None = None
        if device.type == "cuda":
            self._default = torch.cuda.default_generators[device.index or 0]
            self._own = torch.Generator(device)
            self._own.set_state(self._default.get_state())

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this stream the one that torch draws from."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._cpu)
        default = self._default
        if default is not None:
            others = default.graphsafe_get_state()
            default.graphsafe_set_state(self._own)
        try:
            yield
        finally:
            self._cpu = torch.get_rng_state()
            torch.set_rng_state(before)
            if default is not None:
                default.graphsafe_set_state(others)
