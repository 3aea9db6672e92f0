"""The input term of an input of one feature, for the compiled LSTM.

W_x then is a vector w, and the term is x_t w. With m and v the mean and variance of x_t over the
rows, those of the term are w m and w^2 v, so the normalized term is a number for each row times a
vector: (x_t - m) (gamma_x w / sqrt(w^2 v + eps)). The kernel takes the two factors, and a term
[T, B, 4H] is neither written nor read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.definition import LSTMArguments


class OneFeature:
    """The factors of the term, and their gradients.

    Attributes:
        x: ``[N]``, centered if the term is normalized.
        scale: ``[S, 4H]``, one row for each step, or a single one for all.
        dscale: the gradient of `scale`, which the backward pass adds to.
    """

    def __init__(self, a: LSTMArguments, x: Tensor, batch: int) -> None:
        """x: the input's packed rows ``[N, 1]``. batch: the rows of each step, if all are equal."""
        assert a.weight_ih is not None
        self.w = a.weight_ih[:, 0].to(x.dtype)
        self.x, self.scale = x.flatten(), self.w[None]
        self.eps, self.gamma = a.eps, a.gamma_x
        if a.gamma_x is not None:
            rows = x.double().view(1 if a.sequence else -1, len(x) if a.sequence else batch)
            var, self.m = torch.var_mean(rows, dim=1, correction=0, keepdim=True)
            self.x = (rows - self.m).to(x.dtype).flatten()
            self.rstd = torch.rsqrt(self.w.square() * var.to(x.dtype) + a.eps)
            self.scale = a.gamma_x * self.w * self.rstd
        self.scale = self.scale.contiguous()
        self.dscale = torch.zeros_like(self.scale)

    def moments(self) -> tuple[Tensor | None, Tensor | None]:
        """Mean and rstd of the term, ``[S, 4H]`` each; None if it is not normalized."""
        if self.gamma is None:
            return None, None
        return self.w * self.m.to(self.w), self.rstd

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients of W_x and gamma_x, from `dscale`.

        scale / w = gamma_x rstd, whose derivative by w is gamma_x eps rstd^3: nearly all of W_x's
        gradient cancels, because the normalized term hardly depends on the scale of w.
        """
        if self.gamma is None:
            return {"weight_ih": self.dscale[0][:, None]}
        dw = self.gamma * self.eps * (self.dscale * self.rstd**3).sum(0)
        return {"weight_ih": dw[:, None], "gamma_x": self.w * (self.dscale * self.rstd).sum(0)}
