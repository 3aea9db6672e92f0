"""LSTM inference with the compiled kernel, which saves nothing for a backward pass.

Supports float32 on the CPU. Any number of steps of a single sequence is one call of the kernel. On
x86 with AVX2 that holds for any batch size, and from `_FUSED` rows on the call includes the input
term. Elsewhere PyTorch multiplies by W_h and the kernel does the rest of each step.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rbn.ops.cpu import compiled_lstm, memory

_PER_THREAD = 1 << 17  # multiplications per step that justify another thread
_FUSED = 32  # rows from which each step computes its own input term
_COPIES = 16  # steps for which a copy of W_h in another layout saves more than it costs
# The struct Inference of kernel.c, packed as bytes: filling a ctypes.Structure takes three times
# as long.
_STRUCT = struct.Struct("=10q3d21Q")
_CELL = struct.Struct("=4q3d18Q")  # the struct Cell
_KINDS = {"tanh": 0, "relu": 1, "gru": 2, "layer_lstm": 3}


@functools.lru_cache(maxsize=1)
def load() -> Any | None:
    """The compiled library, or None if it is unavailable (see `compiled_lstm.load`)."""
    library: Any = compiled_lstm.load()
    size = getattr(
        library, "rbn_inference_size", None
    )  # missing in a library built from older sources
    if size is None or size() != _STRUCT.size:
        return None
    if getattr(library, "rbn_cell_size", int)() != _CELL.size:
        return None
    library.rbn_lstm_inference.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
    library.rbn_cell_step.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    library.rbn_lstm_inference.restype = library.rbn_cell_step.restype = None
    return library


class Row(NamedTuple):
    """One row of a term's population statistics, ``mean[row]`` and ``var[row]``."""

    mean: Tensor  # [S, F]
    var: Tensor  # [S, F]
    row: int


class Weights(NamedTuple):
    """The parameters of one LSTM layer, as in `rbn.ops.bn_lstm`; None if absent."""

    weight_ih: Tensor  # [4H, I]
    weight_hh: Tensor  # [4H, H]
    bias: Tensor | None  # [4H]
    gamma_x: Tensor | None  # [4H]
    gamma_h: Tensor | None  # [4H]
    gamma_c: Tensor | None  # [H]
    beta_c: Tensor | None  # [H]


def step(
    x: Tensor,
    weights: Weights,
    states: tuple[Tensor, ...],
    statistics: Sequence[Row | None],
    eps: float,
    zoneout: tuple[float, ...],
    pass_normalized_cell: bool,
) -> tuple[Tensor, Tensor]:
    """Run one LSTM step of one sequence, plain or batch-normalized. Returns h and c.

    Shapes: x ``[1, I]``, the states h and c ``[1, H]``. statistics: of the terms x, h and c. All
    tensors are float32 on the CPU.
    """
    library: Any = load()
    weight_ih, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta_c = weights
    hidden, inputs = weight_hh.shape[1], weight_ih.shape[1]
    new_h, new_c, terms = torch.empty(1, hidden), torch.empty(1, hidden), torch.empty(8 * hidden)
    _kept, addresses = _addresses(
        (x, weight_ih, weight_hh, gamma_x, gamma_h, bias, gamma_c, beta_c, *states)
    )
    moments = _addresses_of_moments(statistics)
    wx = terms.data_ptr()
    arguments = _STRUCT.pack(
        *(hidden, inputs, 1, 0, gamma_h is not None and gamma_x is None, pass_normalized_cell),
        *(1, 1, 1, 1, eps, zoneout[0], zoneout[1]),
        *(*addresses[:3], 0, wx, wx + 16 * hidden, *addresses[3:8], *moments, *addresses[8:]),
        *(new_h.data_ptr(), new_c.data_ptr()),
    )
    library.rbn_lstm_inference(arguments, 1, _threads(4 * hidden * (hidden + inputs)))
    return new_h, new_c


def cell_step(
    kind: str,
    x: Tensor,
    weights: Sequence[Tensor | None],
    states: tuple[Tensor, ...],
    statistics: Sequence[Row | None],
    eps: float,
    zoneout: tuple[float, ...],
) -> tuple[Tensor, ...]:
    """Run one step of one sequence with another recurrence. Returns the states, ``[1, H]`` each.

    Args:
        kind: the batch-normalized RNN with ``"tanh"`` or ``"relu"``, ``"gru"`` or
            ``"layer_lstm"``.
        x: ``[1, I]``. All tensors are float32 on the CPU.
        weights: those of `Weights`; the last one is the GRU's beta_n.
        states: ``[1, H]`` each.
        statistics: of the terms x and h; empty for layer norm.
        eps: added to every variance.
        zoneout: the rate of h, or the rates of c and h.
    """
    library: Any = load()
    weight_ih, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta = weights
    assert weight_ih is not None
    assert weight_hh is not None
    (features, inputs), hidden = weight_ih.shape, weight_hh.shape[1]
    new = tuple([torch.empty(1, hidden) for _ in states])
    terms = torch.empty(2 * features)
    c = states[1] if len(states) == 2 else None
    _kept, addresses = _addresses(
        (x, weight_ih, weight_hh, bias, gamma_x, gamma_h, gamma_c, beta, states[0], c)
    )
    arguments = _CELL.pack(
        *(_KINDS[kind], hidden, features, inputs, eps, zoneout[0], zoneout[-1], *addresses),
        *(_addresses_of_moments(statistics) if statistics else (0, 0, 0, 0)),
        *(terms.data_ptr(), terms.data_ptr() + 4 * features, new[0].data_ptr()),
        new[-1].data_ptr(),
    )
    library.rbn_cell_step(arguments, _threads(features * (hidden + inputs)))
    return new


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
    """Addresses of tensors, 0 for absent ones. Keep the first result alive: it has the copies."""
    kept = [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]
    return kept, [0 if t is None else t.data_ptr() for t in kept]


