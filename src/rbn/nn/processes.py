"""Communication between processes in distributed training: statistics and sequence lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.few_rows import ENOUGH_ROWS, enough_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Estimate(Protocol):
    """Means and variances of steps ``[S, features]``, each from `count` ``[S]`` minibatches."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def grow(self, rows: int) -> None:
        """Grow the buffers to that many steps."""

    def look(self) -> bool:
        """Update the host's cache after the buffers were written to."""


def all_processes() -> ProcessGroup | None:
    """The group of all processes that train together, or None with a single process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


def average(statistics: Sequence[Estimate], group: ProcessGroup, spread: bool) -> None:
    """Average estimates over processes, weighted by the number of minibatches behind each.

    spread: True if each process keeps averaging in its own minibatches. It then gets its share of
        the count, rounded up, so that the next average is correctly weighted, too. False gives
        every process the total count.
    """
    if not statistics:
        return
    # Buffers grow on demand, so their sizes can differ between processes.
    rows = torch.tensor([len(s.count) for s in statistics], device=statistics[0].count.device)
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=group)
    parts: list[Tensor] = []
    for s, wanted in zip(statistics, rows.tolist(), strict=True):
        s.grow(wanted)
        weight = s.count.double()[:, None]
        parts += [s.mean * weight, s.var * weight, weight]
    # In float64, so that averaging equal float32 numbers does not change them.
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    sums = flat.split([part.numel() for part in parts])
    result = iter([total.view_as(part) for total, part in zip(sums, parts, strict=True)])
    for s, mean, var, count in zip(statistics, result, result, result, strict=True):
        s.mean.copy_(mean / count.clamp(min=1))
        s.var.copy_(var / count.clamp(min=1))
        s.count.copy_(count[:, 0] if not spread else (count[:, 0] / group.size()).ceil())
        s.look()


def of_all(value: int, group: ProcessGroup, device: torch.device) -> list[int]:
    """Gather one number from each process."""
    everyone = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather(list(everyone), torch.tensor(value, device=device), group=group)
    results: list[int] = everyone.tolist()
    return results


def sum_padded(values: Tensor, group: ProcessGroup) -> Tensor:
    """Sum vectors over processes. Missing elements of shorter vectors count as zeros."""
    longest = max(of_all(len(values), group, values.device))
    values = F.pad(values, (0, longest - len(values)))
    dist.all_reduce(values, group=group)
    return values


def as_many_on_all(
    batches: Iterable[Any], group: ProcessGroup, device: torch.device
) -> Iterator[Any]:
    """Yield the batches. Raises on all processes if one runs out before the others."""
    nothing, turn = object(), 0
    result = iter(batches)
    while True:
        batch = next(result, nothing)
        has_batch = of_all(int(batch is not nothing), group, device)
        if not any(has_batch):
            return
        if not all(has_batch):
            raise ValueError(
                "with sync_stats all processes must have the same number of batches: process "
                f"{has_batch.index(0)} has {turn}, process {has_batch.index(1)} has more"
            )
        yield batch
        turn += 1


def pad_to_longest(
    x: Tensor, lengths: Tensor | None, group: ProcessGroup
) -> tuple[Tensor, Tensor | None, int, int]:
    """Pad or trim x ``[T, B, F]`` to the longest sequence of all processes.

    Returns x, its lengths, the number of sequences on all processes, and the number of steps that
    enough of them reach to have statistics (`enough_rows`). For a single sequence, that is its
    length.
    """
    batch = x.shape[1]
    rows = min(ENOUGH_ROWS, batch)
    own = [x.shape[0]] * rows if lengths is None else lengths.topk(rows).values.tolist()
    own += [0] * (ENOUGH_ROWS - rows)
    everyone = torch.empty(group.size(), 1 + ENOUGH_ROWS, dtype=torch.int64, device=x.device)
    dist.all_gather(list(everyone), torch.tensor([batch, *own], device=x.device), group=group)
    total = int(everyone[:, 0].sum())
    longest = sorted(everyone[:, 1:].flatten().tolist(), reverse=True)
    steps = max(longest[0], 1)
    if lengths is None and steps > x.shape[0]:
        lengths = torch.full((batch,), x.shape[0], device=x.device)
    common = longest[min(enough_rows(total), max(total, 1)) - 1]
    return with_steps(x, steps), lengths, total, common


def with_steps(x: Tensor, steps: int) -> Tensor:
    """Trim x ``[T, B, F]`` to `steps` steps, or pad it with zeros."""
    missing = steps - x.shape[0]
    if missing <= 0:
        return x[:steps]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
