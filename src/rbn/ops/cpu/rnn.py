"""The batch-normalized simple RNN and GRU on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.cpu import fused_rnn
from rbn.ops.cpu.fused_rnn import Saved
from rbn.ops.cpu.passes import implementation
from rbn.ops.definition import RNNArguments
from rbn.ops.operator import Results
from rbn.ops.types import compute_dtype


def fake(a: RNNArguments) -> Results:
    """Empty tensors with the shapes and dtypes of the results."""
    (T, B), (G, H) = a.input.shape[:2], a.weight_hh.shape
    dtype, full = a.input.dtype, compute_dtype(a.input.dtype)

    def new(*shape: int, dtype: torch.dtype = full) -> Tensor:
        return a.input.new_empty(shape, dtype=dtype)

    def kept(features: int, present: bool = True) -> Tensor | None:
        return new(T * B, features) if a.save and present else None

    zoned = a.mask_h is not None or a.rate_h != 0
    shapes = a.definition.statistics_shapes(a)
    moments = [None if shape is None else new(*shape) for shape in shapes for _ in range(2)]
    saved = Saved(
        wx=None if a.weight_ih is None or not a.save else new(T, B, G, dtype=dtype),
        output=None,
        mean_x=moments[0],
        rstd_x=None if moments[1] is None else torch.empty_like(moments[1]),
        mean_h=moments[2],
        rstd_h=None if moments[3] is None else torch.empty_like(moments[3]),
        wh=kept(G),
        phi=kept(4 * H if a.gated else H, a.gated or zoned or a.include),
        hidden=kept(H, a.lengths is not None or dtype != full),
    )
    return Results(new(T, B, H, dtype=dtype), (new(B, H, dtype=dtype),), tuple(moments), saved)


IMPLEMENTATION = implementation(Saved, lambda a: fused_rnn, fake)