def _addresses_of_moments(statistics: Sequence[Row | None]) -> list[int]:
    """The addresses of each term's mean and variance, 0 for terms that are not normalized."""
    moments: list[int] = []
    for result in statistics:
        if result is None:
            moments += (0, 0)
        else:
            mean, var, row = result
            offset = 4 * row * mean.shape[1]
            moments += (mean.data_ptr() + offset, var.data_ptr() + offset)
    return moments


class Tables(NamedTuple):
    """Scales and shifts of a folded LSTM per step; the last row serves all later steps."""

    scale_x: Tensor | None  # [S, 4H]
    scale_h: Tensor | None  # [S, 4H], with its own S
    shift: Tensor  # [S, 4H], with its own S
    scale_c: Tensor | None  # [S, H]
    shift_c: Tensor  # [S, H], as many rows as scale_c


def sequence(
    x: Tensor,
    weight_ih: Tensor | None,
    weight_hh: Tensor,
    folded: Tables,
    h0: Tensor,
    c0: Tensor,
    *,
    start: int,
    joint: bool,
    zoneout: tuple[float, ...],
    pass_normalized_cell: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM with folded normalization; see `rbn.nn.folded.FoldedLSTM` for the equations.

    Args:
        x: the input ``[T, B, I]``, or the input term W_x x_t ``[T, B, 4H]``.
        weight_ih: W_x, ``[4H, I]``; None if x is the input term.
        weight_hh: W_h, ``[4H, H]``.
        folded: the scales and shifts.
        h0: ``[B, H]``.
        c0: ``[B, H]``.
        start: the time step of ``x[0]``.
        joint: scale_h applies to the sum of both terms.
        zoneout: the rates (cell, hidden).
        pass_normalized_cell: the next step continues from the scaled and shifted cell.

    Returns:
        The output ``[T, B, H]``, h_n and c_n ``[B, H]``. All tensors are float32 on the CPU.
    """
    library: Any = load()
    (steps, batch, inputs), hidden = x.shape, weight_hh.shape[1]
    gates, panels = 4 * hidden, None
    if weight_ih is not None and batch < _FUSED:
        x, weight_ih = memory.linear(x, weight_ih), None
    if steps >= _COPIES or weight_ih is not None:
        both = [weight_hh] if weight_ih is None else [weight_ih, weight_hh]
        panels = _packed(both)
    if panels is None and weight_ih is not None:
        x, weight_ih = memory.linear(x, weight_ih), None
    x, weight_hh, h, c = (tensor.contiguous() for tensor in (x, weight_hh, h0, c0))
    output = memory.empty(steps * batch, hidden, x).view(steps, batch, hidden)
    c_n = torch.empty_like(c)
    wh = x.new_empty(batch, gates)
    tables = [None if t is None else t.contiguous() for t in folded]
    rows = [0 if t is None else t.shape[0] for t in (*tables[:3], tables[4])]
    addresses = [0 if t is None else t.data_ptr() for t in tables]

    def run(t: int, steps: int, weight: int, h: Tensor, c: Tensor) -> None:
        inputs = 0 if weight_ih is None else weight_ih.shape[1]
        of_x = x.data_ptr() + 4 * t * batch * x.shape[2]
        arguments = _STRUCT.pack(
            *(hidden, inputs, batch, start + t, joint, pass_normalized_cell, *rows, 0.0, *zoneout),
            *(of_x, 0, weight, 0 if panels is None else panels.data_ptr(), of_x, wh.data_ptr()),
            *addresses,
            *(0, 0, 0, 0, 0, 0, h.data_ptr(), c.data_ptr()),
            *(output.data_ptr() + 4 * t * batch * hidden, c_n.data_ptr()),
        )
        library.rbn_lstm_inference(arguments, steps, threads)

    if batch == 1 or panels is not None:
        threads = _threads(batch * gates * (hidden + inputs))
        run(0, steps, weight_hh.data_ptr() if panels is None else 0, h, c)
    else:
        threads = torch.get_num_threads() if batch * hidden >= compiled_lstm.SMALL else 1
        transposed = weight_hh.t()
        if steps >= _COPIES:
            transposed = transposed.contiguous()
        for t, new_h in enumerate(output.unbind()):
            torch.mm(h, transposed, out=wh)
            run(t, 1, 0, h, c)
            h, c = new_h, c_n
    return output, output[-1].clone(), c_n


class _Packed(NamedTuple):
    """Weights in the kernel's format. Valid until one of them is replaced or modified."""

    weights: list[weakref.ref[Tensor]]
    versions: list[tuple[int, int]]  # address and version of each weight
    panels: Tensor | None


_latest: Any = WeakIdKeyDictionary()
"""The latest `_Packed` of each W_h. Packing a layer takes as long as several of its steps."""


def _packed(weights: list[Tensor]) -> Tensor | None:
    """`compiled_lstm.packed`, done again only after a change. The last of the weights is W_h."""
    if any(weight.is_inference() for weight in weights):  # these have no versions
        return compiled_lstm.packed(weights, 4, 1)
    versions = [(weight.data_ptr(), weight._version) for weight in weights]
    kept: _Packed | None = _latest.get(weights[-1])
    if (
        kept is None
        or kept.versions != versions
        or any(ref() is not weight for ref, weight in zip(kept.weights, weights, strict=True))
    ):
        panels = compiled_lstm.packed(weights, 4, 1)
        kept = _Packed([weakref.ref(weight) for weight in weights], versions, panels)
        _latest[weights[-1]] = kept
    return kept.panels


def _threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // _PER_THREAD))
