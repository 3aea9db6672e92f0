"""Cached population statistics of single time steps, for cells in `eval()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rbn.nn.recent_calls import version
from rbn.nn.statistics import PopulationStatistics
from rbn.ops.cpu.inference import Row

if TYPE_CHECKING:
    from rbn.nn.batch_normalized import BatchNormalized


class _Term(NamedTuple):
    """One term's statistics."""

    statistics: PopulationStatistics
    seen: int  # the first `seen` steps have their own row in mean and var
    copies: list[tuple[Tensor, Tensor]]  # a copy of mean and var, for steps with gradients


class _Cached(NamedTuple):
    """A cell's statistics. Valid until one of its buffers or parameters is replaced or modified.

    tensors: for each buffer and parameter, its module's dictionary, its name there, the tensor and
        its version.
    rows: the rows to use, by step and by whether gradients are enabled.
    """

    tensors: list[tuple[dict[str, Any], str, Tensor, int]]
    terms: list[_Term | None]
    steps: int  # all later steps have the rows of step `steps - 1`
    rows: dict[tuple[int, bool], list[Row | None]]


_cache: WeakKeyDictionary[BatchNormalized, _Cached] = WeakKeyDictionary()


def step_rows(cell: BatchNormalized, step: int, x: Tensor) -> list[Row | None] | None:
    """The statistics for each of the cell's terms at one step with input x ``[B, I]``.

    The buffers are read again only after buffers or parameters were replaced or modified. With
    gradients enabled, rows point to a copy that is made once and never changes.

    Returns:
        A row for each of ``cell.terms``, None for a term that is not normalized. Returns None
        instead of the list if the cell uses minibatch statistics, has no statistics, or has them in
        another dtype than x.
    """
    cached = _cache.get(cell)
    if cached is None or not _is_current(cell, cached):
        _cache.pop(cell, None)
        terms = _terms(cell, x.dtype)
        if terms is None:
            return None
        cached = _cached(cell, terms)
        if all(version(tensor) >= 0 for _, _, tensor, _ in cached.tensors):
            _cache[cell] = cached
    key = (min(step, cached.steps - 1), torch.is_grad_enabled())
    rows = cached.rows.get(key)
    if rows is None:
        rows = [None if term is None else _row(term, step) for term in cached.terms]
        cached.rows[key] = rows
    return rows


def _terms(cell: BatchNormalized, dtype: torch.dtype) -> list[_Term | None] | None:
    """Refreshed statistics of the cell's terms; None if `step_rows` must return None."""
    every = cell._all_statistics()
    if any(statistics.uses_batch for statistics in every):
        return None
    cell.refresh_once()
    if not all(statistics.find_estimates() for statistics in every):
        return None
    results = [cell._modules.get(f"stats_{name}") for name in cell.terms]
    terms = [_term(s) if isinstance(s, PopulationStatistics) else None for s in results]
    for term in terms:  # without version counters, nothing can be cached
        if term is not None:
            statistics = term.statistics
            buffers = (statistics.mean, statistics.var, statistics.count)
            if statistics.mean.dtype != dtype or any(b.is_inference() for b in buffers):
                return None
    return terms


def _cached(cell: BatchNormalized, terms: list[_Term | None]) -> _Cached:
    owners: list[dict[str, Any]] = [module._parameters for module in cell.modules()]
    owners += [term.statistics._buffers for term in terms if term is not None]
    tensors = [
        (owner, name, tensor, version(tensor))
        for owner in owners
        for name, tensor in owner.items()
        if tensor is not None
    ]
    steps = max(term.statistics.count.shape[0] for term in terms if term is not None)
    return _Cached(tensors, terms, steps, {})


def _is_current(cell: BatchNormalized, cached: _Cached) -> bool:
    calls = cell.recent_calls
    if calls.new_rows > 0 or (cell._check_norms and calls.norms):
        return False
    for owner, name, tensor, at in cached.tensors:
        if owner.get(name) is not tensor or tensor._version != at:
            return False
    return not any(term is not None and term.statistics.uses_batch for term in cached.terms)


def _term(statistics: PopulationStatistics) -> _Term:
    contiguous = statistics.mean.is_contiguous() and statistics.var.is_contiguous()
    return _Term(
        statistics, statistics.known_steps if contiguous and not statistics.shared else 0, []
    )


def _row(term: _Term, step: int) -> Row:
    statistics = term.statistics
    mean, var, count = statistics.mean, statistics.var, statistics.count
    step = 0 if statistics.shared else min(step, count.shape[0] - 1)
    if step < term.seen:
        if torch.is_grad_enabled():  # a backward pass needs them unchanged
            if not term.copies:
                with torch.inference_mode(False):
                    term.copies.append((mean.clone(), var.clone()))
            mean, var = term.copies[0]
        return Row(mean, var, step)
    with torch.inference_mode(False), torch.no_grad():
        mean, var = statistics.read(step, 1)
        return Row(mean.contiguous(), var.contiguous(), 0)
