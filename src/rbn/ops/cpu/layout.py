"""What every fused recurrence sets up before its loop: rows, buffers, masks, normalizations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rbn.ops.cpu.norms import BatchNorm, LayerNorm, Norm, PopulationNorm, SequenceNorm
from rbn.ops.cpu.packing import Packing
from rbn.ops.cpu.zoneout import Zoneout
from rbn.ops.types import compute_dtype, valid_steps

Population = tuple[Tensor | None, Tensor | None]  # mean and var of a term


class Layout:
    """The rows of each step, and how padding is treated.

    padding is set (bool ``[T, B, 1]``) only where padded rows count in minibatch statistics
    (``padding="include"``): they then stay in place and keep their state. Everywhere else they are
    packed away.
    """

    def __init__(
        self, wx: Tensor, h0: Tensor, lengths: Tensor | None, include_padding: bool
    ) -> None:
        self.steps, self.batch, _ = wx.shape
        self.hidden = h0.shape[1]
        self.dtype = compute_dtype(wx.dtype)
        self.packing = Packing(self.steps, self.batch, lengths)
        self.padding: Tensor | None = None
        if lengths is not None and include_padding:
            self.packing = Packing(self.steps, self.batch, None)
            valid = valid_steps(lengths, self.steps)
            assert valid is not None
            self.padding = ~valid[:, :, None]

    def cast(self, value: Tensor) -> Tensor:
        """To the type in which the recurrence computes, contiguous as the kernels want it."""
        return value.to(self.dtype).contiguous()

    def optional(self, value: Tensor | None) -> Tensor | None:
        """The same for an argument that may be absent."""
        return None if value is None else self.cast(value)

    def rows(self, padded: Tensor) -> Tensor:
        """``[T, B, F]`` as packed rows ``[T * B, F]`` in the computing type."""
        return self.packing.pack(self.cast(padded))

    def state(self, state: Tensor) -> Tensor:
        """``[B, H]`` in the rows' order and the computing type."""
        return self.packing.sort(self.cast(state))

    def padded(self, rows: Tensor) -> Tensor:
        """Packed rows as ``[T, B, F]``, zero at padded positions."""
        output = self.packing.unpack(rows)
        return output if self.padding is None else output.masked_fill(self.padding, 0)

    def zoneout(self, mask: Tensor | None, rate: float) -> Zoneout:
        """Zoneout by mask ``[T, B, H]`` or rate, joined with the rows that keep their state."""
        if mask is not None:
            rate = 0.0
        if self.padding is not None:
            mask = self.padding if mask is None else mask | self.padding
        if mask is None:
            return Zoneout(rate)
        return Zoneout(rate, self.packing.split(self.packing.pack(mask)))

    def norm(
        self, kind: str, gamma: Tensor, beta: Tensor | None, eps: float, population: Population
    ) -> Norm:
        """One term's normalization. population: mean and var; None for the minibatch's own."""
        if kind == "layer":
            return LayerNorm(gamma, beta, eps, self.packing.sizes)
        mean, var = population
        if mean is not None and var is not None:
            return PopulationNorm(gamma, beta, eps, self.cast(mean), self.cast(var))
        return BatchNorm(gamma, beta, eps)

    def input_norm(
        self, kind: str, gamma: Tensor, eps: float, population: Population, input_stats: str
    ) -> Norm | SequenceNorm:
        """The input term's normalization, which may be over the whole sequence at once."""
        if kind == "batch" and population[0] is None and input_stats == "sequence":
            return SequenceNorm(
                gamma, eps, None if self.padding is None else ~self.padding.flatten()
            )
        return self.norm(kind, gamma, None, eps, population)

    def output_gradients(self, grad: Tensor | None) -> tuple[Tensor, ...] | None:
        """The gradient of the output ``[T, B, H]``, split into steps."""
        if grad is None:
            return None
        if self.padding is not None:
            grad = grad.masked_fill(self.padding, 0)
        return self.packing.split(self.rows(grad))

    def state_gradient(self, grad: Tensor | None, like: Tensor) -> Tensor:
        """A fresh buffer ``[B, H]`` in the rows' order, holding a final state's gradient."""
        if grad is None:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        return self.state(grad).clone(memory_format=torch.contiguous_format)


class Buffers:
    """Buffers for all steps where they are saved, else one step's buffer used again and again."""

    def __init__(self, packing: Packing, like: Tensor, save: bool) -> None:
        self.packing, self.like, self.save = packing, like, save

    def make(self, features: int) -> Tensor:
        """A buffer of ``[T * B, features]`` or ``[B, features]``."""
        if self.save:
            return self.packing.buffer(features, self.like)
        return self.like.new_empty(self.packing.batch, features)

    def views(self, rows: Tensor) -> list[Tensor]:
        """The part of a buffer that belongs to each step, ``[sizes[t], features]``."""
        if self.save:
            return list(self.packing.split(rows))
        views = {n: rows[:n] for n in set(self.packing.sizes)}
        return [views[n] for n in self.packing.sizes]


def moments_of(norms: Sequence[Norm | SequenceNorm | None], rows: int) -> list[Tensor | None]:
    """Mean and rstd of each term, one after another; None where there is none."""
    moments: list[Tensor | None] = []
    for norm in norms:
        mean, rstd = (None, None) if norm is None else norm.moments(rows)
        moments += [mean, rstd]
    return moments


def restore_moments(
    norms: Sequence[Norm | SequenceNorm | None], moments: Sequence[Tensor | None]
) -> None:
    """Give each term back what `moments_of` took."""
    for norm, mean, rstd in zip(norms, moments[0::2], moments[1::2], strict=True):
        if norm is not None and mean is not None and rstd is not None:
            norm.restore(mean, rstd)


def like_parameter(grad: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """The gradient of an optional parameter in its type; None where it is absent."""
    return None if grad is None or parameter is None else grad.to(parameter.dtype)
