"""Each run's own random numbers, independent of other runs in the same process."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """The seed for a step's random numbers in all processes except the first.

    It makes a random state per process in checkpoints unnecessary, and lets the number of processes
    change.
    """
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch's seeds are signed


class RandomState:
    """A stream of random numbers that starts at the process's current state.

    Inside `current`, torch's default generators continue this stream; outside, they are unchanged.
    So interleaved runs draw the same numbers as each run alone. On a GPU the generator's state
    object is swapped, not its value: a CUDA graph captured inside `current` keeps drawing from its
    run's stream, even if graphs of other runs are replayed in between.

    Args:
        device: the run's device.
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
        """Let torch draw from this stream."""
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
