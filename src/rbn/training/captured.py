"""A training step as a CUDA graph: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Ordinary steps before a capture: kernels are compiled and buffers made in them.
_WARM_UP = 3


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    batch: tuple[Tensor, ...]
    loss: Tensor


class CapturedStep:
    """Calls `work` for the first few steps, then replays what it did.

    Every shape of batch is captured by itself. `work` must do the same for all batches of a shape,
    never wait for the device, and leave whatever it changes in tensors that stay where they are.

    Args:
        work: a training step, from the tensors of a batch to its loss.
        stream: on which it runs; not the device's default one.
    """

    def __init__(self, work: Callable[..., Tensor], stream: torch.cuda.Stream) -> None:
        self._work, self._stream = work, stream
        self._recordings: dict[tuple[object, ...], _Recording] = {}
        self._calls: dict[tuple[object, ...], int] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, *batch: Tensor) -> Tensor:
        """Make a step; the loss is overwritten by the next one."""
        key = tuple((tensor.shape, tensor.dtype) for tensor in batch)
        found = self._recordings.get(key)
        if found is None:
            self._calls[key] = self._calls.get(key, 0) + 1
            if self._calls[key] <= _WARM_UP:
                return self._work(*batch)
            found = self._recordings[key] = self._record(batch)
        torch._foreach_copy_(found.batch, batch)  # in one launch where their types are one
        found.graph.replay()
        return found.loss

    def _record(self, batch: tuple[Tensor, ...]) -> _Recording:
        copies = tuple(tensor.clone() for tensor in batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            loss = self._work(*copies)
        return _Recording(graph, copies, loss)
