"""Chooses a few padded lengths that need little padding."""

from __future__ import annotations

import torch
from torch import Tensor


def padded_lengths(lengths: Tensor, limit: float = 0.12, most: int = 64) -> tuple[int, ...]:
    """The fewest lengths to pad to, in rising order, that keep padding below a limit.

    Each sequence is padded to the smallest of these lengths that fits it. For each number K of
    lengths, the optimal ones are computed exactly; K grows until the limit is met. They are
    multiples of a power of two, at most 8 and at most a sixteenth of the median length.

    Args:
        lengths: lengths of the sequences, integers ``[N]``, each at least 1.
        limit: share of padding among all positions, from 0 to 1.
        most: maximum number of lengths.
    """
    if len(lengths) == 0:
        raise ValueError("lengths must not be empty")
    lengths = lengths.cpu().to(torch.int64)
    multiple = min(8, 1 << max(0, int(lengths.median()).bit_length() - 5))
    steps = -(-lengths // multiple)
    counts = torch.bincount(steps).double()
    size = len(counts)
    below = torch.cat([counts.new_zeros(1), counts.cumsum(0)])  # sequences shorter than k
    edges = torch.arange(size)
    real = float(lengths.sum())
    # cost[j]: positions if lengths up to j are padded to the edges so far, the last one at j.
    cost = edges * below[1:]
    previous: list[Tensor] = []
    while True:
        chosen = _trace(previous, size - 1)
        padding = 1 - real / (float(cost[-1]) * multiple)
        if padding < limit or len(chosen) >= min(most, int((counts > 0).sum())):
            return tuple(edge * multiple for edge in chosen)
        # One more edge: the last at j, the one before it at i < j.
        between = below[1:][None, :] - below[1:][:, None]
        table = cost[:, None] + edges[None, :] * between
        table = torch.where(edges[:, None] < edges[None, :], table, float("inf"))
        cost, origin = table.min(0)
        previous.append(origin)


def _trace(previous: list[Tensor], last: int) -> list[int]:
    """The edges that lead to the last one, in rising order."""
    chosen = [last]
    for origin in reversed(previous):
        chosen.append(int(origin[chosen[-1]]))
    return sorted({edge for edge in chosen if edge > 0})


def padding_share(lengths: Tensor, padded: tuple[int, ...]) -> float:
    """The share of padding among all positions, from 0 to 1."""
    edges = torch.tensor(padded)
    to = edges[torch.searchsorted(edges, lengths.cpu())]
    return 1 - float(lengths.sum()) / float(to.sum())
