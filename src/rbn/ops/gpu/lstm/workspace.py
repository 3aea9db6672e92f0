"""Room for small results of the forward pass, in one piece that is cut up when there is time."""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.gpu.lstm.kernel_arguments import Call
from rbn.ops.gpu.lstm.signature import MOMENTS


class Room:
    """The last cells, what is zeroed before a kernel in CUDA C++, and the minibatch's statistics.

    Whoever makes neither of the first two has the statistics alone.

    Attributes:
        at: the addresses of `c_n`, `clear` and those of `MOMENTS` that there are.
        rows: those of the statistics of x, h and c.
    """

    def __init__(self, call: Call, apart: bool) -> None:
        """apart: whether statistics are tensors of their own, which share no memory."""
        self._facts, cuts = call.facts, call.facts.moments
        self.rows = cuts.rows
        full, device = torch.float32, call.flat.device
        ahead = self._facts.cell + self._facts.clear
        self._whole = torch.empty(ahead if apart else cuts.size, dtype=full, device=device)
        first = self._whole.data_ptr()
        self.at = {"c_n": first, "clear": first + 4 * self._facts.cell}
        self._moments: list[Tensor | None] = []
        if apart:
            self._moments = [
                torch.empty(cut[0], dtype=full, device=device) if cut else None
                for cut in cuts.parts
            ]
            parts = zip(MOMENTS, self._moments, strict=True)
            self.at |= {name: part.data_ptr() for name, part in parts if part is not None}
        else:
            for name, begin in cuts.at:
                self.at[name] = first + begin

    def moments(self) -> list[Tensor | None]:
        """Mean and var of the terms x, h and c; None for absent ones."""
        if not self._moments:
            cut = self._whole.as_strided
            self._moments = [cut(*where) if where else None for where in self._facts.moments.parts]
        return self._moments

    def of_input(self) -> tuple[Tensor, Tensor]:
        """Those of the input term, which there is."""
        mean, var = self.moments()[:2]
        assert mean is not None
        assert var is not None
        return mean, var

    def cell(self) -> Tensor:
        """Room for the last cells, at least."""
        return self._whole.narrow(0, 0, self._facts.cell)

    def clear(self) -> Tensor:
        """What is to be zeroed, as integers; maybe nothing."""
        return self._whole.view(torch.int32).narrow(0, self._facts.cell, self._facts.clear)
