"""Setup of a fused recurrence before its loop: rows, buffers, masks, normalizations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rbn.ops.cpu.norms import BatchNorm, LayerNorm, Norm, PopulationNorm, SequenceNorm
from rbn.ops.cpu.packing import Packing
from rbn.ops.cpu.zoneout import Zoneout
from rbn.ops.definition import Arguments
from rbn.ops.types import compute_dtype, valid_steps

Population = tuple[Tensor | None, Tensor | None]  # mean and var of a term


class Layout:
    """The rows of each step, and how padding is treated.

    `padding` is set (bool ``[T, B, 1]``) only if padded rows count in minibatch statistics
    (``padding="include"``). They then stay in place and keep their state. Otherwise packing
    removes them.
    """

    def __init__(self, a: Arguments) -> None:
        """a: the arguments of a recurrence, with the input term as input."""
        wx, lengths = a.input, a.lengths
        self.steps, self.batch, _ = wx.shape
        self.hidden = a.h0.shape[1]
        self.dtype = compute_dtype(wx.dtype)
        self.fewest: int = a.fewest
        self.packing = Packing(self.steps, self.batch, lengths)
        self.padding: Tensor | None = None
        if lengths is not None and a.include:
            self.packing = Packing(self.steps, self.batch, None)
            valid = valid_steps(lengths, self.steps)
            assert valid is not None
            self.padding = ~valid[:, :, None]

    def cast(self, value: Tensor) -> Tensor:
        """Convert to the compute dtype, contiguous as the kernels require."""
        return value.to(self.dtype).contiguous()

    def optional(self, value: Tensor | None) -> Tensor | None:
        """`cast` for an argument that may be None."""
        return None if value is None else self.cast(value)

    def rows(self, padded: Tensor) -> Tensor:
        """Pack ``[T, B, F]`` into rows ``[T * B, F]`` in the compute dtype."""
        return self.packing.pack(self.cast(padded))

    def state(self, state: Tensor) -> Tensor:
        """A state ``[B, H]`` in the packed row order and the compute dtype."""
        return self.packing.sort(self.cast(state))

    def padded(self, rows: Tensor) -> Tensor:
        """Unpack rows to ``[T, B, F]``, zero at padded positions."""
        output = self.packing.unpack(rows)
        return output if self.padding is None else output.masked_fill(self.padding, 0)

    def zoneout(self, mask: Tensor | None, rate: float) -> Zoneout:
        """Zoneout by mask ``[T, B, H]`` or rate, plus the padded rows that keep their state."""
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
        """The normalization of one term. population: its mean and var; None for the minibatch's."""
        if kind == "layer":
            return LayerNorm(gamma, beta, eps, self.packing.sizes)
        mean, var = population
        if mean is not None and var is not None:
            return PopulationNorm(gamma, beta, eps, self.cast(mean), self.cast(var))
        return BatchNorm(gamma, beta, eps, self.packing.sizes, self.fewest)

    def input_norm(
        self, kind: str, gamma: Tensor, eps: float, population: Population, input_stats: str
    ) -> Norm | SequenceNorm:
        """The input term's normalization, per step or over the sequence."""
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

    def gradients(
        self, a: Arguments, dwx: Tensor | None, dweight: Tensor, **others: Tensor | None
    ) -> dict[str, Tensor | None]:
        """All gradients by name, in the dtypes of the arguments.

        dwx: of the input term, packed; None if there is none. others: of vectors, and in the packed
        row order of states.
        """
        results: dict[str, Tensor | None] = {
            "input": None if dwx is None else self.packing.unpack(dwx).to(a.input.dtype),
            "weight_hh": dweight.to(a.weight_hh.dtype),
        }
        for name, gradient in others.items():
            given: Tensor | None = getattr(a, name)
            results[name] = None
            if gradient is not None and given is not None:
                if name in ("h0", "c0"):
                    gradient = self.packing.unsort(gradient)
                results[name] = gradient.to(given.dtype)
        return results

    def state_gradient(self, grad: Tensor | None, like: Tensor) -> Tensor:
        """A new buffer ``[B, H]`` in the packed row order, with the gradient of a last state."""
        if grad is None:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        return self.state(grad).clone(memory_format=torch.contiguous_format)


class Buffers:
    """Buffers for all steps if they are saved, otherwise for one step, reused in every step."""

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
    """Mean and rstd of each term, in one list; None for absent ones."""
    moments: list[Tensor | None] = []
    for norm in norms:
        mean, rstd = (None, None) if norm is None else norm.moments(rows)
        moments += [mean, rstd]
    return moments


def restore_moments(
    norms: Sequence[Norm | SequenceNorm | None], moments: Sequence[Tensor | None]
) -> None:
    """Restore what `moments_of` returned."""
    for norm, mean, rstd in zip(norms, moments[0::2], moments[1::2], strict=True):
        if norm is not None and mean is not None and rstd is not None:
            norm.restore(mean, rstd)
