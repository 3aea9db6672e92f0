"""The local derivatives of the LSTM's gates, for several steps at once.

In the backward pass, everything except the incoming gradients is known from the start:

    d pre_i = d c_t * i (1 - i) g          d pre_f = d c_t * f (1 - f) c_{t-1}
    d pre_g = d c_t * (1 - g^2) i          d pre_o = d h_t * o (1 - o) tanh_c
    d c_hat = d h_t * o (1 - tanh_c^2)

The factors on the right are computed for a block of steps that fits into the cache, in a few wide
operations. Each step of the loop then needs only one multiplication per factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.cpu.packing import Packing

_BLOCK = 2**18  # elements of a block's gate factors: 1 MiB in float32


class GateDerivatives:
    """Provides the factors of each step, from the last step to the first."""

    def __init__(
        self, packing: Packing, gates: Tensor, cell: Tensor, tanh_c: Tensor, c0: Tensor
    ) -> None:
        """Shapes: gates ``[T * B, 4H]``, cell and tanh_c ``[T * B, H]``, c0 ``[B, H]``."""
        self.sizes, H = packing.sizes, c0.shape[1]
        self.starts = [0]
        for n in self.sizes:
            self.starts.append(self.starts[-1] + n)
        self.gates, self.cell, self.tanh_c, self.c0 = gates.view(-1, 4, H), cell, tanh_c, c0
        self.steps = max(1, _BLOCK // max(1, packing.batch * 4 * H))
        self._gate_buffer = gates.new_empty(self.steps * packing.batch, 4, H)
        self._cell_buffer = cell.new_empty(self.steps * packing.batch, H)
        self._first = len(self.sizes)

    def at(self, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """The factors of i, f, g ``[n, 3, H]``, of o ``[n, H]`` and of c_hat ``[n, H]``."""
        if t < self._first:
            self._make_block(t)
        ifg, o, c_hat = self._views
        k = t - self._first
        return ifg[k], o[k], c_hat[k]

    def _make_block(self, last: int) -> None:
        """Compute the block that ends with step `last`. All its steps have the same row count."""
        sizes, n, first = self.sizes, self.sizes[last], last
        if last > 0 and sizes[last - 1] == n:
            while first > 1 and last - first + 1 < self.steps and sizes[first - 2] == n:
                first -= 1
        start, stop = self.starts[first], self.starts[last + 1]
        if first == 0:
            c_prev = self.c0[:n]
        elif first == last:
            c_prev = self.cell[self.starts[first - 1] : self.starts[first - 1] + n]
        else:
            c_prev = self.cell[start - n : stop - n]
        rows = stop - start
        gates, tanh_c = self.gates[start:stop], self.tanh_c[start:stop]
        i, _, g, o = gates.unbind(1)
        out, c_hat = self._gate_buffer[:rows], self._cell_buffer[:rows]
        out_i, out_f, out_g, out_o = out.unbind(1)

        torch.addcmul(gates, gates, gates, value=-1, out=out)  # s (1 - s)
        out_i *= g
        out_f *= c_prev
        out_o *= tanh_c
        torch.mul(i, g, out=c_hat)
        torch.addcmul(i, c_hat, g, value=-1, out=out_g)
        torch.mul(o, tanh_c, out=c_hat)
        torch.addcmul(o, c_hat, tanh_c, value=-1, out=c_hat)

        self._first = first
        self._views = out[:, :3].split(n), out_o.split(n), c_hat.split(n)
