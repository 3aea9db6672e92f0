"""One step of the fused batch-normalized GRU, in the loop of `rbn.ops.cpu.fused_rnn`.

Names are those of `rbn.ops.reference.bn_gru`. The biases of r and z are added by the recurrent
term's normalization, beside beta_n; that of n is added here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rbn.ops.cpu.layout import Buffers, Layout, like_parameter
from rbn.ops.cpu.transition import Transition
from rbn.ops.definition import GRUArguments

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input


def shift_h(a: GRUArguments, layout: Layout) -> Tensor | None:
    """What the normalization of the recurrent term adds, ``[3H]``: the biases of r and z; beta_n."""
    if a.bias is None and a.beta_n is None:
        return None
    shift = a.weight_hh.new_zeros(3 * layout.hidden, dtype=layout.dtype)
    if a.bias is not None:
        shift[: -layout.hidden] = a.bias[: -layout.hidden]
    if a.beta_n is not None:
        shift[-layout.hidden :] = a.beta_n
    return shift


class GatedCell:
    """The gates and the new state of each step, and their gradients."""

    def __init__(self, a: GRUArguments, layout: Layout, transition: Transition) -> None:
        self.a, self.packing, self.transition = a, layout.packing, transition
        H = self.hidden = layout.hidden
        self._bias = None if a.bias is None else layout.cast(a.bias[-H:])
        self._dbias = torch.zeros_like(transition.weight[0])

    def start(self, buffers: Buffers, hs: Sequence[Tensor], zoned: bool) -> None:
        """Prepare for the forward pass, which writes the new states to hs."""
        self.kept = buffers.make(4 * self.hidden)  # r, z, n and the candidate's recurrent term
        self._gates, self._hs = buffers.views(self.kept), hs

    def restore(self, kept: Tensor | None, hidden: Tensor) -> None:
        """Prepare for the backward pass."""
        assert kept is not None
        self._gates = list(self.packing.split(kept))

    def forward(self, t: int, h: Tensor) -> Tensor:
        """The new state of step t from the previous one, ``[n, H]``."""
        H = self.hidden
        of_h, of_x = self.transition.terms(t, h)
        gates = self._gates[t]
        _, z, n, u = gates.chunk(4, dim=1)
        torch.add(of_h[:, : 2 * H], of_x[:, : 2 * H], out=gates[:, : 2 * H]).sigmoid_()
        u.copy_(of_h[:, 2 * H :])
        torch.addcmul(of_x[:, 2 * H :], gates[:, :H], u, out=n)
        if self._bias is not None:
            n += self._bias
        return torch.lerp(n.tanh_(), h, z, out=self._hs[t])

    def backward(self, t: int, h: Tensor, dh_new: Tensor, dh: Tensor) -> None:
        """Take the new state's gradient back to the previous state h, into dh."""
        r, z, n, u = self._gates[t].chunk(4, dim=1)
        dpre = self.transition.gradient_buffer(t)
        dr, dz, dn = dpre.chunk(3, dim=1)
        direct = dh_new * z
        torch.sub(dh_new, direct, out=dn)
        torch.sub(h, n, out=dz).mul_(dh_new)
        _tanh_backward(dn, n, grad_input=dn)
        _sigmoid_backward(dz, z, grad_input=dz)
        torch.mul(dn, u, out=dr)
        _sigmoid_backward(dr, r, grad_input=dr)
        self._dbias += dn.sum(0)
        of_h = torch.cat([dr, dz, dn * r], dim=1)
        self.transition.backward(t, dpre, dh, of_h)
        dh += direct

    def shift_gradients(self, dshift: Tensor | None) -> dict[str, Tensor | None]:
        """The gradients of bias and beta_n. dshift: that of `shift_h`."""
        if dshift is None:
            return {"bias": None, "beta_n": None}
        of_gates, dbeta = dshift.split([2 * self.hidden, self.hidden])
        dbias = torch.cat([of_gates, self._dbias])
        return {
            "bias": like_parameter(dbias, self.a.bias),
            "beta_n": like_parameter(dbeta, self.a.beta_n),
        }
