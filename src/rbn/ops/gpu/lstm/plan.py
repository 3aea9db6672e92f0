"""The launch plan: everything that depends only on shapes, dtypes and options. Cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rbn.ops.definition import LSTM, VECTORS, LSTMArguments
from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.constant_terms import raises_in_kernel
from rbn.ops.gpu.lstm.cuda_kernels import CLUSTER
from rbn.ops.gpu.lstm.term import Term
from rbn.ops.gpu.lstm.workspace import (
    FAR,
    laid_out,
    saved_sizes,
    statistics_layout,
    stride_of,
    vector_size,
)
from rbn.ops.gpu.runtime import triton_functions

NONE, BATCH, GIVEN = (
    mode.value for mode in (triton_functions.NONE, triton_functions.BATCH, triton_functions.GIVEN)
)
STEPS = "a product and a kernel for each step"
_MOST = 256  # entries in the cache, at most
_TENSORS, _GRADIENTS = len(LSTM.tensors), len(LSTM.gradients)


class Plan:
    """The kernels of a call and their memory layout. Holds no tensors.

    Attributes:
        term: shape, dtype and device of the input term, which determine the kernels.
        family: the family of CUDA C++ kernels that runs: cluster, grid or portable. None if the
            call runs step by step.
        sizes: ``(lead, R, T, B, H)``; lead is ``(R,)`` for recurrences side by side, else ``()``.
        one_feature: whether the kernels take an input of one feature and W_x instead of the input
            term.
        x: which statistics the kernels normalize the input term with.
        flags: which statistics each term is normalized with, for the Triton kernels.
        zoned, sequence, include, joint: as in `LSTMArguments`.
        moments: the layout of the statistics in the workspace; see `statistics_layout`.
        saved: see `saved_sizes`.
        lockstep: whether all rows are in the same step at any time of the backward pass.

    For the CUDA C++ kernels also, as dicts by direction if the directions differ:
        tilings: how the work is divided among blocks and warps.
        stride: elements from one row of h to the next.
        polls: whether the blocks poll their exchange buffer, which must be filled with EMPTY.
        zeroed: see `cuda_kernels.zeroed`.
        cell: float32 elements for the last cells, a multiple of 4; 0 if the call runs step by step.
        clear: 4-byte elements that must be zero before the forward pass; 0 likewise.
        vectors: float32 elements for the parameters `VECTORS`; 0 likewise.
        places: the parts of the workspace that the forward kernel gets, and their byte offsets.
        kept: the same for the backward kernel.
        scratch: the layout of the backward pass's `Scratch`.
        raises: whether the launch that prepares the backward pass raises variances.
        sums: float32 elements of the gradients of `VECTORS` (and of W_x with one feature).
        finish: the dtype of these gradients and those of the initial states, if it is the same
            for all and all rows share the initial states; else None.
        by_unit: whether the columns of d(W_h h) are ordered unit by unit, not gate by gate.
        transposes: whether the backward kernel takes W_h transposed.
        launches: see `cuda_kernels.launch_for`.
    """

    def __init__(self, a: LSTMArguments, term: Term, one_feature: bool, family: str | None) -> None:
        *lead, T, B, G = term.shape
        R, H = lead[0] if lead else 1, G // 4
        self.term, self.family = term, family
        self.sizes = tuple(lead), R, T, B, H
        self.one_feature = one_feature
        self.zoned, self.sequence, self.include, self.joint = (
            a.zoned,
            a.sequence,
            a.include,
            a.joint,
        )
        mode = GIVEN if a.population else BATCH
        normalized = a.norm == "batch"
        # The kernels treat sequencewise statistics like any other given statistics.
        given = a.sequence and not one_feature
        self.x = NONE if not normalized or a.joint else GIVEN if given else mode
        self.flags: dict[str, int] = {
            "X": self.x,
            "NORM": mode if normalized else NONE,
            "CELL": mode if normalized and a.gamma_c is not None else NONE,
        }
        self.saved = saved_sizes(term.shape, a.save)
        self.cell = self.clear = self.vectors = 0
        self.lockstep, self.by_unit = True, False
        if family is not None:
            self._add_cuda(a, family)
        self.ahead = self.cell + self.clear + self.vectors
        self.moments = statistics_layout(LSTM.statistics_shapes(a, *lead), self.ahead)
        if family is not None:
            self.kept += self.moments.at
            self.places += self.kept
            self._add_backward(a)

    def _add_cuda(self, a: LSTMArguments, family: str) -> None:
        _, R, _, B, H = self.sizes
        # Rows that the kernels read start at multiples of 16 bytes.
        self.stride = H if family == CLUSTER else stride_of(H)
        both = "forward", "backward"
        self.tilings = {d: cuda_kernels.tiling_of(d, self.term, family) for d in both}
        self.polls = {d: cuda_kernels.polls(tiling) for d, tiling in self.tilings.items()}
        self.zeroed = {d: cuda_kernels.zeroed(tiling, R) for d, tiling in self.tilings.items()}
        # The splits of a batch synchronize only for sums over the batch.
        splits = getattr(self.tilings["backward"], "splits", 1)
        self.lockstep = splits == 1 or self.flags["NORM"] == BATCH
        self.cell = -(-R * B * H // 4) * 4
        self.clear = sum(self.zeroed["forward"].values()) // 4
        zeros = laid_out(self.zeroed["forward"], 4 * self.cell)
        # c0 and c_n share a buffer: only the thread that owns a cell reads and writes it.
        self.places = [("c_n", 0), ("c0", 0), *zeros.items()]
        present = [name for name in VECTORS if getattr(a, name) is not None]
        sizes = {name: 4 * vector_size(R * getattr(a, name).shape[-1]) for name in present}
        self.vectors = sum(sizes.values()) // 4
        self.kept = [*laid_out(sizes, 4 * (self.cell + self.clear)).items()]
        self.defines = {
            doutput: cuda_kernels.defines(a, self.flags, H, self.one_feature, doutput)
            for doutput in (False, True)
        }
        self.launches: dict[tuple[str, bool], Any] = {}

    @property
    def path(self) -> str:
        """Which kernels run, for the log."""
        return self.family or STEPS

    def _add_backward(self, a: LSTMArguments) -> None:
        _, R, T, B, H = self.sizes
        self.transposes = self.family != cuda_kernels.GRID
        self.by_unit = self.family == CLUSTER and a.norm != "none"
        vectors = [getattr(a, name) for name in VECTORS]
        given = [*vectors, a.h0, a.c0, *([a.weight_ih] if self.one_feature else [])]
        dtypes = {tensor.dtype for tensor in given if tensor is not None}
        shared = a.h0.dim() == a.c0.dim() == 1
        self.finish = next(iter(dtypes)) if shared and len(dtypes) == 1 else None
        self.raises = a.batch_stats and not a.sequence and raises_in_kernel(T, B, 4 * H)
        states, raised, n = 4 * vector_size(R * B * H), R * T * self.raises, 4 * R * H
        # Padding between results and counters, so that they share no cache line.
        sizes = {"dh": states, "dc": states, "apart": 4 * FAR, "zeroed": 0}
        sizes |= self.zeroed["backward"] | {"sums": 4 * FAR}
        self.sums = {"dbias": n, "dgamma_x": n, "dgamma_h": n}
        self.sums |= dict.fromkeys(("dgamma_c", "dbeta_c"), vector_size(R * H))
        if self.one_feature:
            self.sums["dwx"] = n
        sizes |= {name: 4 * size for name, size in self.sums.items()}
        sizes |= {"var_h": 16 * raised * H, "var_c": 4 * vector_size(raised * H)}
        transposed = self.transposes * R * 4 * H * H * self.term.dtype.itemsize
        sizes |= {"weight": max(16, transposed), "end": 0}
        self.scratch = laid_out(sizes, 0)


def plan_for(calls: Sequence[LSTMArguments], separate: bool) -> Plan:
    """The launch plan of one call, or of several side by side.

    separate: for custom operators. No two results share memory, and the input term is always
    computed, because the backward pass, a separate operator, could not know whether it was.
    """
    a, count = calls[0], len(calls)
    may_skip_term = a.input.shape[-1] == 1 and not separate and all(map(_has_one_feature, calls))
    tensors: Sequence[Any] = a[:_TENSORS]
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
    like = a.input.shape, a.weight_hh.shape, a.h0.dim(), a.c0.dim(), a.input.device
    key = (count, *like, dtypes, a[_TENSORS:], may_skip_term)
    plan: Plan = once(key, lambda: _new_plan(a, count, may_skip_term))
    return plan


def _new_plan(a: LSTMArguments, count: int, may_skip_term: bool) -> Plan:
    term = term_of(a, count)
    family = cuda_kernels.family(term, a)
    one_feature = (
        may_skip_term
        and family is not None
        and not a.zoned
        # With padding excluded, late steps are normalized with constants (`rbn.ops.few_rows`),
        # which `feature_moments` does not support.
        and (a.sequence or not a.exclude)
        and (a.norm == "none" or (a.gamma_x is not None and a.gamma_c is not None))
        and cluster_kernels.choose(term) is not None
    )
    plan = Plan(a, term, one_feature, family)
    if family is not None and term.is_cuda:  # tests run these kernels on the CPU
        cuda_kernels.compile_ahead(plan, backward=a.save)
    return plan


def term_of(a: LSTMArguments, count: int) -> Term:
    """Shape, dtype and device of the input term of `count` calls."""
    T, B = a.input.shape[:2]
    lead = (count,) if count > 1 else ()
    return Term((*lead, T, B, 4 * a.weight_hh.shape[1]), a.input.dtype, a.input.device)


def _has_one_feature(a: LSTMArguments) -> bool:
    """Whether kernels may read the input directly: one feature, and it needs no gradient."""
    return (
        a.weight_ih is not None
        and a.input.shape[-1] == 1
        and a.input.dtype in cluster_kernels.ONE_FEATURE
        and not (a.save and a.input.requires_grad)
    )


def joins(calls: Sequence[LSTMArguments]) -> bool:
    """Whether several calls fit on the GPU at once, with the same kernels as a single call."""
    a, count = calls[0], len(calls)
    if count > 2 and a.weight_ih is not None:  # `Saved` has fields for the factors of two
        return False
    key = ("joins", count, a.input.shape[:2], a.weight_hh.shape, a.input.dtype, a.input.device)
    options = a.tf32, a.norm, a.joint, a.zoned, a.include, a.pass_normalized_cell
    return all(_same_shapes(a, other) for other in calls[1:]) and bool(
        once((*key, *options), lambda: _fits_side_by_side(a, count))
    )


def _fits_side_by_side(a: LSTMArguments, count: int) -> bool:
    if a.input.dtype == torch.float64 or a.norm == "layer":
        return False
    family = cuda_kernels.family(term_of(a, 1), a)
    return family is not None and cuda_kernels.family(term_of(a, count), a) == family


def _same_shapes(a: LSTMArguments, other: LSTMArguments) -> bool:
    """Whether two calls differ only in the values of their tensors."""
    if a.lengths is not other.lengths or a[_TENSORS:] != other[_TENSORS:]:
        return False
    one: Any
    two: Any
    for one, two in zip(a[:_TENSORS], other[:_TENSORS], strict=True):
        if one is None or two is None:
            if one is not two:
                return False
        elif one.shape != two.shape or one.dtype != two.dtype or one.device != two.device:
            return False
    return True


def once(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Returns `make()`, cached by `key`, which must determine the result."""
    value = _CACHE.get(key)
    if value is None:
        if len(_CACHE) >= _MOST:  # probably filled by layers that no longer exist
            _CACHE.clear()
        value = _CACHE[key] = make()
    return value


_CACHE: dict[tuple[Any, ...], Any] = {}  # tests that change the choice of kernels replace it
