"""Lengths in the kernels' format, and the number of rows of each step."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rbn.ops.gpu.runtime.device import power_of_two
from rbn.ops.gpu.runtime.launch_cache import launch_by_key


@triton.jit(do_not_specialize=["B"])
def count_rows(
    lengths,  # [B] integers
    short,  # [B] int32
    inv_n,  # [T] float32
    B,
    fewest,
    ROWS: tl.constexpr,
):
    """Write the lengths as int32, and 1 / unpadded rows of each step; 0 for fewer than `fewest`."""
    t = tl.program_id(0)
    n = tl.zeros((), tl.float32)
    for first in range(0, B, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = rows < B
        length = tl.load(lengths + rows, mask=inside, other=0).to(tl.int32)
        if t == 0:
            tl.store(short + rows, length, mask=inside)
        n += tl.sum((inside & (t < length)).to(tl.float32), 0)
    tl.store(inv_n + t, tl.where(n >= fewest, tl.div_rn(1.0, tl.maximum(n, 1.0)), 0.0))


def row_counts(lengths: Tensor, steps: int, like: Tensor, fewest: int = 1) -> tuple[Tensor, Tensor]:
    """The lengths ``[B]`` in int32 and 1 / unpadded rows of each step, float32 ``[T]``; one launch.

    Steps with too few rows for their own statistics have 0: the kernels then use constants, see
    `rbn.ops.few_rows`.

    like: a tensor on the device of the results. fewest: how many rows a step needs.
    """
    if lengths.device != like.device:
        lengths = lengths.to(like.device)
    lengths, (batch,) = lengths.contiguous(), lengths.shape
    begin = -(-batch // 4) * 4  # aligned to 16 bytes
    memory = torch.empty(begin + steps, dtype=torch.float32, device=like.device)
    short = memory.view(torch.int32)[:batch]
    inv_n = memory[begin:]

    def arguments() -> Any:
        return (
            (steps, 1),
            (lengths, short, inv_n),
            (batch, fewest),
            {"ROWS": min(1024, power_of_two(batch))},
        )

    addresses = lengths.data_ptr(), memory.data_ptr(), memory.data_ptr() + 4 * begin
    launch_by_key(count_rows, (batch, steps, fewest, lengths.dtype), addresses, arguments, like)
    return short, inv_n
