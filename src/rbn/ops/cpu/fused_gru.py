"""The gates of the fused batch-normalized GRU, in the loop of `rbn.ops.cpu.fused_rnn`.

Names are those of `rbn.ops.reference.bn_gru`; u is the recurrent term of the candidate n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.cpu.layout import Buffers, Layout
from rbn.ops.cpu.transition import Transition
from rbn.ops.definition import GRUArguments

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input


class Gates:
    """The new state of each step, and its gradient.

    shift: what the normalization of the recurrent term adds, ``[3H]``. Besides beta_n these are the
    biases of r and z, so that only the candidate's is left to add here.
    """

    transition: Transition

    def __init__(self, a: GRUArguments, layout: Layout) -> None:
        self.split, zeros = layout.packing.split, a.weight_hh.new_zeros(3 * layout.hidden)
        bias = layout.cast(zeros if a.bias is None else a.bias)
        beta = layout.cast(zeros[: layout.hidden] if a.beta_n is None else a.beta_n)
        self.shift, self._bias = torch.cat([bias[: 2 * len(beta)], beta]), bias[2 * len(beta) :]
        self._dbias = torch.zeros_like(beta)

    def start(self, buffers: Buffers) -> Tensor:
        """Prepare for the forward pass. Returns what the backward pass needs, r, z, n and u."""
        kept = buffers.make(4 * len(self._bias))
        self._kept = buffers.views(kept)
        return kept

    def restore(self, kept: Tensor) -> None:
        """Prepare for the backward pass with what `start` returned."""
        self._kept = list(self.split(kept))

    def forward(self, t: int, h: Tensor, out: Tensor) -> None:
        """Write the state after step t, ``[n, H]``, from the previous one."""
        H, kept = len(self._bias), self._kept[t]
        r, z, n, u = kept.chunk(4, dim=1)
        of_h, of_x = self.transition.terms(t, h)
        torch.add(of_h[:, : 2 * H], of_x[:, : 2 * H], out=kept[:, : 2 * H]).sigmoid_()
        u.copy_(of_h[:, 2 * H :])
        torch.addcmul(of_x[:, 2 * H :] + self._bias, r, u, out=n).tanh_()
        torch.lerp(n, h, z, out=out)

    def backward(self, t: int, h: Tensor, dnew: Tensor, dh: Tensor) -> None:
        """Take the gradient of the state after step t back to the previous state h, into dh."""
        r, z, n, u = self._kept[t].chunk(4, dim=1)
        dpre = self.transition.gradient_buffer(t)
        dr, dz, dn = dpre.chunk(3, dim=1)
        direct = dnew * z
        _tanh_backward(dnew - direct, n, grad_input=dn)
        _sigmoid_backward((h - n).mul_(dnew), z, grad_input=dz)
        _sigmoid_backward(dn * u, r, grad_input=dr)
        self._dbias += dn.sum(0)
        self.transition.backward(t, dpre, dh, torch.cat([dr, dz, dn * r], dim=1))
        dh += direct

    def shift_gradients(self, dshift: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of bias and beta_n, from that of `shift`."""
        H = len(self._bias)
        return torch.cat([dshift[:-H], self._dbias]), dshift[-H:].clone()
