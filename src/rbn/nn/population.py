"""Estimate, average, preserve or bypass the population statistics of a model.

Section 3 of the paper: test results use statistics averaged over the training set, at the
parameters being tested.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rbn.nn.batch_forms import default_forward, trained_with_lengths
from rbn.nn.batch_normalized import BatchNormalized
from rbn.nn.processes import all_processes, as_many_on_all, average, of_all
from rbn.nn.recent_calls import RecentCalls
from rbn.nn.statistics import PopulationStatistics, temporarily

Batch = TypeVar("Batch")


def _statistics_of(model: nn.Module) -> list[PopulationStatistics]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return [m for m in model.modules() if isinstance(m, PopulationStatistics)]


@contextlib.contextmanager
def _set_aside_inputs(model: nn.Module) -> Iterator[list[BatchNormalized]]:
    """Inside the ``with`` block, layers cannot refresh: hides their kept training inputs."""
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
    """Turn `refresh_stats` off in all layers of a model, so that `eval()` uses running averages."""
    for module in model.modules():
        if isinstance(module, BatchNormalized):
            module.refresh_stats = False
            module.recent_calls.clear()


@contextlib.contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block, the model normalizes with minibatch statistics, even in eval().

    The population statistics are neither used nor changed. The paper's validation curves during
    training are measured this way.
    """
    with temporarily(_statistics_of(model), "forced", "batch"):
        yield


@contextlib.contextmanager
def kept_statistics(model: nn.Module) -> Iterator[None]:
    """Restore the population statistics after the ``with`` block, in the same buffers.

    Code inside the block may re-estimate them. Anything that holds references to the buffers, such
    as a CUDA graph that updates them, is not affected.
    """
    before = [(s, (s.mean, s.var, s.count), s.cached()) for s in _statistics_of(model)]
    for s, (mean, var, count), known in before:
        s.mean, s.var, s.count = mean.clone(), var.clone(), count.clone()
        s.set_cached(*known)
    try:
        with _set_aside_inputs(model):
            yield
    finally:
        for s, (mean, var, count), known in before:
            s.mean, s.var, s.count = mean, var, count
            s.set_cached(*known)


@contextlib.contextmanager
def own_statistics(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block, each process uses its own minibatches: ignores `sync_stats`.

    For work that gives each process complete minibatches.
    """
    with temporarily(_statistics_of(model), "sync", False):
        yield


@torch.no_grad()
def average_population_stats(model: nn.Module) -> None:
    """Average the population statistics over all processes.

    In distributed training, each process has the statistics of its own minibatches, as with
    `torch.nn.BatchNorm1d`. Call this on all processes before the model is evaluated or saved.
    Layers first refresh their statistics, each from its own inputs. A step that some processes have
    not seen gets the average of those that have. Does nothing with a single process, and skips
    running averages of layers with `sync_stats`, which are the same on all processes.

    Args:
        model: any module that contains batch-normalized recurrent layers.
    """
    statistics, group = _statistics_of(model), all_processes()
    if group is None:
        return
    layers = [m for m in model.modules() if isinstance(m, BatchNormalized)]
    for layer in layers:
        layer.refresh()
    own = {s for layer in layers if layer.refresh_stats for s in layer.children()}
    average([s for s in statistics if s in own or not s.sync], group, spread=True)
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
    """Re-estimate all population statistics of a model at its current parameters.

    Makes one pass over `batches`. Each statistic becomes the plain average of the minibatch
    estimates, which is how the paper obtains its test numbers. Works like
    `torch.optim.swa_utils.update_bn`. Parameters, training mode and the random state do not change.
    Statistics do not change if the pass fails, or in layers that it does not reach.

    In distributed training (`torch.distributed`), all processes must call it, each with its own
    batches. All end up with the same statistics: the average of all estimates. The number of
    batches may differ between processes, except with `sync_stats`, where every minibatch is spread
    over all processes.

    Args:
        model: any module that contains batch-normalized recurrent layers. Does nothing if there
            are none.
        batches: the arguments of `forward`. By default, each batch is one of these: an input of the
            model; a dict or other mapping of arguments by name, such as a Hugging Face
            `BatchEncoding`, from which arguments that the model does not take are dropped; or a
            tuple or list, which starts with as many inputs as the model requires, and may end with
            a target. Its first element may be a mapping or tuple of inputs, as in
            ``({"input": x, "lengths": n}, y)``.
        forward: runs the model on one batch, e.g. ``lambda m, b: m(b.tokens, lengths=b.lengths)``.
            Needed for ``(input, lengths, target)`` if the model's `lengths` is optional.
        device: the default `forward` first moves the tensors of a batch there, at any depth.
        train_mode: True estimates with dropout, zoneout and noise, as in training and as
            `update_bn` does; False without them, as in evaluation. With zoneout and sequences
            that start identical, False leaves the first steps without variance. If the model is in
            training mode, its parts in `eval()`, such as frozen ones, stay in `eval()`: they use
            their statistics and do not change them.
        progress: show a progress bar (needs rich).

    Returns:
        The number of minibatches, summed over all processes.

    Raises:
        ValueError: there are no batches; nothing can be estimated from them, e.g. because each is a
            single sequence; or all layers are frozen.
    """
    if batches is None or isinstance(batches, Tensor):
        kind = "None" if batches is None else "a Tensor"
        raise TypeError(f"batches must be an iterable of inputs, such as a list, got {kind}")
    every = _statistics_of(model)
    statistics = [s for s in every if s.training or not model.training]  # without frozen ones
    if not every:
        return 0
    if not statistics:
        raise ValueError(
            "every batch-normalized layer is frozen: in eval() while the model is in training "
            "mode. Call model.eval(), or train() on the layers, first"
        )
    run = forward or default_forward(device, trained_with_lengths(model))
    modes = {module: module.training for module in model.modules()}
    before = [(s.momentum, s.mean, s.var, s.count, s.cached()) for s in statistics]
    cuda = sorted({s.mean.device.index or 0 for s in statistics if s.mean.is_cuda})
    total, done = 0, False
    with _set_aside_inputs(model) as layers:
        try:
            if not (train_mode and model.training):
                model.train(train_mode)
            for s in statistics:
                s.momentum = None
                with torch.inference_mode(False):  # training needs these buffers, too
                    s.mean, s.var = torch.zeros_like(s.mean), torch.zeros_like(s.var)
                    s.count = torch.zeros_like(s.count)
                    s.rows = s.count[:0]
                s.set_cached(False, 0)
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
            for s in statistics:
                s.drop_few(group)
            if not any(s.find_estimates() for s in statistics):
                raise ValueError(
                    "no batch has two sequences, so no statistics could be estimated: nothing was "
                    "changed"
                )
            for s in statistics:
                if not bool(torch.isfinite(s.mean).all() and torch.isfinite(s.var).all()):
                    raise ValueError(
                        "batches give statistics that are not finite (NaN or infinity in the data "
                        "or the parameters): nothing was changed"
                    )
            done = True
        finally:
            for s, (momentum, mean, var, count, cached) in zip(statistics, before, strict=True):
                s.momentum, s.rows = momentum, None
                if not done or not s.find_estimates():  # no batch reached the layer
                    s.mean, s.var, s.count = mean, var, count
                    s.set_cached(*cached)
                elif count.shape == s.count.shape and not count.is_inference():
                    # Write into the original buffers: others may hold references to them.
                    for old, new in ((mean, s.mean), (var, s.var), (count, s.count)):
                        old.copy_(new)
                    cached = s.cached()
                    s.mean, s.var, s.count = mean, var, count
                    s.set_cached(*cached)
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
