"""What the GPU's LSTM takes, gives and keeps."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from torch import Tensor

MOMENTS = ("mean_x", "var_x", "mean_h", "var_h", "mean_c", "var_c")


class Inputs(NamedTuple):
    """The arguments of the operator, in its order, all with a leading dimension R or all without.

    See `rbn.ops.bn_lstm` for their meaning; lengths ``[B]`` are shared. States that are the same in
    all rows may come without the dimension of those.
    """

    wx: Tensor
    weight_hh: Tensor
    bias: Tensor | None
    gamma_x: Tensor | None
    gamma_h: Tensor | None
    gamma_c: Tensor | None
    beta_c: Tensor | None
    h0: Tensor
    c0: Tensor
    lengths: Tensor | None
    population: list[Tensor]  # mean, var of x, h, c [R, S, F]; empty for absent terms; [] = batch
    mask_c: Tensor | None
    mask_h: Tensor | None
    rate_c: float
    rate_h: float
    norm: str  # "none" or "batch"
    eps: float
    input_stats: str
    padding: str
    pass_normalized_cell: bool
    save: bool
    tf32: bool  # whether products of float32 may be, backward as forward

    @property
    def lead(self) -> tuple[int, ...]:
        """``(R,)``, or nothing for one recurrence without the leading dimension."""
        return tuple(self.wx.shape[:-3])

    @property
    def joint(self) -> bool:
        """Whether the input and the recurrent term are normalized as one."""
        return self.norm != "none" and self.gamma_x is None

    @property
    def sequence(self) -> bool:
        """Whether the input term's statistics are those of all steps together."""
        batch = self.norm == "batch" and not self.population
        return batch and not self.joint and self.input_stats == "sequence"

    @property
    def zoned(self) -> bool:
        """Whether units keep their value."""
        masked = self.mask_c is not None or self.mask_h is not None
        return masked or bool(self.rate_c or self.rate_h)

    @property
    def include(self) -> bool:
        """Whether padded rows count in the statistics."""
        batch = self.norm == "batch" and not self.population
        return batch and self.lengths is not None and self.padding == "include"


class Outputs(NamedTuple):
    """The results of the operator: three for the user, then statistics, then what is saved.

    What there is not is empty, or None where no operator asks for a tensor.
    """

    output: Tensor  # [R, T, B, H]
    h_n: Tensor  # [R, B, H]
    c_n: Tensor  # [R, B, H]
    mean_x: Tensor  # [R, T, 4H], or [R, 1, 4H] for sequencewise statistics
    var_x: Tensor
    mean_h: Tensor
    var_h: Tensor
    mean_c: Tensor
    var_c: Tensor
    # For the kernels' own use, in the order of whichever ran:
    wh: Tensor  # W_h h less its mean; without a norm the gates before their nonlinearities
    cs: Tensor  # cells in float32
    hidden: Tensor  # h0 and h after each step [R, T + 1, B, H]; empty where that is no more than
    # h0 and the output, and those do not lie in one piece


class Grads(NamedTuple):
    """The gradients of the operator's differentiable inputs; None, or empty, for absent ones."""

    wx: Tensor
    weight_hh: Tensor
    bias: Tensor
    gamma_x: Tensor
    gamma_h: Tensor
    gamma_c: Tensor
    beta_c: Tensor
    h0: Tensor
    c0: Tensor


def _sizes(shape: tuple[int, ...], save: bool) -> tuple[int, int, int]:
    """`saved_cells`, `saved_products`, `beyond_products` for an input term of that shape."""
    *lead, T, B, G = shape
    R, rows, stride = math.prod(lead), saved_rows(B), stride_of(G // 4)
    cells = R * (T + 1 if save else 1) * rows * stride
    if not save:
        return cells, 0, 0
    return cells, R * T * rows * 4 * stride, B * G + 8 if R == 1 else 0


saved_sizes = functools.lru_cache(maxsize=256)(_sizes)  # of real sizes, not a compiler's


def statistics_shapes(a: Inputs) -> list[tuple[int, ...]]:
    """The shapes of mean and var of the terms x, h and c, ``(0,)`` where there is none."""
    T, _, G = a.wx.shape[-3:]
    if a.norm == "none" or a.population:
        return [(0,)] * 3
    return [
        (0,) if a.joint else (*a.lead, 1 if a.sequence else T, G),
        (*a.lead, T, G),
        (0,) if a.gamma_c is None else (*a.lead, T, G // 4),
    ]


class Cuts(NamedTuple):
    """Means and variances of the terms x, h and c in one piece."""

    rows: list[int]  # of each term
    parts: list[Any]  # shape, strides and beginning of each, None for absent ones
    at: list[tuple[str, int]]  # the names of those that there are, and the bytes before them
    size: int


def statistics_cuts(a: Inputs, begin: int = 0) -> Cuts:
    """How statistics lie in one piece, behind so many numbers; each at a multiple of 16 bytes."""
    shapes = statistics_shapes(a)
    parts: list[Any] = []
    for shape in shapes:
        strides = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        for _ in range(2):
            parts.append(None if 0 in shape else (shape, strides, begin))
            begin += -(-math.prod(shape) // 4) * 4
    rows = [shape[-2] if len(shape) > 1 else 0 for shape in shapes]
    at = [(name, 4 * cut[2]) for name, cut in zip(MOMENTS, parts, strict=True) if cut]
    return Cuts(rows, parts, at, begin)


def stride_of(hidden: int) -> int:
    """Elements from one row of h to the next: rows begin at multiples of 16 bytes."""
    return -(-hidden // 8) * 8


def saved_rows(batch: int) -> int:
    """Rows of what is saved: an even number, since some kernels keep them in pairs."""
    return batch + batch % 2


def saved_cells(a: Inputs) -> int:
    """How many numbers the cells take that a call keeps, or works with."""
    return _sizes(a.wx.shape, a.save)[0]


def saved_products(a: Inputs) -> int:
    """How many numbers a call keeps of W_h h."""
    return _sizes(a.wx.shape, a.save)[1]


def beyond_products(a: Inputs) -> int:
    """How many more there is room for, that d(W_h h) can take the same, see `gradients`."""
    return _sizes(a.wx.shape, a.save)[2]


def steps_of(room: Tensor, hidden: int) -> Tensor:
    """The states after each step ``[..., T, B, H]`` in a room ``[..., T + 1, B, stride]``."""
    *lead, steps, batch, stride = room.shape
    begin = room.storage_offset() + batch * stride
    return room.as_strided((*lead, steps - 1, batch, hidden), room.stride(), begin)
