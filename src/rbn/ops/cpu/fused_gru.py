"""The gates of the fused batch-normalized GRU, in the loop of `rbn.ops.cpu.fused_rnn`.

Names are those of `rbn.ops.reference.bn_gru`; u is the recurrent term of the candidate n.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.cpu.layout import Layout
from rbn.ops.cpu.transition import Transition
from rbn.ops.definition import RNNArguments

_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input


class Gates:
    """The new state of each step, and its gradient.

    Attributes:
        beta_h: shift for the normalization in `transition`, ``[3H]``.
        dbias: gradient of the bias, ``[3H]``.
    """

    transition: Transition

    def __init__(self, a: RNNArguments, layout: Layout) -> None:
        self.H = layout.hidden
        self.dbias = layout.cast(a.gamma_h).new_zeros(3 * self.H)
        self.bias = self.dbias.clone() if a.bias is None else layout.cast(a.bias)
        beta_n = self.dbias[: self.H] if a.beta_n is None else layout.cast(a.beta_n)
        self.beta_h = F.pad(beta_n, (2 * self.H, 0))

    def forward(self, t: int, kept: Tensor, h: Tensor, out: Tensor) -> None:
        """Write the state after step t, ``[n, H]``, from the previous one.

        kept: ``[n, 4H]``, gets r, z, n and u for the backward pass.
        """
        r, z, n, u = kept.chunk(4, dim=1)
        term_h, term_x = self.transition.terms(t, h)
        term_x, gates = term_x + self.bias, 2 * self.H
        torch.add(term_h[:, :gates], term_x[:, :gates], out=kept[:, :gates]).sigmoid_()
        u.copy_(term_h[:, gates:])
        torch.addcmul(term_x[:, gates:], r, u, out=n).tanh_()
        torch.lerp(n, h, z, out=out)

    def backward(self, t: int, kept: Tensor, h: Tensor, dnew: Tensor, dh: Tensor) -> None:
        """Backpropagate the gradient of the state after step t to the previous state h, into dh."""
        r, z, n, u = kept.chunk(4, dim=1)
        dpre = self.transition.gradient_buffer(t)
        dr, dz, dn = dpre.chunk(3, dim=1)
        direct = dnew * z
        _tanh_backward(dnew - direct, n, grad_input=dn)
        _sigmoid_backward((h - n).mul_(dnew), z, grad_input=dz)
        _sigmoid_backward(dn * u, r, grad_input=dr)
        self.dbias += dpre.sum(0)
        self.transition.backward(t, dpre, dh, torch.cat([dr, dz, dn * r], dim=1))
        dh += direct
