"""Population statistics estimated anew, and averaged over the processes that train together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from rbn.nn.statistics import PopulationStatistics, all_processes, forced, statistics_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def update_population_stats(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], object] | None = None,
    device: torch.device | str | None = None,
    train_mode: bool = True,
    progress: bool = False,
) -> int:
    """Estimate all population statistics of a model anew, at its present parameters.

    One pass over `batches`; each statistic becomes the plain average of the minibatch estimates,
    which is how the paper obtains its test numbers. Works like `torch.optim.swa_utils.update_bn`.
    Parameters, training mode and the random state are left as they were; if the pass fails, so are
    the statistics.

    Where several processes train together (`torch.distributed`), all must call it, each with its
    own batches, and all end with the same statistics: the average of the estimates of all. How
    many batches each has does not matter. But of layers with `sync_stats` a minibatch is made up of
    a part on every process, so all must have as many.

    Args:
        model: any module that contains batch-normalized recurrent layers. Without any, nothing is
            done.
        batches: what `forward` takes. By default an input of the model, or a tuple or list whose
            first element is one.
        forward: runs the model on one batch, e.g. ``lambda m, b: m(b.tokens, lengths=b.lengths)``.
        device: where tensors are moved before the default `forward`.
        train_mode: True estimates under dropout, zoneout and noise as drawn in training, as
            `update_bn` does; False without them, as the model is evaluated.
        progress: show a progress bar (needs rich).

    Returns:
        The number of minibatches, of all processes together.
    """
    statistics = statistics_of(model)
    if not statistics:
        return 0
    group = all_processes()
    run = forward or _default_forward(device)
    modes = {module: module.training for module in model.modules()}
    before = [(s.momentum, s.estimated, s.mean, s.var, s.count) for s in statistics]
    cuda = sorted({s.mean.device.index or 0 for s in statistics if s.mean.is_cuda})
    total, done = 0, False
    try:
        model.train(train_mode)
        for s in statistics:
            s.momentum, s.estimated = None, False
            s.mean, s.var = torch.zeros_like(s.mean), torch.zeros_like(s.var)
            s.count = torch.zeros_like(s.count)
        shown = _tracked(batches) if progress else batches
        with torch.no_grad(), torch.random.fork_rng(devices=cuda), forced(model, "record"):
            in_parts = any(s.group is not None for s in statistics)
            if group is not None and in_parts:
                shown = _as_many_on_all(shown, group, statistics[0].mean.device)
            for batch in shown:
                run(model, batch)
                total += 1
            if group is not None:
                if not in_parts:
                    total = sum(_gathered(total, group, statistics[0].mean.device))
                if total > 0:
                    _average([s for s in statistics if s.group is None], group, spread=False)
        if total == 0:
            raise ValueError("batches is empty: there is nothing to estimate statistics from")
        done = True
    finally:
        for s, (momentum, estimated, mean, var, count) in zip(statistics, before, strict=True):
            s.momentum = momentum
            if not done:
                s.estimated, s.mean, s.var, s.count = estimated, mean, var, count
        for module, mode in modes.items():
            module.training = mode
    return total


def _default_forward(device: torch.device | str | None) -> Callable[[nn.Module, Any], object]:
    def forward(model: nn.Module, batch: Any) -> object:
        if isinstance(batch, (list, tuple)) and not isinstance(batch, PackedSequence):
            batch = batch[0]
        return model(batch if device is None else batch.to(device))

    return forward


def _tracked(batches: Iterable[Any]) -> Iterable[Any]:
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError as error:
        raise ImportError(
            "progress=True needs rich: pip install 'recurrent-batchnorm[train]'"
        ) from error
    total = len(batches) if isinstance(batches, Sized) else None
    console = Console(file=sys.stderr)
    return track(batches, "population statistics", total=total, console=console)


@torch.no_grad()
def average_population_stats(model: nn.Module) -> None:
    """Give every process the average of the running statistics of all.

    While processes train together, each averages the minibatches that it sees, as with
    `torch.nn.BatchNorm1d`. Call this on all of them before the model is evaluated or saved. It does
    nothing where there is one process, and to layers with `sync_stats`, whose statistics are the
    same everywhere. A step that some processes have not seen has the average of those that have.

    Args:
        model: any module that contains batch-normalized recurrent layers.
    """
    group = all_processes()
    if group is not None:
        _average([s for s in statistics_of(model) if not s.sync], group, spread=True)


def _average(statistics: list[PopulationStatistics], group: ProcessGroup, spread: bool) -> None:
    """Average estimates over processes, each weighted with the minibatches behind it.

    spread: processes will go on to average minibatches in, each its own. So each takes its share of
        the count, rounded up, that the next average be right too. Otherwise it has the whole count.
    """
    if not statistics:
        return
    # Buffers that grow on demand may have grown differently.
    rows = torch.tensor([len(s.count) for s in statistics], device=statistics[0].count.device)
    dist.all_reduce(rows, dist.ReduceOp.MAX, group=group)
    parts: list[Tensor] = []
    for s, wanted in zip(statistics, rows.tolist(), strict=True):
        s.grow(wanted)
        weight = s.count.double()[:, None]
        parts += [s.mean * weight, s.var * weight, weight]
    # In float64, so that equal float32 numbers average to themselves.
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    sums = flat.split([part.numel() for part in parts])
    found = iter([total.view_as(part) for total, part in zip(sums, parts, strict=True)])
    for s, mean, var, count in zip(statistics, found, found, found, strict=True):
        s.mean.copy_(mean / count.clamp(min=1))
        s.var.copy_(var / count.clamp(min=1))
        s.count.copy_(count[:, 0] if not spread else (count[:, 0] / group.size()).ceil())
        s.estimated = s.estimated or bool((count > 0).any())


def _gathered(value: int, group: ProcessGroup, device: torch.device) -> list[int]:
    """A number of each process."""
    everyone = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather(list(everyone), torch.tensor(value, device=device), group=group)
    found: list[int] = everyone.tolist()
    return found


def _as_many_on_all(
    batches: Iterable[Any], group: ProcessGroup, device: torch.device
) -> Iterator[Any]:
    """The batches, or an error on all processes if they end on one before the others."""
    nothing, turn = object(), 0
    found = iter(batches)
    while True:
        batch = next(found, nothing)
        there = _gathered(int(batch is not nothing), group, device)
        if not any(there):
            return
        if not all(there):
            raise ValueError(
                "with sync_stats all processes must give as many batches: process "
                f"{there.index(0)} has {turn}, process {there.index(1)} has more"
            )
        yield batch
        turn += 1
