"""The batch-normalizing transform (equation 5), its statistics, and zoneout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rbn.ops.definition import Arguments, Definition
from rbn.ops.few_rows import Constants
from rbn.ops.reference.global_moments import global_moments, identical_globally
from rbn.ops.types import CONSTANT, InputStats, valid_steps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def bn(
    h: Tensor, gamma: Tensor | float, beta: Tensor | float, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """Equation 5: ``BN(h; gamma, beta) = beta + gamma * (h - E[h]) / sqrt(Var[h] + eps)``.

    Shapes: h ``[B, F]``; gamma, beta, mean, var ``[F]``.
    """
    return beta + gamma * (h - mean) / torch.sqrt(var + eps)


def moments(
    h: Tensor, rows: Tensor | None = None, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Sample mean and biased variance over the rows of h ``[B, F]``, each ``[F]``.

    rows: bool ``[B]``, the rows that count (all of them by default). Without any row both are zero.
    group: processes whose rows are combined; by default only this process's rows count.
    """
    if group is not None:
        return global_moments(h, rows, group)
    if rows is None:
        mean = h.mean(0)
        return mean, (h - mean).square().mean(0)
    n = rows.sum().clamp(min=1)
    rows = rows[:, None]
    mean = torch.where(rows, h, 0).sum(0) / n
    return mean, torch.where(rows, h - mean, 0).square().sum(0) / n


def in_type(dtype: torch.dtype, *values: Tensor | None) -> list[Any]:
    """Convert parameters and states to the dtype in which the equations are computed."""
    return [None if v is None else v.to(dtype) for v in values]


