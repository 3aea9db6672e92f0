"""The arguments of the LSTM's kernels: tensors and their addresses, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.plan import BATCH, Plan
from rbn.ops.gpu.row_counts import row_counts
from rbn.ops.gpu.stepwise import zone
from rbn.ops.types import valid_steps


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if its address is not a multiple of 16.

    Kernels, including cuBLAS's, read unaligned data in other chunks and might sum in another order.
    """
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


class LSTMCall:
    """Sizes, modes and tensors, in the form that the kernels take.

    Attributes:
        a: the operator's arguments; `input` is the input term, and tensors of several calls are
            stacked. With `plan.one_feature`, `input` is the feature, expanded to the term's shape.
        term: the input term, contiguous, in its original shape.
        w: W_x for inputs of one feature, ``[R, 4H, 1]``; else None.
        kept: tensors whose addresses are passed to kernels; keeps them alive.
    """

    def __init__(self, a: LSTMArguments, plan: Plan, w: Tensor | None = None) -> None:
        self.a, self.plan, self.w = a, plan, w
        self.term = aligned(a.input.contiguous()) if w is None else a.input
        self.lead, self.R, self.T, self.B, self.H = plan.sizes
        self.x = plan.x
        self.kept: list[Tensor] = []
        self.factors: list[tuple[Tensor, Tensor]] = []  # of the computed input terms
        self.vectors_of_all: Tensor | None = None  # the parameters `VECTORS` of several calls

    @functools.cached_property
    def wx(self) -> Tensor:
        """The input term, always with four dimensions, ``[R, T, B, 4H]``."""
        return self.term if self.lead else self.term[None]

    @functools.cached_property
    def empty(self) -> Tensor:
        """A placeholder for a tensor that a kernel does not read."""
        return self.term.new_empty(1, dtype=torch.float32)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """The length of each row, int32 ``[B]``; a placeholder if the call has no lengths."""
        return self._counts[0]

    @functools.cached_property
    def valid(self) -> Tensor | None:
        """Which positions are not padding, bool ``[T, B]``; None if the call has no lengths."""
        return None if self.a.lengths is None else valid_steps(self.lengths, self.T)

    @functools.cached_property
    def inv_n(self) -> Tensor:
        """See `row_counts`; a placeholder if the call has no lengths."""
        return self._counts[1]

    @property
    def given_lengths(self) -> Tensor | None:
        """`lengths`, or None if the call has none."""
        return None if self.a.lengths is None else self.lengths

    @functools.cached_property
    def _counts(self) -> tuple[Tensor, Tensor]:
        if self.a.lengths is None:
            return self.empty, self.empty
        return row_counts(self.a.lengths, self.T, self.term, self.a.fewest)

    def shared(self, state: Tensor) -> bool:
        """Whether all rows share this initial state."""
        return state.dim() == len(self.lead) + 1

    def in_rows(self, state: Tensor) -> Tensor:
        """An initial state, expanded to ``[..., B, H]``."""
        if not self.shared(state):
            return state
        if self.lead:
            state = state.unsqueeze(-2)
        return state.expand(*self.lead, self.B, self.H)

    def full(self, value: Tensor | None) -> Tensor:
        """A contiguous float32 version; a placeholder for None."""
        if value is None:
            return self.empty
        if value.dtype == torch.float32:
            return value.contiguous()
        return value.to(torch.float32, memory_format=torch.contiguous_format)

    def vectors(self) -> list[Tensor]:
        """The parameters `VECTORS` in float32."""
        return [self.full(v) for v in self.given_vectors()]

    def given_vectors(self) -> tuple[Tensor | None, ...]:
        """The parameters `VECTORS`."""
        a = self.a
        return a.bias, a.gamma_x, a.gamma_h, a.gamma_c, a.beta_c

    def weight(self) -> Tensor:
        """W_h, contiguous and in the term's dtype."""
        weight, dtype = self.a.weight_hh, self.term.dtype
        return (weight if weight.dtype == dtype else weight.to(dtype)).contiguous()

    def population(self) -> list[Tensor | None]:
        """The given mean and var of the terms x, h and c in float32; None for absent ones."""
        a = self.a
        given = (a.mean_x, a.var_x, a.mean_h, a.var_h, a.mean_c, a.var_c)
        full = torch.float32
        return [
            v if v is None or (v.dtype == full and v.is_contiguous()) else self.full(v)
            for v in given
        ]

    def masks(self) -> list[Tensor]:
        """Zoneout masks as bytes."""
        return [
            self.empty if m is None else m.contiguous().view(torch.uint8)
            for m in (self.a.mask_c, self.a.mask_h)
        ]

    # For the CUDA C++ kernels, which take addresses.

    def address(self, tensor: Tensor) -> int:
        """The address of an argument. Keeps the tensor alive as long as this object.

        Copies a tensor that is not aligned to 16 bytes: kernels read 16 bytes at once.
        """
        at = tensor.data_ptr()
        if at % 16:
            tensor = tensor.clone()
            at = tensor.data_ptr()
        self.kept.append(tensor)
        return at

    def addresses(self, weight: Tensor) -> dict[str, int]:
        """The addresses of arguments by struct member; absent tensors have no entry."""
        results = {"weight": self.address(weight)}
        if self.w is None:
            results["wx"] = self.address(self.term)
        else:
            results["w"] = self.address(self.full(self.w))
        if self.a.lengths is not None:
            results["lengths"], results["inv_n"] = map(self.address, (self.lengths, self.inv_n))
        if self.plan.zoned:
            for name, mask in (("mask_c", self.a.mask_c), ("mask_h", self.a.mask_h)):
                if mask is not None:
                    results[name] = self.address(mask.contiguous())
        return results

    @functools.cached_property
    def input_rows(self) -> int:
        """Elements per step of inputs of one feature, including padding rows."""
        tiling: cluster_kernels.ClusterTiling = self.plan.tilings["forward"]
        return tiling.rows

    def inputs_at(self, inputs: Tensor) -> dict[str, int]:
        """The addresses of inputs of one feature, and of the variances that follow them."""
        at = inputs.data_ptr()
        behind = at + 4 * self.R * self.T * self.input_rows
        return {"wx": at, "var_x": behind} if self.x == BATCH else {"wx": at}

    def moments_at(self, moments: Sequence[Tensor | None]) -> dict[str, int]:
        """The addresses of the statistics that exist, by name."""
        pairs = zip(LSTM.moments, moments, strict=True)
        return {name: self.address(m) for name, m in pairs if m is not None}

    def options(self) -> dict[str, Any]:
        """Compile-time options of every Triton kernel of the LSTM, besides `flags`."""
        a = self.a
        return {
            "H": self.H,
            "JOINT": self.plan.joint,
            "PASS": a.pass_normalized_cell,
            "HAS_BIAS": a.bias is not None,
            "HAS_BETA": a.beta_c is not None,
            "LENGTHS": a.lengths is not None,
            "INCLUDE": self.plan.include,
            "ZONE_C": zone(a.mask_c, a.rate_c),
            "ZONE_H": zone(a.mask_h, a.rate_h),
            "FUSED": self.term.is_cuda,
        }


def rows_of(moments: Sequence[Tensor | None]) -> list[int]:
    """The number of rows of the statistics of x, h and c; 0 for absent ones."""
    return [0 if m is None else m.shape[-2] for m in moments[0::2]]
