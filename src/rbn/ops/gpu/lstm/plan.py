"""What of the LSTM's call follows from shapes, types and options, found out once for all identical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rbn.ops.gpu.lstm import cuda_kernels, families
from rbn.ops.gpu.lstm.cuda_kernels import SMALL
from rbn.ops.gpu.lstm.signature import Inputs, saved_sizes, statistics_cuts, stride_of
from rbn.ops.gpu.runtime import triton_functions

NONE, BATCH, GIVEN = (
    triton_functions.NONE.value,
    triton_functions.BATCH.value,
    triton_functions.GIVEN.value,
)
_MOST = 256


class Facts:
    """The kernels of a call and what they want; no tensors.

    Attributes:
        path: see `paths.choose`.
        sizes: ``(lead, R, T, B, H)``, lead being ``(R,)`` or, without that dimension, nothing.
        x: which statistics the kernels normalize the input term with.
        flags: the same of all terms, for Triton's kernels.
        zoned, sequence: as in `Inputs`.
        moments: how they lie in one piece, behind `cell` and `clear`; see `statistics_cuts`.
        saved: see `saved_sizes`.
        in_step: whether no row is ever behind another by a step, in the backward pass.

    For the kernels in CUDA C++ also, by direction where they differ in it:
        family: which of them run.
        cuts: how they are cut.
        stride: numbers from one row of h to the next.
        looks: whether what the blocks exchange must begin EMPTY.
        zeroed: see `cuda_lstm.zeroed`.
        cell, clear: numbers that the last cells take, and those that are zeroed, of the forward
            pass; multiples of 4, and 0 for other kernels.
        defines: what they are compiled with, by whether the output has a gradient.
    """

    def __init__(self, a: Inputs, w: Tensor | None, path: str) -> None:
        *lead, T, B, G = a.wx.shape
        R, H = lead[0] if lead else 1, G // 4
        self.path, self.in_cuda = path, path == families.CUDA
        self.sizes = tuple(lead), R, T, B, H
        self.zoned, self.sequence = a.zoned, a.sequence
        term = GIVEN if a.population else BATCH
        normalized = a.norm == "batch"
        # Sequencewise statistics are given to kernels that do not know where they come from.
        given = a.sequence and w is None
        self.x = NONE if not normalized or a.joint else GIVEN if given else term
        self.flags: dict[str, int] = {
            "X": self.x,
            "NORM": term if normalized else NONE,
            "CELL": term if normalized and a.gamma_c is not None else NONE,
        }
        self.saved = saved_sizes(a.wx.shape, a.save)
        self.cell = self.clear = 0
        self.in_step = True
        if self.in_cuda:
            self._add_cuda(a, w)
        self.moments = statistics_cuts(a, self.cell + self.clear)

    def _add_cuda(self, a: Inputs, w: Tensor | None) -> None:
        _, R, _, B, H = self.sizes
        self.family = family = cuda_kernels.family(a.wx, self.zoned)
        # Rows that kernels read begin at 16 bytes.
        self.stride = H if family == SMALL else stride_of(H)
        both = "forward", "backward"
        self.cuts = {d: cuda_kernels.cut_of(d, a.wx, family) for d in both}
        self.looks = {d: cuda_kernels.meeting(cut)[1] for d, cut in self.cuts.items()}
        self.zeroed = {d: cuda_kernels.zeroed(cut, R) for d, cut in self.cuts.items()}
        # Splits of a batch meet for nothing but the sums over it.
        splits = getattr(self.cuts["backward"], "splits", 1)
        self.in_step = splits == 1 or self.flags["NORM"] == BATCH
        self.cell = -(-R * B * H // 4) * 4
        self.clear = sum(self.zeroed["forward"].values()) // 4
        self.defines = {
            doutput: cuda_kernels.defines(a, self.flags, H, w is not None, doutput)
            for doutput in (False, True)
        }


def facts_of(a: Inputs, w: Tensor | None) -> Facts:
    """Those of a call, see `Call`."""
    wx, path = a.wx, families.choose(a)
    vectors = (a.bias is None, a.gamma_x is None, a.gamma_c is None, a.beta_c is None)
    others = (w is None, a.lengths is None, not a.population, a.mask_c is None, a.mask_h is None)
    # The last two are all that are no tensors, but eps, which kernels are given.
    key = (path, wx.shape, wx.dtype, wx.device, vectors, others, a[13:16], a[17:])
    found: Facts = once(key, lambda: Facts(a, w, path))
    return found


def once(key: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """What `find` gives, which follows from the key; asked again when there are too many.

    Whoever changes what kernels are chosen by, such as a test, has another `_FOUND` meanwhile.
    """
    found = _FOUND.get(key)
    if found is None:
        if len(_FOUND) >= _MOST:  # of layers long gone, probably
            _FOUND.clear()
        found = _FOUND[key] = find()
    return found


_FOUND: dict[tuple[Any, ...], Any] = {}
