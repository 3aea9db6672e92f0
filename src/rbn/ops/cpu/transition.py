"""The part all recurrences share: ``pre_t = N(W_h h_{t-1}) + N(W_x x_t) + b``.

N is a normalization (equation 6) or nothing (equations 1 and 2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.cpu.layout import Buffers, Layout
from rbn.ops.cpu.norms import Norm, SequenceNorm


class Transition:
    """Computes the pre-activations step by step, and backpropagates their gradients."""

    def __init__(
        self,
        layout: Layout,
        wx: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None,
        norm_x: Norm | SequenceNorm | None,
        norm_h: Norm | None,
    ) -> None:
        """wx: ``[T, B, G]``. With norm_h but no norm_x, the sum of both terms is normalized.

        norm_h adds the bias; without norm_h it is added here.
        """
        self.packing = layout.packing
        self.wx = layout.rows(wx)
        self.weight = layout.cast(weight_hh)  # [G, H]
        self.bias = layout.optional(bias)
        self.sequence = norm_x if isinstance(norm_x, SequenceNorm) else None
        self.norm_x = None if isinstance(norm_x, SequenceNorm) else norm_x
        self.norm_h = norm_h
        self.joint = norm_h is not None and norm_x is None

    # Forward ------------------------------------------------------------------------------------

    def start(self, buffers: Buffers) -> None:
        """Prepare for the steps of the forward pass."""
        x_rows, rows = self.wx, self.packing.rows
        if self.sequence is not None:
            x_rows = self.sequence.forward(self.wx[:rows])
        self._xs = self.packing.split(x_rows)
        self._weight_t = self.weight.t().contiguous()
        features = self.wx.shape[1]
        self.wh: Tensor | None = None
        if self.norm_h is not None:
            self.wh = buffers.make(features)
            self._whs = buffers.views(self.wh)

    def forward(self, t: int, h: Tensor, pre: Tensor) -> None:
        """Write the pre-activations of step t, ``[n, G]``, from the previous state ``[n, H]``."""
        x, W = self._xs[t], self._weight_t
        if self.norm_h is None:
            torch.addmm(x, h, W, out=pre)
            if self.bias is not None:
                pre += self.bias
            return
        wh = self._whs[t]
        if self.joint:
            torch.addmm(x, h, W, out=wh)
            pre.copy_(self.norm_h.forward(t, wh))
            return
        torch.add(*self.terms(t, h), out=pre)

    def terms(self, t: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """The recurrent term and the input term of step t, each normalized, ``[n, G]``."""
        assert self.norm_h is not None
        wh, x = self._whs[t], self._xs[t]
        torch.mm(h, self._weight_t, out=wh)
        if self.norm_x is not None:
            x = self.norm_x.forward(t, x)
        return self.norm_h.forward(t, wh), x

    # Backward -----------------------------------------------------------------------------------

    def start_backward(self, wh: Tensor | None) -> None:
        """Prepare for the steps of the backward pass. wh: the buffer of the forward pass."""
        packing, features = self.packing, self.wx.shape[1]
        self.dwx = packing.buffer(features, self.wx)
        self._dxs = packing.split(self.dwx)
        self.dwh = self.dwx
        if self.norm_h is not None:
            assert wh is not None
            self._xs, self._whs = packing.split(self.wx), list(packing.split(wh))
            if not self.joint:
                self.dwh = packing.buffer(features, self.wx)
        self._dwhs = packing.split(self.dwh)
        self._scratch = self.wx.new_empty(packing.batch, features)
        # Where callers write a step's gradient: its final place, unless norm_x still applies.
        self._in_place = self.norm_h is None or self.sequence is not None

    def gradient_buffer(self, t: int) -> Tensor:
        """Where the caller writes the gradient of the pre-activations of step t."""
        return self._dxs[t] if self._in_place else self._scratch[: self.packing.sizes[t]]

    def backward(self, t: int, dpre: Tensor, dh: Tensor, of_h: Tensor | None = None) -> None:
        """Backpropagate the gradient of step t's pre-activations to the previous state, into dh.

        of_h: the gradient of the recurrent term, if it differs from that of the input term, dpre.
        """
        dwh = dpre
        if self.norm_h is not None:
            dwh = self._dwhs[t]
            dwh.copy_(self.norm_h.backward(t, dpre if of_h is None else of_h, self._whs[t]))
            if self.norm_x is not None:
                self._dxs[t].copy_(self.norm_x.backward(t, dpre, self._xs[t]))
        torch.mm(dwh, self.weight, out=dh)

    def finish_backward(
        self, hidden: Tensor, h0: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of wx (packed), weight_hh, bias, gamma_x and gamma_h.

        hidden: the states ``[T * B, H]`` packed; h0: ``[B, H]`` in the packed row order.
        """
        packing, rows = self.packing, self.packing.rows
        dweight = packing.outer(self.dwh, hidden, h0)
        if self.norm_h is None:
            return self.dwx, dweight, self.dwx[:rows].sum(0), None, None
        dgamma_x = None
        if self.sequence is not None:
            self.dwx[:rows] = self.sequence.backward(self.dwx[:rows], self.wx[:rows])
            dgamma_x = self.sequence.dgamma
        elif self.norm_x is not None:
            dgamma_x = self.norm_x.dgamma
        return self.dwx, dweight, self.norm_h.dbeta, dgamma_x, self.norm_h.dgamma
