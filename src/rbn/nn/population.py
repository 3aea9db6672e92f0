"""The population statistics of a whole model: estimated, averaged, kept and left aside.

Section 3 of the paper: the numbers of a test come from statistics that are averaged over the
training set, at the parameters that are tested.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rbn.nn.batch_forms import default_forward
from rbn.nn.batch_normalized import BatchNormalized
from rbn.nn.processes import all_processes, as_many_on_all, average, of_all
from rbn.nn.recent_calls import RecentCalls
from rbn.nn.statistics import PopulationStatistics, temporarily

Batch = TypeVar("Batch")


def _statistics_of(model: nn.Module) -> list[PopulationStatistics]:
    return [m for m in model.modules() if isinstance(m, PopulationStatistics)]


@contextlib.contextmanager
def _set_aside_inputs(model: nn.Module) -> Iterator[list[BatchNormalized]]:
    """Inside the ``with`` block no layer has inputs of training calls to refresh itself from."""
    layers = [m for m in model.modules() if isinstance(m, BatchNormalized)]
    before = [layer.recent_calls for layer in layers]
    for layer in layers:
        layer.recent_calls = RecentCalls()
    try:
        yield layers
    finally:
        for layer, calls in zip(layers, before, strict=True):
            layer.recent_calls = calls


def keep_running_averages(model: nn.Module) -> None:
    """Turn `refresh_stats` off in all layers of a model: `eval()` uses the running averages."""
    for module in model.modules():
        if isinstance(module, BatchNormalized):
            module.refresh_stats = False
            module.recent_calls.clear()


@contextlib.contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block the model normalizes with minibatch statistics, in eval() too.

    The population statistics are neither used nor changed. This is how the paper's validation
    curves are measured while training.
    """
    with temporarily(_statistics_of(model), "forced", "batch"):
        yield


@contextlib.contextmanager
def kept_statistics(model: nn.Module) -> Iterator[None]:
    """After the ``with`` block the population statistics are what they were, in the same buffers.

    Inside they may be estimated anew, without a word to whoever holds on to the buffers, such as a
    CUDA graph that updates them.
    """
    before = [(s, (s.mean, s.var, s.count), s.notes()) for s in _statistics_of(model)]
    for s, (mean, var, count), known in before:
        s.mean, s.var, s.count = mean.clone(), var.clone(), count.clone()
        s.note(*known)
    try:
        with _set_aside_inputs(model):
            yield
    finally:
        for s, (mean, var, count), known in before:
            s.mean, s.var, s.count = mean, var, count
            s.note(*known)


