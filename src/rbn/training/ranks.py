"""Communication between the processes of one run.

Gradients go through Fabric's DDP. This covers everything else the processes must agree on: who
takes which part of a minibatch, when to stop, and what an evaluation measured.
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
_here: tuple[Any, Ranks] | None = None  # with the process group it belongs to


class Ranks:
    """The processes of a run; a single one if `torch.distributed` is not initialized.

    Every process must call all methods except `part` and `share`, in the same order. They
    communicate through host memory and never wait for a GPU.

    Attributes:
        rank: number of this process, from 0.
        count: number of processes.
    """

    def __init__(self, rank: int = 0, count: int = 1, group: ProcessGroup | None = None) -> None:
        self.rank, self.count, self._group = rank, count, group

    @classmethod
    def here(cls) -> Ranks:
        """The processes that this one belongs to."""
        global _here
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        world = dist.group.WORLD
        if _here is None or _here[0] is not world:
            group = world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
            _here = world, cls(dist.get_rank(), dist.get_world_size(), group)
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
            dims: the batch dimension of each tensor.
        """
        if self.count == 1:
            return tuple(batch), 1.0
        if len(dims) != len(batch):
            raise ValueError(
                f"row_dims must have one dimension for each of {len(batch)} tensors, got {dims}"
            )
        rows = batch[0].shape[dims[0]]
        if rows < self.count:
            raise ValueError(f"a minibatch of {rows} cannot be split among {self.count} processes")
        first, end = (rows * k // self.count for k in (self.rank, self.rank + 1))
        mine = (v.narrow(d, first, end - first) for v, d in zip(batch, dims, strict=True))
        return tuple(mine), (end - first) / rows

    def share(self, items: Iterable[T]) -> Iterator[T]:
        """Every `count`-th of the items, which all processes have, starting at this rank."""
        return itertools.islice(items, self.rank, None, self.count)

    def gathered(self, *values: float) -> list[list[float]]:
        """The numbers of every process, as a list per process."""
        if self.count == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = mine.new_empty(self.count, len(values))
        dist.all_gather(list(everyone), mine, group=self._group)
        rows: list[list[float]] = everyone.tolist()
        return rows

    def total(self, *values: float) -> list[float]:
        """The sum of each number over the processes."""
        return [sum(column) for column in zip(*self.gathered(*values), strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return any(values[0] for values in self.gathered(float(flag)))

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work` in the first process. All processes return its result or raise its error."""
        if self.count == 1:
            return work()
        outcome: list[Any] = [None, None]  # result and error
        if self.first:
            try:
                outcome[0] = work()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` in all processes, first in the first one, which may fill a cache."""
        mine: list[T] = []
        self.from_first(lambda: mine.append(work()))
        return mine[0] if mine else work()
