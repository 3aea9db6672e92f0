"""Training steps that only the longest sequences of a minibatch reach.

A single row has no minibatch statistics, and those of a few rows make gradients explode. Where
most sequences have ended, the longest ones therefore continue with constants: the mean and variance
of each feature over all earlier steps of the minibatch.
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
from rbn.ops.types import CONSTANT, Statistics, to_device, valid_steps

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# A step that fewer sequences than this reach, and fewer than a quarter of the minibatch, has no
# statistics of its own: benchmarks/few_sequences.py.
ENOUGH_ROWS = 4


def enough_rows(batch: int) -> int:
    """How many sequences of a minibatch must reach a step that has statistics of its own."""
    return max(2, min(ENOUGH_ROWS, -(-batch // 4)))


def run_in_parts(
    definition: Definition,
    calls: Sequence[Arguments],
    group: ProcessGroup | None = None,
    common_steps: int | None = None,
) -> list[CallResults] | None:
    """Run the steps that enough sequences reach, then the rest of the longest sequences.

    Args:
        definition: the recurrence.
        calls: as for `rbn.ops.dispatch.run`, with minibatch statistics that exclude padding.
        group: processes that share the minibatch.
        common_steps: with a group, the number of steps that enough of its sequences reach.

    Returns:
        The results of each call, with the statistics of the steps that enough sequences reach.
        None if these are all steps, or if the host cannot read the lengths.
    """
    lengths, (steps, batch) = calls[0].lengths, calls[0].input.shape[:2]
    if group is None:
        known = None if lengths is None else checks.lengths_on_host(lengths, steps)
        if known is None or batch < 2:
            return None
        in_order = sorted(known, reverse=True)
        common, longest = in_order[enough_rows(batch) - 1], in_order[0]
    else:
        known = [steps] * batch if lengths is None else checks.lengths_on_host(lengths, steps)
        if known is None or common_steps is None:
            return None
        common, longest = common_steps, steps
    if common == longest:
        return None
    device = calls[0].input.device
    shorter: Tensor | None = None
    if lengths is not None and batch and min(known) < common:
        values = [min(length, common) for length in known]
        shorter = checks.remember_lengths(lengths.clamp(max=common), values)
    first = [a._replace(lengths=shorter, **_cut(definition, a, slice(common))) for a in calls]
    results = run(definition, first, group)
    reached = _rows(shorter, common, batch, group, device)
    left = [length - common for length in known if length > common]
    rest: Sequence[CallResults | None] = [None] * len(calls)
    rows = to_device(torch.tensor([b for b, n in enumerate(known) if n > common]), device)
    if left:
        lengths = checks.remember_lengths(to_device(torch.tensor(left), device), left)
        continued = []
        for a, (_, *states, statistics) in zip(calls, results, strict=True):
            own = _cut(definition, a, slice(common, common + max(left)), rows)
            for name, state in zip(("h0", "c0"), states, strict=False):
                own[name] = state.index_select(0, rows)
            own["lengths"] = lengths if min(left) < max(left) else None
            constants = over_all_steps(statistics, reached, a.eps)
            continued.append(definition.with_population(a._replace(**own), constants))
        rest = run(definition, continued)
    return [_joined(both, one, rows, steps) for both, one in zip(results, rest, strict=True)]


def _cut(definition: Definition, a: Arguments, steps: slice, rows: Tensor | None = None) -> Any:
    """The input and the masks of some steps and rows, by name."""
    tensors = {name: getattr(a, name) for name in ("input", *definition.masks)}
    tensors = {name: None if t is None else t[steps] for name, t in tensors.items()}
    if rows is None:
        return tensors
    return {name: None if t is None else t.index_select(1, rows) for name, t in tensors.items()}


def _joined(both: CallResults, rest: CallResults | None, rows: Tensor, steps: int) -> CallResults:
    """The results of all steps, from those of all rows and those of the rows that continue."""
    output, *states, statistics = both
    below = output.new_zeros(steps - len(output), *output.shape[1:])
    if rest is not None:
        continued = F.pad(rest[0], (0, 0, 0, 0, 0, len(below) - len(rest[0])))
        below = below.index_copy(1, rows, continued)
        new = zip(states, rest[1:-1], strict=True)
        states = [state.index_copy(0, rows, own) for state, own in new]
    return (torch.cat([output, below]), *states, statistics)


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
