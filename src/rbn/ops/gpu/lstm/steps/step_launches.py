"""The LSTM step by step, with a matrix product and one kernel per step.

Supports any shape; runs calls that no CUDA C++ kernel covers. Several recurrences run one after
another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbn.ops.gpu.lstm.kernel_arguments import LSTMCall, aligned, rows_of
from rbn.ops.gpu.lstm.steps.backward_kernels import lstm_step_backward
from rbn.ops.gpu.lstm.steps.forward_kernels import lstm_step
from rbn.ops.gpu.runtime.device import power_of_two
from rbn.ops.gpu.runtime.launch_cache import RepeatedLaunch
from rbn.ops.gpu.runtime.precision import multiplied_in_tf32
from rbn.ops.gpu.stepwise import factor, products

# Elements of a gate per tile: preferably at most _TILE, so that two programs fit on a
# multiprocessor, and never more than _LARGEST.
_TILE, _LARGEST = 1024, 2048
# Warps for a tile of _TILE elements; backward, two programs of 8 warps would need too many
# registers.
_WARPS = {"forward": 8, "backward": 4}
# The least number of programs, as long as each has at least 4 units: half of the multiprocessors of
# an H200.
_PROGRAMS = 66


def tile_of(batch: int, hidden: int, itemsize: int) -> tuple[int, int]:
    """Rows and units of a program's tile, powers of two.

    The units of a row fill at most a sector of 32 bytes. There are fewer if the tile would be too
    large for the batch, or if too few programs would run.
    """
    rows, units = power_of_two(batch), min(32 // itemsize, power_of_two(hidden))
    while units > 4 and (rows * units > _TILE or -(-hidden // units) < _PROGRAMS):
        units //= 2
    return min(rows, _LARGEST // units), units


class _Steps:
    """The kernel arguments and options of one of the call's recurrences, for both directions."""

    def __init__(
        self, direction: str, call: LSTMCall, r: int, moments: list[Tensor | None]
    ) -> None:
        self.call, self.r = call, r
        self.wx = call.wx[r]
        self.vectors = [self.part(v) for v in call.vectors()]
        self.masks = [self.part(m) for m in call.masks()]
        self.moments = [call.empty if m is None else self.part(m) for m in moments]
        self.rows = rows_of(moments)
        rows, units = tile_of(call.B, call.H, call.wx.itemsize)
        warps = 4 if rows * units < _TILE else _WARPS[direction] if rows * units == _TILE else 8
        self.grid = (-(-call.H // units),)
        self.single = rows >= call.B
        self.flags = {
            **call.plan.flags,
            **call.options(),
            "ROWS": rows,
            "UNITS": units,
            "SINGLE": self.single,
            "num_warps": warps,
            "num_stages": 1,
        }
        # As floats, because Triton would specialize the kernel for integers.
        self.numbers = float(call.a.rate_c), float(call.a.rate_h), float(call.a.eps)

    def part(self, value: Tensor) -> Tensor:
        """The part of a tensor that belongs to this recurrence."""
        call = self.call
        return value if value is call.empty or not call.lead else value.view(call.R, -1)[self.r]

    def rows_at(self) -> list[tuple[int, ...]]:
        """Which rows of the statistics of x, h and c each step uses."""
        steps = range(self.call.T)
        last = [max(0, rows - 1) for rows in self.rows]
        return list(zip(*([min(t, n) for t in steps] for n in last), strict=True))

    def scratch(self, planes: int) -> Tensor:
        """Scratch memory ``[planes, B, H]``; a placeholder if the batch fits into one tile."""
        call = self.call
        return call.empty if self.single else call.empty.new_empty(planes, call.B, call.H)


def _weights(call: LSTMCall) -> Tensor:
    """W_h ``[R, 4H, H]`` as a factor of products."""
    weight = factor(call.a.weight_hh, call.wx).contiguous()
    return aligned(weight).view(call.R, 4 * call.H, call.H)


def forward(
    call: LSTMCall, moments: list[Tensor | None], hs: Tensor, cs: Tensor, kept: Tensor, h_n: Tensor
) -> None:
    """Run all steps.

    moments: mean and var of x, h and c. Minibatch statistics of h and c are written, those of x
    must already be there. hs ``[R, T + 1, B, stride]`` and cs ``[R, T + 1 or 1, B, H]`` start with
    the initial states. kept: a flat buffer for ``[R, T, B, 4H]`` elements, used if the call saves.
    """
    a, T, B, H = call.a, call.T, call.B, call.H
    hs, cs = hs.view(call.R, T + 1, B, -1), cs.view(call.R, -1, B, H)
    weights = _weights(call)
    wh = call.empty.new_empty(B, 4 * H)
    with torch.cuda.device_of(call.wx), multiplied_in_tf32(call.a.tf32):
        for r in range(call.R):
            own = _Steps("forward", call, r, moments)
            of_steps = kept.narrow(0, 0, call.wx.numel()).view_as(call.wx)[r] if a.save else kept
            tensors = [wh, own.wx, *own.vectors, *own.moments, hs[r], cs[r], of_steps]
            tensors += [own.part(h_n), call.lengths, call.inv_n, *own.masks, own.scratch(2)]
            flags = own.flags | {"HS": hs.shape[-1], "SAVE": a.save, "FEW": a.exclude}
            del flags["X"]  # the input term's statistics are always given to this kernel
            step = RepeatedLaunch(lstm_step, own.grid, tensors, flags)
            multiply = products(hs, weights[r].t(), wh)
            cell, rows, numbers = B * H if a.save else 0, own.rows_at(), own.numbers
            for t, h in enumerate(hs[r, :T].narrow(-1, 0, H).unbind()):
                multiply(h)
                step(t, B, *rows[t], cell, *numbers)


def backward(
    call: LSTMCall,
    moments: list[Tensor | None],
    cs: Tensor,
    kept: Tensor,
    doutput: Tensor | None,
    dh: Tensor,
    dc: Tensor,
    da: Tensor,
    dwx: Tensor,
    sums: list[Tensor],
) -> None:
    """Run all steps, the last first.

    moments, cs, kept: from the forward pass, with raised variances. doutput: ``[R, T, B, H]``. dh,
    dc: ``[R, B, H]``, the gradients of the last states; they become the parts of the initial
    states' gradients that bypass the product. da, dwx: ``[R, T, B, 4H]``, written. sums: the
    gradients of the vectors, zero at first.
    """
    T, B, H = call.T, call.B, call.H
    weights = _weights(call)
    cells = cs.narrow(0, 0, call.R * (T + 1) * B * H).view(call.R, -1)
    kept = kept.narrow(0, 0, call.wx.numel()).view_as(call.wx)
    with torch.cuda.device_of(call.wx), multiplied_in_tf32(call.a.tf32):
        for r in range(call.R):
            own = _Steps("backward", call, r, moments)
            through = torch.zeros(B, H, dtype=torch.float32, device=call.wx.device)
            tensors = [own.wx, *own.vectors, *own.moments[:2], *own.moments[3:], cells[r], kept[r]]
            tensors += [call.lengths, call.inv_n, *own.masks]
            tensors += [call.empty if doutput is None else own.part(doutput), through]
            tensors += [own.part(dh), own.part(dc), da[r], dwx[r]]
            widths = [4 * H] * 3 + [H] * 2
            tensors += [s.narrow(0, r * n, n) for s, n in zip(sums, widths, strict=True)]
            tensors.append(own.scratch(8))
            flags = own.flags | {"HAS_DOUTPUT": doutput is not None}
            step = RepeatedLaunch(lstm_step_backward, own.grid, tensors, flags)
            multiply = products(da, weights[r], through)
            steps, rows, numbers = da[r].unbind(), own.rows_at(), own.numbers
            for t in range(T - 1, -1, -1):
                step(t, B, *rows[t], *numbers)
                if t > 0:
                    multiply(steps[t])
