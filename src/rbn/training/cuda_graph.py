"""A training step as a CUDA graph: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Ordinary steps before a capture, which compile kernels and allocate buffers.
_WARM_UP = 3


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    batch: tuple[Tensor, ...]
    loss: Tensor


class CapturedStep:
    """Calls `work` for the first few steps, then captures it as a CUDA graph and replays that.

    Each batch shape gets its own graph. `work` must do the same for all batches of a shape, never
    synchronize with the host, and keep its state in tensors with fixed addresses.

    Args:
        work: a training step: takes the tensors of a batch, returns the loss.
        stream: the stream to run on; not the default stream.
    """

    def __init__(self, work: Callable[..., Tensor], stream: torch.cuda.Stream) -> None:
        self._work, self._stream = work, stream
        self._recordings: dict[tuple[object, ...], _Recording] = {}
        self._calls: dict[tuple[object, ...], int] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, *batch: Tensor) -> Tensor:
        """Make a step. The next step overwrites the returned loss."""
        key = tuple((tensor.shape, tensor.dtype) for tensor in batch)
        recording = self._recordings.get(key)
        if recording is None:
            self._calls[key] = self._calls.get(key, 0) + 1
            if self._calls[key] <= _WARM_UP:
                return self._work(*batch)
            recording = self._recordings[key] = self._record(batch)
        torch._foreach_copy_(recording.batch, batch)  # one launch if all dtypes are equal
        recording.graph.replay()
        return recording.loss

    def _record(self, batch: tuple[Tensor, ...]) -> _Recording:
        copies = tuple(tensor.clone() for tensor in batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            loss = self._work(*copies)
        return _Recording(graph, copies, loss)
