"""Training steps that only the longest sequence of a minibatch reaches.

A single row has no minibatch statistics. Where all other sequences have ended, the longest one
therefore continues alone and is normalized with constants: the mean and variance of each feature
over all earlier steps of the minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rbn.nn import checks
from rbn.ops.definition import Arguments, Definition
from rbn.ops.dispatch import run
from rbn.ops.operator import CallResults
from rbn.ops.types import CONSTANT, Statistics, valid_steps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def run_in_parts(
    definition: Definition,
    calls: Sequence[Arguments],
    group: ProcessGroup | None = None,
    common_steps: int | None = None,
) -> list[CallResults] | None:
    """Run the steps that several sequences reach, then the rest of the longest sequence.

    Args:
        definition: the recurrence.
        calls: as for `rbn.ops.dispatch.run`, with minibatch statistics that exclude padding.
        group: processes that share the minibatch. One of them has the longest sequence.
        common_steps: with a group, the number of steps that several of its sequences reach.

    Returns:
        The results of each call, with the statistics of the steps that several sequences reach.
        None if these are all steps, or if the host cannot read the lengths.
    """
    lengths, (steps, batch) = calls[0].lengths, calls[0].input.shape[:2]
    if group is None:
        known = None if lengths is None else checks.lengths_on_host(lengths, steps)
        if known is None or batch < 2:
            return None
        several, longest = sorted(known)[-2:]
    else:
        known = [steps] * batch if lengths is None else checks.lengths_on_host(lengths, steps)
        if known is None or common_steps is None:
            return None
        several, longest = common_steps, steps
    if several == longest:
        return None
    common: Tensor | None = None
    if lengths is not None and batch and min(known) < several:
        values = [min(length, several) for length in known]
        common = checks.remember_lengths(lengths.clamp(max=several), values)
    first = [a._replace(lengths=common, **_cut(definition, a, slice(several))) for a in calls]
    results = run(definition, first, group)
    rows = _rows(common, several, batch, group, calls[0].input.device)
    row = next((b for b, length in enumerate(known) if length > several), None)
    if row is None:  # another process has it
        padding = 0, 0, 0, 0, 0, steps - several
        return [(F.pad(output, padding), *others) for output, *others in results]
    rest = []
    for a, (_, *states, statistics) in zip(calls, results, strict=True):
        own = _cut(definition, a, slice(several, longest), slice(row, row + 1))
        for name, state in zip(("h0", "c0"), states, strict=False):
            own[name] = state[row : row + 1]
        constants = over_all_steps(statistics, rows, a.eps)
        rest.append(definition.with_population(a._replace(lengths=None, **own), constants))
    return [
        _joined(both, one, row, steps - longest)
        for both, one in zip(results, run(definition, rest), strict=True)
    ]


def _rows(
    lengths: Tensor | None,
    steps: int,
    batch: int,
    group: ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """How many sequences of the minibatch reach each step ``[steps]``."""
    valid = valid_steps(lengths, steps)
    rows = torch.full((steps,), batch, device=device) if valid is None else valid.sum(1)
    if group is not None:
        dist.all_reduce(rows, group=group)
    return rows


def _cut(definition: Definition, a: Arguments, steps: slice, rows: slice = slice(None)) -> Any:
    """The input and the masks of some steps and rows, by name."""
    tensors = {name: getattr(a, name) for name in ("input", *definition.masks)}
    return {n: None if tensor is None else tensor[steps, rows] for n, tensor in tensors.items()}


def _joined(both: CallResults, rest: CallResults, row: int, padding: int) -> CallResults:
    """The results of all steps, from those of all rows and those of the row that continues."""
    output, *states, statistics = both
    below = output.shape[1] - row - 1
    continued = F.pad(rest[0], (0, 0, row, below, 0, padding))
    last = [
        torch.cat([state[:row], one, state[row + 1 :]])
        for state, one in zip(states, rest[1:-1], strict=True)
    ]
    return (torch.cat([output, continued]), *last, statistics)


@torch.no_grad()
def over_all_steps(statistics: Statistics, rows: Tensor, eps: float) -> Statistics:
    """Mean and variance ``[1, features]`` of each term over all steps and rows.

    A feature without variance has no scale: its variance becomes infinite, so that it is
    normalized to 0.

    Args:
        statistics: those of each step; those of all steps are kept.
        rows: the number of rows at each step ``[T]``.
        eps: added to every variance.
    """
    results: list[Tensor | None] = []
    for mean, var in zip(statistics[::2], statistics[1::2], strict=True):
        if mean is None or var is None:  # not normalized
            results += [None, None]
            continue
        if len(mean) > 1:
            weights = (rows.to(mean.dtype) / rows.sum())[:, None]
            average = (weights * mean).sum(0, keepdim=True)
            spread = (mean - average).square()
            mean, var = average, (weights * (var + spread)).sum(0, keepdim=True)
        results += [mean, torch.where(var > CONSTANT * eps, var, math.inf)]
    return Statistics(*results)