@contextlib.contextmanager
def own_statistics(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block each process's minibatches are its own, whatever `sync_stats` says.

    For work that the processes share out by whole minibatches.
    """
    with temporarily(_statistics_of(model), "sync", False):
        yield


@torch.no_grad()
def average_population_stats(model: nn.Module) -> None:
    """Give every process the average of the statistics of all.

    While processes train together, each has the statistics of the minibatches that it sees, as with
    `torch.nn.BatchNorm1d`. Call this on all of them before the model is evaluated or saved. Layers
    refresh their statistics first, each from its own inputs. It does nothing where there is one
    process, and to running averages of layers with `sync_stats`, which are the same everywhere. A
    step that some processes have not seen has the average of those that have.

    Args:
        model: any module that contains batch-normalized recurrent layers.
    """
    group = all_processes()
    if group is None:
        return
    layers = [m for m in model.modules() if isinstance(m, BatchNormalized)]
    for layer in layers:
        layer.refresh()
    own = {s for layer in layers if layer.refresh_stats for s in layer.children()}
    average([s for s in _statistics_of(model) if s in own or not s.sync], group, spread=True)
    for layer in layers:
        layer.mark_fresh()


def update_population_stats(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    forward: Callable[[nn.Module, Batch], object] | None = None,
    device: torch.device | str | None = None,
    train_mode: bool = True,
    progress: bool = False,
) -> int:
    """Estimate all population statistics of a model anew, at its present parameters.

    One pass over `batches`; each statistic becomes the plain average of the minibatch estimates,
    which is how the paper obtains its test numbers. Works like `torch.optim.swa_utils.update_bn`.
    Parameters, training mode and the random state are left as they were; if the pass fails, so are
    the statistics, and those of layers that it does not reach always.

    Where several processes train together (`torch.distributed`), all must call it, each with its
    own batches, and all end with the same statistics: the average of the estimates of all. How
    many batches each has does not matter. But of layers with `sync_stats` a minibatch is made up of
    a part on every process, so all must have as many.

    Args:
        model: any module that contains batch-normalized recurrent layers. Without any, nothing is
            done.
        batches: what `forward` takes. By default each is an input of the model; a dict or other
            mapping of arguments by name, such as a Hugging Face `BatchEncoding`, of which those
            that the model does not take are dropped; or a tuple or list, whose first elements are
            the inputs, as many as the model requires, and whose last may be a target. The first
            element may be a mapping or tuple of inputs, as in ``({"input": x, "lengths": n}, y)``.
        forward: runs the model on one batch, e.g. ``lambda m, b: m(b.tokens, lengths=b.lengths)``.
            Needed for ``(input, lengths, target)`` if the model's `lengths` is optional.
        device: where the tensors of a batch, at any depth, are moved before the default `forward`.
        train_mode: True estimates under dropout, zoneout and noise as drawn in training, as
            `update_bn` does; False without them, as the model is evaluated. If the model is in
            training mode now, parts that are in `eval()`, frozen ones say, stay so, and their
            statistics are used and kept.
        progress: show a progress bar (needs rich).

    Returns:
        The number of minibatches, of all processes together.

    Raises:
        ValueError: there are no batches, or there is nothing to estimate from in them, such as
            single sequences; or all layers are frozen.
    """
    if isinstance(batches, Tensor):
        raise TypeError("batches must be an iterable of inputs, such as a list, got a Tensor")
    every = _statistics_of(model)
    statistics = [s for s in every if s.training or not model.training]  # without frozen ones
    if not every:
        return 0
    if not statistics:
        raise ValueError(
            "every batch-normalized layer is in eval() while the model is in training mode, and so "
            "frozen: call model.eval(), or train() of the layers, before"
        )
    run = forward or default_forward(device)
    modes = {module: module.training for module in model.modules()}
    before = [(s.momentum, s.mean, s.var, s.count, s.notes()) for s in statistics]
    cuda = sorted({s.mean.device.index or 0 for s in statistics if s.mean.is_cuda})
    total, done = 0, False
    with _set_aside_inputs(model) as layers:
        try:
            if not (train_mode and model.training):
                model.train(train_mode)
            for s in statistics:
                s.momentum = None
                with torch.inference_mode(False):  # they are for training, too
                    s.mean, s.var = torch.zeros_like(s.mean), torch.zeros_like(s.var)
                    s.count = torch.zeros_like(s.count)
                s.note(False, 0)
            recording = temporarily(statistics, "forced", "record")
            with torch.no_grad(), torch.random.fork_rng(devices=cuda), recording:
                shown = _tracked(batches) if progress else batches
                group, in_parts = all_processes(), any(s.group is not None for s in statistics)
                if group is not None and in_parts:
                    shown = as_many_on_all(shown, group, statistics[0].mean.device)
                for batch in shown:
                    run(model, batch)
                    total += 1
                if group is not None and not in_parts:
                    total = sum(of_all(total, group, statistics[0].mean.device))
                if group is not None and total > 0:
                    average([s for s in statistics if s.group is None], group, spread=False)
            if total == 0:
                raise ValueError("batches is empty: there is nothing to estimate statistics from")
            if not any(s.find_estimates() for s in statistics):
                raise ValueError(
                    "no batch has two sequences (of which statistics could be estimated): "
                    "nothing was changed"
                )
            for s in statistics:
                if not bool(torch.isfinite(s.mean).all() and torch.isfinite(s.var).all()):
                    raise ValueError(
                        "batches give statistics that are not finite (NaN or infinity in the data "
                        "or the parameters): nothing was changed"
                    )
            done = True
        finally:
            for s, (momentum, mean, var, count, notes) in zip(statistics, before, strict=True):
                s.momentum = momentum
                if not done or not s.find_estimates():  # or no batch has reached the layer
                    s.mean, s.var, s.count = mean, var, count
                    s.note(*notes)
                elif count.shape == s.count.shape and not count.is_inference():
                    # Into the buffers that there were: others may hold on to them.
                    for old, new in ((mean, s.mean), (var, s.var), (count, s.count)):
                        old.copy_(new)
                    notes = s.notes()
                    s.mean, s.var, s.count = mean, var, count
                    s.note(*notes)
            for module, mode in modes.items():
                module.training = mode
    for layer in layers:
        if any(module in statistics for module in layer.children()):
            layer.mark_fresh()
    return total


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
