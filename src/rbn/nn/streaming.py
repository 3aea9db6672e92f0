"""Cached population statistics of single time steps, for cells in `eval()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rbn.nn.recent_calls import version
from rbn.nn.statistics import PopulationStatistics
from rbn.ops.cpu.inference import Row

if TYPE_CHECKING:
    from rbn.nn.batch_normalized import BatchNormalized


class _Term(NamedTuple):
    """Cache entry for one term's statistics, valid for these buffers in these versions."""

    statistics: PopulationStatistics
    buffers: tuple[Tensor, Tensor, Tensor]  # mean, var, count
    versions: tuple[int, int, int]
    seen: int  # the first `seen` steps have their own row in mean and var
    rows: dict[int, Row]  # rows of other steps, by step
    copies: list[tuple[Tensor, Tensor]]  # a copy of mean and var, for steps with gradients


_cache: WeakKeyDictionary[BatchNormalized, list[_Term | None]] = WeakKeyDictionary()


def step_rows(cell: BatchNormalized, step: int, x: Tensor) -> list[Row | None] | None:
    """The statistics for each of the cell's terms at one step with input x ``[B, I]``.

    The buffers are read again only after they were replaced or modified. With gradients enabled,
    rows point to a copy, which is made once and never changes.

    Returns:
        A row for each of ``cell.terms``, None for a term that is not normalized. Returns None
        instead of the list if the cell uses minibatch statistics, has no statistics, or has them in
        another dtype than x.
    """
    terms = _cache.get(cell)
    if (
        terms is None
        or cell.may_be_stale
        or not all(term is None or _is_current(term) for term in terms)
    ):
        _cache.pop(cell, None)
        terms = _terms(cell, x.dtype)
        if terms is None:
            return None
        _cache[cell] = terms
    return [None if term is None else _row(term, step) for term in terms]


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
    for term in terms:  # without version counters nothing can be cached
        if term is not None and (-1 in term.versions or term.buffers[0].dtype != dtype):
            return None
    return terms


def _is_current(term: _Term) -> bool:
    statistics, (mean, var, count), (of_mean, of_var, of_count), *_ = term
    buffers = statistics._buffers  # several times as fast as attribute access
    return (
        count is buffers["count"]
        and mean is buffers["mean"]
        and var is buffers["var"]
        and count._version == of_count
        and mean._version == of_mean
        and var._version == of_var
        and not statistics.uses_batch
    )


def _term(statistics: PopulationStatistics) -> _Term:
    buffers = (statistics.mean, statistics.var, statistics.count)
    contiguous = buffers[0].is_contiguous() and buffers[1].is_contiguous()
    seen = statistics.surely_seen if contiguous and not statistics.shared else 0
    mean, var, count = (version(buffer) for buffer in buffers)
    return _Term(statistics, buffers, (mean, var, count), seen, {}, [])


def _row(term: _Term, step: int) -> Row:
    mean, var, count = term.buffers
    step = 0 if term.statistics.shared else min(step, count.shape[0] - 1)
    if step < term.seen:
        if torch.is_grad_enabled():  # a backward pass needs them unchanged
            if not term.copies:
                with torch.inference_mode(False):
                    term.copies.append((mean.clone(), var.clone()))
            mean, var = term.copies[0]
        return Row(mean, var, step)
    row = term.rows.get(step)
    if row is None:
        with torch.inference_mode(False), torch.no_grad():
            mean, var = term.statistics.read(step, 1)
            row = Row(mean.contiguous(), var.contiguous(), 0)
        term.rows[step] = row
    return row