def pair(mean: Tensor | None, var: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Mean and var of a term as a pair, or None if it has no statistics."""
    return None if mean is None or var is None else (mean, var)


class Term:
    """One normalized term: computes the statistics of each step and records them.

    population: ``(mean, var)`` of ``[S, F]`` to use instead of the minibatch's own.
    group: processes that share the minibatch.
    constants: replaces the statistics of steps with too few rows; None if all steps have enough.
    """

    def __init__(
        self,
        population: tuple[Tensor, Tensor] | None,
        group: ProcessGroup | None = None,
        constants: Constants | None = None,
    ) -> None:
        self.population, self.group, self.constants = population, group, constants
        self.means: list[Tensor] = []
        self.vars: list[Tensor] = []

    def statistics(self, t: int, h: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance ``[F]`` with which step t normalizes h ``[B, F]``."""
        if self.population is not None:
            means, variances = self.population
            s = min(t, means.shape[0] - 1)
            return means[s], variances[s]
        return self.keep(t, *moments(h, rows, self.group))

    def keep(self, t: int, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Record the statistics of step t. Returns those to use."""
        if self.constants is not None:
            mean, var = self.constants.replace(t, mean, var)
        self.means.append(mean.detach())
        self.vars.append(var.detach())
        return mean, var

    def bn(
        self,
        t: int,
        h: Tensor,
        gamma: Tensor | float,
        beta: Tensor | float,
        rows: Tensor | None,
        eps: float,
        identical: Tensor | None = None,
    ) -> Tensor:
        """`bn` of h ``[B, F]`` with the statistics of step t.

        identical: bool, whether all inputs of h have identical rows; then a constant h gets no
        gradient, see `CONSTANT`.
        """
        mean, var = self.statistics(t, h, rows)
        if identical is not None and self.population is None:
            varies = ~(identical & (var <= CONSTANT * eps).all())
            h, mean, var = (torch.where(varies, v, v.detach()) for v in (h, mean, var))
        return bn(h, gamma, beta, mean, var, eps)

    def constant(self, t: int, eps: float) -> Tensor | bool:
        """Whether the minibatch's rows were identical in step t, judged by its statistics."""
        return True if self.population is not None else (self.vars[t] <= CONSTANT * eps).all()

    def stacked(self) -> tuple[Tensor | None, Tensor | None]:
        """The minibatch statistics of all steps so far, ``[T, F]`` each."""
        if not self.means:
            return None, None
        return torch.stack(self.means), torch.stack(self.vars)


class InputTerm(Term):
    """The input term, which is known for all steps in advance.

    With sequencewise statistics (section 5.4, BN-e*) one mean and variance, over all unpadded
    positions of all steps, serves every step. Several processes exchange the statistics of all
    steps at once.

    wx: ``[T, B, F]``.
    valid: bool ``[T, B]``, the unpadded positions.
    counted: bool ``[T, B]``, the positions that count in the statistics of a step.
    """

    def __init__(
        self,
        wx: Tensor,
        valid: Tensor | None,
        counted: Tensor | None,
        input_stats: InputStats,
        population: tuple[Tensor, Tensor] | None,
        group: ProcessGroup | None = None,
        constants: Constants | None = None,
    ) -> None:
        self.over_sequence = population is None and input_stats == "sequence"
        super().__init__(population, group, None if self.over_sequence else constants)
        self.wx, self.valid, self.counted = wx, valid, counted
        self.shared: tuple[Tensor, Tensor] | None = None
        self.steps: list[tuple[Tensor, Tensor]] = []

    def statistics(self, t: int, h: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The statistics of step t, or those of the sequence."""
        if not self.over_sequence:
            if self.group is None or self.population is not None:
                return super().statistics(t, h, rows)
            if not self.steps:
                mean, var = global_moments(self.wx, self.counted, self.group)
                self.steps = list(zip(mean.unbind(), var.unbind(), strict=True))
            return self.keep(t, *self.steps[t])
        if self.shared is None:
            everywhere = None if self.valid is None else self.valid.flatten()
            self.shared = super().statistics(0, self.wx.flatten(0, 1), everywhere)
        return self.shared

    def constant(self, t: int, eps: float) -> Tensor | bool:
        """Whether the rows were identical in step t.

        Sequencewise statistics do not tell, so this compares the rows themselves.
        """
        if not self.over_sequence:
            return super().constant(t, eps)
        if self.group is not None:  # `still_identical` checks the resulting states
            return True
        rows = self.wx[t].detach()
        if self.counted is None:
            return (rows == rows[:1]).all()
        counted = self.counted[t]
        one = rows.index_select(0, counted.to(torch.int8).argmax().view(1))
        return ((rows == one) | ~counted[:, None]).all()


def prepared(
    a: Arguments, wx: Tensor, definition: Definition, group: ProcessGroup | None
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Any]]:
    """What the loop over time needs, from the input term wx ``[T, B, F]``.

    Returns wx with zeros as padding, which positions are not padding, which of them count in
    minibatch statistics (bool ``[T, B]``, None for all), and the normalized terms.
    """
    valid = valid_steps(a.lengths, len(wx))
    wx = without_padding(wx, valid if a.padding == "exclude" or a.population else None)
    counted = valid if a.padding == "exclude" else None
    constants: list[Constants | None] = [None] * len(definition.terms)
    if counted is not None or group is not None:
        steps, batch, _ = wx.shape
        full = wx.new_full((steps,), batch, dtype=torch.int64)
        rows = full if counted is None else counted.sum(1)
        if group is not None:
            dist.all_reduce(rows, group=group)
        constants = [Constants(rows, a.min_rows, a.eps) for _ in constants]
    population = [pair(getattr(a, f"mean_{k}"), getattr(a, f"var_{k}")) for k in definition.terms]
    others = zip(population[1:], constants[1:], strict=True)
    x_term = InputTerm(wx, valid, counted, a.input_stats, population[0], group, constants[0])
    return wx, valid, counted, [x_term, *(Term(given, group, own) for given, own in others)]


def first_identical(*states: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Whether all rows of the initial states ``[B, H]`` are identical."""
    if group is not None:
        return identical_globally(torch.cat(states, dim=1), group)
    return torch.stack([(s == s[:1]).all() for s in states]).all()


def still_identical(
    identical: Tensor,
    states: tuple[Tensor, ...],
    rows: Tensor | None,
    eps: float,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Whether the rows of the states are still identical after a step; see `CONSTANT`."""
    if group is not None:  # once the rows differ, no further communication is needed
        if not identical:
            return identical
        _, var = global_moments(torch.cat(states, dim=1).detach(), rows, group)
        return (var <= CONSTANT * eps).all()
    variances = [moments(s.detach(), rows)[1].max() for s in states]
    return identical & (torch.stack(variances) <= CONSTANT * eps).all()


def zoneout(mask: Tensor | None, rate: float, t: int, previous: Tensor, new: Tensor) -> Tensor:
    """Krueger et al. 2017: keep a unit's previous value where mask[t] is true.

    mask: bool ``[T, B, H]`` (training); None: the expected value (inference).
    """
    if mask is not None:
        return torch.where(mask[t], previous, new)
    return new if rate == 0 else rate * previous + (1 - rate) * new


def without_padding(wx: Tensor, valid: Tensor | None) -> Tensor:
    """Zero the padded positions of the input term ``[T, B, F]``, because a NaN would spread."""
    return wx if valid is None else torch.where(valid[:, :, None], wx, 0)


def carry(valid: Tensor | None, t: int, new: Tensor, previous: Tensor) -> Tensor:
    """The state after step t: padded rows keep the previous one. States ``[B, H]``."""
    return new if valid is None else torch.where(valid[t][:, None], new, previous)


def stack_steps(states: list[Tensor], valid: Tensor | None) -> Tensor:
    """The layer's output ``[T, B, H]``, zero where the input was padding."""
    output = torch.stack(states)
    return output if valid is None else torch.where(valid[:, :, None], output, 0)
