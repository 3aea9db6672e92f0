"""Which rows each time step processes.

Rows are sorted by length, longest first, and stored step after step without the padded ones, as in
`torch.nn.utils.rnn.PackedSequence`. The rows that reach step t are therefore also the first
``sizes[t]`` rows of step t - 1. Padded rows enter no statistic and cost nothing, and their state
need not be copied along because nothing overwrites it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.cpu import memory
from rbn.ops.types import check_lengths

_NARROW = 256  # hidden size up to which MKL is up to 1.4 times as fast with states as first factor


class Packing:
    """The layout of ``[T, B, F]`` data as rows ``[N, F]``, N the number of unpadded positions.

    Buffers always have ``T * B`` rows, so that their shape does not depend on data.
    """

    def __init__(self, steps: int, batch: int, lengths: Tensor | None) -> None:
        self.steps, self.batch = steps, batch
        self.index: Tensor | None = None  # [N]: position of each packed row in [T * B]
        if lengths is None:
            self.sizes = [batch] * steps
            self.rows = steps * batch
            return
        lengths = lengths.to(device="cpu", dtype=torch.int64)
        check_lengths(lengths.tolist(), steps)
        sorted_lengths, self.order = torch.sort(lengths, descending=True, stable=True)
        valid = torch.arange(steps, device="cpu")[:, None] < sorted_lengths  # [T, B]
        sizes = valid.sum(1)
        self.sizes = [n for n in sizes.tolist() if n > 0]
        step, row = valid.nonzero(as_tuple=True)
        self.index = step * batch + self.order[row]
        self.rows = len(self.index)
        self.starts = sizes.cumsum(0) - sizes
        self.last = self.starts[sorted_lengths - 1] + torch.arange(batch, device="cpu")
        self.unorder = torch.argsort(self.order)
        # Position of the previous step's row; the first step's come from the initial state.
        self.previous = self.starts[step[batch:] - 1] + row[batch:]

    def buffer(self, features: int, like: Tensor) -> Tensor:
        """A buffer for packed rows, ``[T * B, features]``, zero after row N."""
        rows = memory.empty(self.steps * self.batch, features, like)
        rows[self.rows :].zero_()
        return rows

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Views of packed rows ``[T * B, F]``, one ``[sizes[t], F]`` for each step."""
        return tuple(torch.split(rows[: self.rows], self.sizes))

    def pack(self, padded: Tensor) -> Tensor:
        """``[T, B, F]`` to ``[T * B, F]`` packed; no copy if nothing is padded."""
        flat = padded.reshape(self.steps * self.batch, -1)
        if self.index is None:
            return flat
        rows = self.buffer(flat.shape[1], flat)
        torch.index_select(flat, 0, self.index, out=rows[: self.rows])
        return rows

    def unpack(self, rows: Tensor) -> Tensor:
        """``[T * B, F]`` packed to ``[T, B, F]``, zero at padded positions."""
        if self.index is not None:
            rows = torch.zeros_like(rows).index_copy_(0, self.index, rows[: self.rows])
        return rows.view(self.steps, self.batch, -1)

    def sort(self, state: Tensor) -> Tensor:
        """A state ``[B, H]`` with its rows in this layout's order."""
        return state if self.index is None else state[self.order]

    def unsort(self, state: Tensor) -> Tensor:
        """A state ``[B, H]`` with its rows in the user's order."""
        return state if self.index is None else state[self.unorder]

    def final(self, rows: Tensor) -> Tensor:
        """The last unpadded row of each sequence, ``[B, F]`` in the user's order."""
        if self.index is None:
            return rows[-self.batch :].clone()
        return rows[self.last[self.unorder]]

    def outer(self, left: Tensor, states: Tensor, initial: Tensor) -> Tensor:
        """The weight gradient ``sum over t of left[t]^T states[t - 1]`` as one product.

        Shapes: left ``[T * B, G]``, states ``[T * B, H]``, initial ``[B, H]`` sorted -> ``[G, H]``.
        """
        first, rest = left[: self.batch], left[self.batch : self.rows]
        before = states[: self.rows - self.batch] if self.index is None else states[self.previous]
        if torch.backends.mkl.is_available() and states.shape[1] <= _NARROW:
            return torch.mm(before.t(), rest).addmm_(initial.t(), first).t().contiguous()
        return torch.mm(rest.t(), before).addmm_(first.t(), initial)
