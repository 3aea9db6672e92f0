"""Population statistics of two processes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import rbn
from rbn.nn import own_statistics

_OPTIONS = inspect.signature(DistributedDataParallel).parameters
OPTION = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
LENGTHS = (5, 3, 6, 4, 5)  # lengths of the batches; the first process takes three, the second two


def make(sync: bool, **options: Any) -> rbn.BatchNormLSTM:
    torch.manual_seed(3)
    return rbn.BatchNormLSTM(2, 4, sync_stats=sync, dtype=torch.float64, **options)


def batches() -> list[Tensor]:
    torch.manual_seed(4)
    return [torch.randn(length, 6, 2, dtype=torch.float64) for length in LENGTHS]


def buffers(layer: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in layer.named_buffers()}


def whole_batches(rank: int) -> Any:
    """Each process has its own batches, one more than the other."""
    layer = make(sync=False)
    count = rbn.update_population_stats(layer, batches()[rank::2])
    assert layer.stats_h_l0.estimated
    return count, buffers(layer)


def none_on_the_second(rank: int) -> Any:
    layer = make(sync=False)
    return rbn.update_population_stats(layer, batches() if rank == 0 else []), buffers(layer)


def parts(rank: int) -> Any:
    """Each process has a part of every batch."""
    layer = make(sync=True)
    mine = [batch[:, :2] if rank == 0 else batch[:, 2:] for batch in batches()]
    return rbn.update_population_stats(layer, mine), buffers(layer)


def shared_out(rank: int) -> Any:
    """Layers that train together, and batches that are not split."""
    layer = make(sync=True)
    with own_statistics(layer):
        count = rbn.update_population_stats(layer, batches()[rank::2])
    return count, buffers(layer)


def without_noise(rank: int) -> Any:
    """The same parts, estimated in evaluation mode."""
    layer = make(sync=True, zoneout=(0.5, 0.5), hidden_noise=1.0)
    mine = [batch[:, :2] if rank == 0 else batch[:, 2:] for batch in batches()]
    rbn.update_population_stats(layer, mine, train_mode=False)
    return buffers(layer)


def refusal(rank: int) -> str:
    """Parts of three batches on one process, of two on the other."""
    layer = make(sync=True)
    before = buffers(layer)
    try:
        rbn.update_population_stats(layer, batches()[rank::2])
    except ValueError as error:
        assert all(torch.equal(v, before[name]) for name, v in buffers(layer).items())
        return str(error)
    raise AssertionError("not refused")


def nothing(rank: int) -> str:
    try:
        rbn.update_population_stats(make(sync=False), [])
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")


def running(rank: int, momentum: float | None) -> Any:
    """Running averages per process, averaged over processes twice along the way."""
    layer = make(sync=False, momentum=momentum, refresh_stats=False)
    own = make(sync=False, momentum=momentum, refresh_stats=False)
    mine = batches()[rank::2][:2]
    for k, batch in enumerate([*mine, *mine]):
        layer(batch)
        own(batch)
        if k % 2 == 1:
            rbn.average_population_stats(layer)
    layer.eval()(batches()[0])
    return buffers(layer), buffers(own)


def evaluated(rank: int) -> Tensor:
    """In eval(), processes do not wait for each other, whatever they normalize with."""
    layer = make(sync=True)
    layer(batches()[0])
    with rbn.batch_statistics(layer.eval()):
        output = layer(batches()[rank])[0] if rank == 0 else None
    return layer(batches()[0])[0] if output is None else output


def under_ddp(rank: int) -> Any:
    """As users of torch do: default options, growing buffers, uneven parts of a batch."""
    layer = make(sync=True)
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches():
        mine = batch[:, :2] if rank == 0 else batch[:, 2:]
        output, _ = model(mine)
        loss = output.square().mean() * (2 * mine.shape[1] / batch.shape[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: p.detach() for name, p in layer.named_parameters()} | buffers(layer)


def under_ddp_alone(rank: int) -> Any:
    """The same with statistics per process, whose buffers grow to different lengths."""
    layer = make(sync=False, refresh_stats=False)
    model = DistributedDataParallel(layer, **{OPTION: False})
    for batch in batches()[rank::2][:2]:
        model(batch)[0].sum().backward()
    own = buffers(layer)
    rbn.average_population_stats(layer)
    return own, buffers(layer)


def emptied_by_ddp(rank: int) -> Any:
    """Before each step DDP copies the first process's buffers, which has no sequence as long."""
    layer = make(sync=False, max_length=6, refresh_stats=False)
    model = DistributedDataParallel(layer)
    own = []
    for batch in batches()[:3]:
        model(batch[:3] if rank == 0 else torch.cat([batch[:3]] * 2))[0].sum().backward()
        own.append(buffers(layer))
    layer.eval()(batches()[0])
    return own


def refreshed(rank: int, sync: bool) -> Any:
    """Statistics at the current weights: from each process's own inputs, then from all."""
    layer = make(sync=sync)
    model = DistributedDataParallel(layer, **{OPTION: False})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mine = [batch[:4] if len(batch) > 3 else batch for batch in batches()]
    mine = [batch[:, :2] if rank == 0 else batch[:, 2:] for batch in mine if len(batch) == 4]
    for batch in mine:
        model(batch)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:  # nobody waits for the other
        layer.eval()(mine[0])
        layer.state_dict()
        layer.train()
    own = make(sync=False, momentum=None, refresh_stats=False)
    own.load_state_dict(dict(layer.named_parameters()), strict=False)
    for batch in mine:
        own(batch)
    layer.eval()
    found = buffers(layer)
    rbn.average_population_stats(layer)
    layer(mine[0])
    return found, buffers(own), buffers(layer)


def documented(rank: int) -> Any:
    """The example of docs/how-to/multiple-gpus.md."""
    page = (Path(__file__).parents[2] / "docs/how-to/multiple-gpus.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    names: dict[str, Any] = {}
    exec(compile(example, "multiple-gpus.md", "exec"), names)
    layer = names["layer"]
    return {name: p.detach() for name, p in layer.named_parameters()} | buffers(layer)


CASES = {
    "documented": documented,
    "whole batches": whole_batches,
    "none on the second": none_on_the_second,
    "parts": parts,
    "shared out": shared_out,
    "without noise": without_noise,
    "refusal": refusal,
    "nothing": nothing,
    "running": lambda rank: running(rank, 0.3),
    "running, plain": lambda rank: running(rank, None),
    "evaluated": evaluated,
    "under DDP": under_ddp,
    "under DDP, alone": under_ddp_alone,
    "emptied by DDP": emptied_by_ddp,
    "refreshed": lambda rank: refreshed(rank, False),
    "refreshed, synchronized": lambda rank: refreshed(rank, True),
}
