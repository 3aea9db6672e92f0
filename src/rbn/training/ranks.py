"""The processes that make one run together, and what they tell each other.

What is trained goes through Fabric's DDP; here is all else on which they must agree: which part of
a minibatch is whose, when to stop, what a look at the validation data found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_here: tuple[Any, Ranks] | None = None  # the process group for which they were made


class Ranks:
    """This process and its like; alone where `torch.distributed` has not begun.

    All methods but `part` and `share` must be called by every process, in the same order. They
    speak over the host's memory: a GPU is never waited for.

    Attributes:
        rank: number of this process, from 0.
        count: of the processes.
    """

    def __init__(self, rank: int = 0, count: int = 1, group: ProcessGroup | None = None) -> None:
        self.rank, self.count, self._group = rank, count, group

    @classmethod
    def here(cls) -> Ranks:
        """Those of this process."""
        global _here
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        world = dist.group.WORLD
        if _here is None or _here[0] is not world:
            talk = world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
            _here = world, cls(dist.get_rank(), dist.get_world_size(), talk)
        return _here[1]

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and talks to the user."""
        return self.rank == 0

    def part(
        self, batch: Sequence[Tensor], dims: Sequence[int]
    ) -> tuple[tuple[Tensor, ...], float]:
        """This process's rows of a minibatch, and their share of all rows.

        Args:
            batch: tensors with the rows of all processes.
            dims: along which dimension of each tensor the rows lie.
        """
        if self.count == 1:
            return tuple(batch), 1.0
        if len(dims) != len(batch):
            raise ValueError(
                f"row_dims must name a dimension for each of {len(batch)} tensors, got {dims}"
            )
        rows = batch[0].shape[dims[0]]
        if rows < self.count:
            raise ValueError(f"a minibatch of {rows} cannot be shared by {self.count} processes")
        first, end = (rows * k // self.count for k in (self.rank, self.rank + 1))
        mine = (v.narrow(d, first, end - first) for v, d in zip(batch, dims, strict=True))
        return tuple(mine), (end - first) / rows

    def share(self, items: Iterable[T]) -> Iterator[T]:
        """This process's items, of those that all have: every so many-th."""
        return itertools.islice(items, self.rank, None, self.count)

    def gathered(self, *values: float) -> list[list[float]]:
        """Some numbers of every process, by process."""
        if self.count == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = mine.new_empty(self.count, len(values))
        dist.all_gather(list(everyone), mine, group=self._group)
        found: list[list[float]] = everyone.tolist()
        return found

    def total(self, *values: float) -> list[float]:
        """The sums of some numbers over the processes."""
        return [sum(column) for column in zip(*self.gathered(*values), strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return any(found[0] for found in self.gathered(float(flag)))

    def from_first(self, work: Callable[[], T]) -> T:
        """What the first process finds, on all of them; if it fails, all fail with its error."""
        if self.count == 1:
            return work()
        found: list[Any] = [None, None]
        if self.first:
            try:
                found[0] = work()
            except Exception as error:
                found[1] = error
        dist.broadcast_object_list(found, src=0, group=self._group)
        if found[1] is not None:
            raise found[1]
        value: T = found[0]
        return value

    def in_turn(self, work: Callable[[], T]) -> T:
        """What each finds for itself, but the first before the others: it may leave a cache."""
        mine: list[T] = []
        self.from_first(lambda: mine.append(work()))
        return mine[0] if mine else work()
