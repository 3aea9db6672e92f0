"""The LSTM on the CPU: plain, batch-normalized or layer-normalized.

The compiled kernel runs the calls that it supports, PyTorch's operators run the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rbn.ops.cpu import compiled_layer_lstm, compiled_lstm, fused_lstm
from rbn.ops.cpu.fused_lstm import Saved
from rbn.ops.cpu.passes import implementation
from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.operator import Results
from rbn.ops.types import compute_dtype


def _fastest(a: LSTMArguments) -> Any:
    for module in (compiled_lstm, compiled_layer_lstm):
        if module.usable(a):
            return module
    return fused_lstm


def fake(a: LSTMArguments) -> Results:
    """Empty tensors with the shapes and dtypes of the results."""
    (T, B), H = a.input.shape[:2], a.weight_hh.shape[1]
    dtype, full = a.input.dtype, compute_dtype(a.input.dtype)

    def new(*shape: int, dtype: torch.dtype = full) -> Tensor:
        return a.input.new_empty(shape, dtype=dtype)

    def kept(features: int, present: bool = True) -> Tensor | None:
        return new(T * B, features) if a.save and present else None

    shapes = LSTM.statistics_shapes(a)
    estimated = [None if shape is None else new(*shape) for shape in shapes for _ in range(2)]
    own_cell = a.mask_c is not None or a.rate_c != 0 or a.pass_normalized_cell or a.include
    saved = Saved(
        wx=None if a.weight_ih is None or not a.save else new(T, B, 4 * H, dtype=dtype),
        output=None,
        **_fake_moments(a, estimated),
        wh=kept(4 * H, a.gamma_h is not None),
        gates=kept(4 * H),
        cand=kept(H),
        cell=kept(H, own_cell),
        tanh_c=kept(H),
        hidden=kept(H, a.lengths is not None or dtype != full),
    )
    states = new(B, H, dtype=dtype), new(B, H, dtype=dtype)
    return Results(new(T, B, H, dtype=dtype), states, tuple(estimated), saved)


def _fake_moments(a: LSTMArguments, estimated: list[Tensor | None]) -> dict[str, Tensor | None]:
    """Mean and rstd of each term as saved; the means are also results."""
    saved: dict[str, Tensor | None] = {}
    T, B = a.input.shape[:2]
    for term, mean in zip(LSTM.terms, estimated[::2], strict=True):
        if a.norm == "layer":
            mean = a.input.new_empty(T * B, 1, dtype=compute_dtype(a.input.dtype))
        saved[f"mean_{term}"] = mean
        saved[f"rstd_{term}"] = None if mean is None else torch.empty_like(mean)
    return saved


IMPLEMENTATION = implementation(Saved, _fastest, fake, compiled_lstm.takes_input)
