"""The layer-normalized LSTM in the compiled kernel: all time steps in one call.

Its statistics are over the features of each row, so each thread takes its own rows of the minibatch
through all steps and never waits for the others (kernel_layer.h). The kernel supports float32 on
x86 with AVX2; `rbn.ops.cpu.fused_lstm` runs every other case. Both save the same tensors, so either
can run the backward pass of the other.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from rbn.ops.cpu.compiled_lstm import MOMENTS, Call, load, packed
from rbn.ops.cpu.fused_lstm import Forward, Gradients, Saved, results, states_of
from rbn.ops.cpu.layout import Buffers
from rbn.ops.definition import VECTORS, LSTMArguments

_LINE = 16  # float32 numbers in a cache line


def usable(a: LSTMArguments) -> bool:
    """Whether the kernel supports this case."""
    library: Any = load()
    return (
        a.norm == "layer"
        and a.input.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and not a.joint
        and a.gamma_h is not None
        and a.gamma_c is not None
        and a.mask_c is None
        and a.mask_h is None
        and a.rate_c == a.rate_h == 0
        and not a.pass_normalized_cell
        and library is not None
        and library.rbn_panel_lanes() > 0
    )


class _LayerCall(Call):
    """A call that uses zeros for a missing bias or beta_c."""

    def __init__(self, a: LSTMArguments) -> None:
        super().__init__(a)
        H = self.layout.hidden
        for name, size in (("bias", 4 * H), ("beta_c", H)):
            if self.vectors[name] is None:
                self.vectors[name] = self.wx.new_zeros(size)
        self.args.point(**self.vectors)
        self.args.keep = 1
        sizes = self.packing.sizes
        self.sizes = (ctypes.c_int64 * len(sizes))(*sizes)

    def run(self, sums: Tensor | None = None) -> None:
        """Run the forward pass, or the backward pass, which adds to sums ``[threads, 2, size]``."""
        address, size = (0, 0) if sums is None else (sums.data_ptr(), sums.shape[2])
        steps = len(self.sizes)
        args = ctypes.addressof(self.args)
        self.library.rbn_layer_lstm(args, self.sizes, steps, address, size, self.threads)


def forward(a: LSTMArguments) -> Forward:
    """Run the recurrence over all steps."""
    call = _LayerCall(a)
    layout, packing, args, wx = call.layout, call.packing, call.args, call.wx
    H = layout.hidden
    moments = [packing.buffer(1, wx) for _ in MOMENTS]
    call.use_moments(moments)
    buffers = Buffers(packing, wx, a.save)
    hidden, wh, gates = packing.buffer(H, wx), buffers.make(4 * H), buffers.make(4 * H)
    tanh_c, cand = buffers.make(H), buffers.make(H)
    panels = packed([call.weight], 4, call.threads)
    args.keep = int(a.save)
    args.point(wx=wx, wh=wh, gates=gates, cand=cand, tanh_c=tanh_c)
    args.point(hidden_states=hidden, packed=panels)
    call.run()
    return results(a, layout, hidden, moments, wh, gates, cand, tanh_c)


def backward(
    a: LSTMArguments, r: Saved, doutput: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None
) -> Gradients:
    """The gradients of all differentiable tensors, from those of the three results."""
    call = _LayerCall(a)
    layout, packing, args, wx = call.layout, call.packing, call.args, call.wx
    H, h0 = layout.hidden, call.h0
    call.use_moments([r.mean_x, r.rstd_x, r.mean_h, r.rstd_h, r.mean_c, r.rstd_c])
    args.point(wx=wx, wh=r.wh, gates=r.gates, cand=r.cand, tanh_c=r.tanh_c)
    dy = None if doutput is None else layout.rows(doutput).contiguous()
    dh, dc = layout.state_gradient(dh_n, h0), layout.state_gradient(dc_n, call.c0)
    dwh, dwx = packing.buffer(4 * H, wx), packing.buffer(4 * H, wx)
    panels = packed([call.weight.t()], 1, call.threads)
    args.point(dy=dy, dh=dh, dc=dc, dwh=dwh, dwx=dwx, packed=panels)
    sums = wx.new_zeros(call.threads, 2, -(-14 * H // _LINE) * _LINE)
    call.run(sums)

    parts = sums[:, 1].split([4 * H, 4 * H, 4 * H, H, H, sums.shape[2] - 14 * H], dim=1)
    vectors = {name: part.sum(0) for name, part in zip(VECTORS, parts, strict=False)}
    dweight = packing.outer(dwh, states_of(r, H), h0)
    return layout.gradients(a, dwx, dweight, **vectors, h0=dh, c0=dc)
