"""The LSTM with the compiled step of kernel.c.

A step of the kernel normalizes, applies the nonlinearities and updates the state. On x86 with AVX2
it also multiplies by W_h, and one call runs all steps. Elsewhere PyTorch multiplies, between calls
for one step each. The kernel supports float32 with minibatch statistics, population statistics or
none. `rbn.ops.cpu.fused_lstm` or `rbn.ops.cpu.compiled_layer_lstm` runs every other case, and
installations without the compiled library. All save the same tensors, so any of them can run the
backward pass of another.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rbn.ops.cpu import memory
from rbn.ops.cpu.fused_lstm import (
    Forward,
    Gradients,
    Saved,
    identical_steps_of,
    results,
    states_of,
)
from rbn.ops.cpu.layout import Buffers, Layout
from rbn.ops.cpu.norms import pooled_rstd
from rbn.ops.cpu.one_feature import OneFeature
from rbn.ops.definition import LSTM, VECTORS, LSTMArguments
from rbn.ops.identical_rows import lower_rstd

LIBRARY = Path(__file__).with_name("_kernel.so")
_NONE, _BATCH, _GIVEN = 0, 1, 2
SMALL = 2048  # units * rows below which a second thread costs more than it saves
_BUFFERS = (
    *("wx", "wh", "x", "scale_x", "gates", "cand", "tanh_c", "hidden_states"),
    *("c0", "h0", "packed", "start"),
)
MOMENTS = ("mean_x", "rstd_x", "mean_h", "rstd_h", "mean_c", "rstd_c")
_GRADIENTS = ("dy", "dh", "dc", "dwh", "dwx", "dscale_x", *("d" + name for name in VECTORS))
_NUMBERS = ("hidden", "keep", "mode_x", "mode_h", "mode_c", "rows_x", "rows_h", "rows_c")


class _Args(ctypes.Structure):
    """The struct Args in kernel.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in (*_BUFFERS, *VECTORS, *MOMENTS, *_GRADIENTS)),
    )

    def point(self, **tensors: Tensor | None) -> None:
        """Set pointers to contiguous float32 tensors, which the caller keeps alive."""
        for name, tensor in tensors.items():
            setattr(self, name, None if tensor is None else tensor.data_ptr())


@functools.lru_cache(maxsize=1)
def load() -> Any | None:
    """The compiled library, or None if it is missing, unusable or disabled by RBN_CPU_KERNEL=0."""
    if os.environ.get("RBN_CPU_KERNEL") == "0" or not LIBRARY.exists():
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:  # built for another machine
        return None
    if library.rbn_args_size() != ctypes.sizeof(_Args) or not hasattr(
        library, "rbn_lstm_forward_steps"
    ):
        warnings.warn(
            "the compiled CPU kernel was built from older sources and is not used, so layers are "
            "several times slower on a CPU: install the package again (in a clone: make install)",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    library.rbn_panel_lanes.restype = ctypes.c_int64
    address, number = ctypes.c_void_p, ctypes.c_int64
    library.rbn_layer_lstm.argtypes = [address, address, number, address, number, number]
    library.rbn_layer_lstm.restype = None
    for function in (library.rbn_lstm_forward_steps, library.rbn_lstm_backward_steps):
        function.argtypes = [address, address, number, number, number]
        function.restype = None
    library.rbn_pack_weights.argtypes = [address, *[number] * 5, address, number, number]
    library.rbn_pack_weights.restype = None
    openmp = _openmp_of_torch()
    if openmp is not None:
        library.rbn_use_openmp(*openmp)
    return library


def packed(weights: Sequence[Tensor], parts: int, threads: int) -> Tensor | None:
    """Weights in the kernel's format, for products ``x @ weight.T``; None if it has no products.

    Args:
        weights: float32 ``[N, K]``, each with its own K and any strides.
        parts: number of equal parts of N, such as gates.
        threads: number of threads to use.

    Returns:
        ``[panels, K of all weights, parts, lanes]``: each panel contains `lanes` rows of each part.
    """
    library: Any = load()
    lanes = library.rbn_panel_lanes()
    if not lanes:
        return None
    size, columns = weights[0].shape[0] // parts, sum(w.shape[1] for w in weights)
    panels = memory.empty(-(-size // lanes), columns * parts * lanes, weights[0])
    panels = panels.view(-1, columns, parts, lanes)
    to = panels.data_ptr()
    for weight in weights:
        if 1 not in weight.stride():
            weight = weight.contiguous()
        (row, column), K = weight.stride(), weight.shape[1]
        panel = columns * parts * lanes
        library.rbn_pack_weights(weight.data_ptr(), size, K, row, column, parts, to, panel, threads)
        to += 4 * lanes * parts * K
    return panels


def _openmp_of_torch() -> tuple[ctypes.c_void_p, ...] | None:
    """GOMP_parallel and related functions of the OpenMP library loaded in this process, if any."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    for path in sorted(set(re.findall(r"\s(/\S*lib(?:gomp|iomp5|omp)\S*\.so\S*)", maps))):
        try:
            openmp = ctypes.CDLL(path)
            return tuple(ctypes.cast(getattr(openmp, name), ctypes.c_void_p) for name in names)
        except (OSError, AttributeError):
            continue
    return None


def usable(a: LSTMArguments) -> bool:
    """Whether the compiled step supports this case."""
    return (
        a.input.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and a.norm in ("none", "batch")
        and not a.joint
        and a.mask_c is None
        and a.mask_h is None
        and a.rate_c == a.rate_h == 0
        and not a.pass_normalized_cell
        and (a.lengths is None or a.padding == "exclude" or a.population)
        and load() is not None
    )


def takes_input(a: LSTMArguments) -> bool:
    """Whether `forward` and `backward` also support this call with W_x and the input itself.

    That is a float32 input of one feature without a gradient, if its statistics are those of a
    minibatch. Steps with too few rows use constants, which `OneFeature` does not have.
    """
    return (
        a.weight_ih is not None
        and a.input.shape[-1] == 1
        and a.input.dtype == torch.float32
        and not (a.save and a.input.requires_grad)
        and not a.population
        and (a.norm == "none" or a.sequence or a.lengths is None)
        and usable(a)
    )


class Call:
    """One forward or backward pass: the arguments of the compiled step, and their tensors."""

    def __init__(self, a: LSTMArguments) -> None:
        self.library: Any = load()
        self.layout = layout = Layout(a)
        self.packing, H = layout.packing, layout.hidden
        self.wx = layout.rows(a.input).contiguous()
        self.weight = layout.cast(a.weight_hh)
        self.h0 = layout.state(a.h0).contiguous()
        self.c0 = layout.state(a.c0).contiguous()
        self.vectors: dict[str, Tensor | None] = {}
        for name in VECTORS:
            value = layout.optional(getattr(a, name))
            self.vectors[name] = None if value is None else value.contiguous()
        self.feature: OneFeature | None = None
        if a.weight_ih is not None:
            self.feature = OneFeature(a, self.wx[: self.packing.rows], self.packing.batch)
        # The normalization of the input term with sequencewise statistics. In the steps of the
        # kernel, these are given; `through_statistics` does the rest of the backward pass.
        self.sequence = a.sequence and self.feature is None
        self.args = args = _Args(hidden=H, eps=a.eps)
        self.own_terms: list[str] = []  # terms normalized with minibatch statistics
        # Number of steps with enough rows for minibatch statistics; these steps come first.
        self.common = sum(n >= layout.fewest for n in self.packing.sizes)
        for term, gamma in (("x", a.gamma_x), ("h", a.gamma_h), ("c", a.gamma_c)):
            mode = _NONE if gamma is None else _GIVEN if a.population else _BATCH
            if term == "x" and self.feature is not None:
                mode = _NONE
            if term == "x" and self.sequence:
                mode, args.rows_x = _GIVEN, 1
            setattr(args, f"mode_{term}", mode)
            if mode == _BATCH:
                self.own_terms.append(term)
            if a.population and gamma is not None:
                setattr(args, f"rows_{term}", len(getattr(a, f"mean_{term}")))
        args.point(c0=self.c0, h0=self.h0, **self.vectors)
        if self.feature is not None:
            args.point(x=self.feature.x, scale_x=self.feature.scale)
            args.rows_x = len(self.feature.scale)
        big = self.packing.batch * H >= SMALL
        self.threads = torch.get_num_threads() if big else 1
        # The first row of each step, then the number of rows.
        starts = [0, *itertools.accumulate(self.packing.sizes)]
        self.starts = (ctypes.c_int64 * len(starts))(*starts)

    def use_moments(self, moments: Sequence[Tensor | None]) -> None:
        """Point to mean and rstd of the terms x, h and c."""
        self.moments = [None if m is None else m.contiguous() for m in moments]
        self.args.point(**dict(zip(MOMENTS, self.moments, strict=True)))

    def own_steps(self, yes: bool) -> None:
        """Switch between steps with statistics of their own (True) and with constants (False)."""
        for term in self.own_terms:
            setattr(self.args, f"mode_{term}", _BATCH if yes else _GIVEN)
            setattr(self.args, f"rows_{term}", self.layout.steps)

    def fill_constants(self) -> None:
        """Compute the statistics of the steps with too few rows, after all other steps ran."""
        if self.common == self.layout.steps:
            return
        sizes, eps = self.packing.sizes[: self.common], self.args.eps
        for term in self.own_terms:
            k = MOMENTS.index(f"mean_{term}")
            mean, rstd = self.moments[k], self.moments[k + 1]
            assert mean is not None
            assert rstd is not None
            first = mean[: self.common], rstd[: self.common]
            mean[self.common :], rstd[self.common :] = pooled_rstd(*first, sizes, eps)

    def moments_of_sequence(self) -> tuple[Tensor, Tensor]:
        """Sequencewise mean and rstd of the input term, ``[1, 4H]`` each."""
        x = self.wx[: self.packing.rows]
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
        return mean[None], torch.rsqrt(var + self.args.eps)[None]

    def through_statistics(self, dwx: Tensor, dbias: Tensor | None, dgamma: Tensor | None) -> None:
        """Subtract from dwx what the term's sequencewise statistics contribute to its gradient.

        dwx: the gradient with constant statistics, ``[N, 4H]``. dbias, dgamma: ``[4H]``, the sums
        over all rows of the gradient of the normalized term, and of it times that term's x_hat.
        """
        assert dbias is not None
        assert dgamma is not None
        (mean, rstd, *_), gamma, rows = self.moments, self.vectors["gamma_x"], self.packing.rows
        assert mean is not None
        assert rstd is not None
        assert gamma is not None
        factor = gamma * rstd[0] / rows
        slope = factor * dgamma * rstd[0]
        dwx.addcmul_(self.wx[:rows], slope, value=-1)
        dwx.sub_(factor * dbias - slope * mean[0])

    def given_moments(self, a: LSTMArguments) -> list[Tensor | None]:
        """Mean and rstd from the population statistics; None for absent terms."""
        moments: list[Tensor | None] = []
        for mean, var in ((a.mean_x, a.var_x), (a.mean_h, a.var_h), (a.mean_c, a.var_c)):
            if mean is None or var is None:
                moments += [None, None]
            else:
                moments += [self.layout.cast(mean), torch.rsqrt(self.layout.cast(var) + a.eps)]
        return moments


def forward(a: LSTMArguments) -> Forward:
    """Run the recurrence over all steps."""
    call = Call(a)
    layout, packing, args, wx = call.layout, call.packing, call.args, call.wx
    H = layout.hidden
    shapes = LSTM.statistics_shapes(a)
    new = [None if shape is None else wx.new_empty(shape) for shape in shapes for _ in range(2)]
    if call.feature is not None:
        new[0:2] = call.feature.moments()
    elif call.sequence:
        new[0:2] = call.moments_of_sequence()
    call.use_moments(call.given_moments(a) if a.population else new)
    x = wx if call.feature is None else None

    buffers = Buffers(packing, wx, a.save)
    hidden, gates = packing.buffer(H, wx), buffers.make(4 * H)
    tanh_c, cand = buffers.make(H), buffers.make(H)
    plain = args.mode_h == _NONE  # then W_h h + W_x x goes straight into the gates' buffer
    wh = gates if plain else buffers.make(4 * H)
    args.keep = int(a.save)
    args.point(wx=None if plain else x, wh=wh, gates=gates, cand=cand, tanh_c=tanh_c)
    args.point(hidden_states=hidden)
    panels = packed([call.weight], 4, call.threads)
    args.point(packed=panels, start=x if plain else None)
    run, address = call.library.rbn_lstm_forward_steps, ctypes.addressof(args)
    steps, common = len(packing.sizes), call.common
    if panels is not None:
        run(address, call.starts, 0, common, call.threads)
        call.fill_constants()
        if common < steps:
            call.own_steps(False)
            run(address, call.starts, common, steps, call.threads)
    else:
        whs, hs = buffers.views(wh), packing.split(hidden)
        xs = None if x is None or not plain else packing.split(x)
        h, W = call.h0, call.weight.t().contiguous()  # [H, 4H]
        for t, n in enumerate(packing.sizes):
            h = h if len(h) == n else h[:n]
            if t == common:
                call.fill_constants()
                call.own_steps(False)
            if xs is not None:
                torch.addmm(xs[t], h, W, out=whs[t])
            else:
                torch.mm(h, W, out=whs[t])
            h = hs[t]
            run(address, call.starts, t, t + 1, call.threads)
        if common == steps:
            call.fill_constants()

    return results(a, layout, hidden, new, None if plain else wh, gates, cand, tanh_c)


def backward(
    a: LSTMArguments, r: Saved, doutput: Tensor | None, dh_n: Tensor | None, dc_n: Tensor | None
) -> Gradients:
    """The gradients of all differentiable tensors, from those of the three results."""
    call = Call(a)
    layout, packing, args, wx = call.layout, call.packing, call.args, call.wx
    H, rows, h0 = layout.hidden, packing.rows, call.h0
    hidden = states_of(r, H)
    plain, feature = args.mode_h == _NONE, call.feature
    own = [r.mean_x, r.rstd_x, r.mean_h, r.rstd_h, r.mean_c, r.rstd_c]
    if a.batch_stats:
        before, after = identical_steps_of(a, r)
        assert r.rstd_h is not None
        own[3] = lower_rstd(r.rstd_h, before, a.eps)
        if r.rstd_c is not None:
            own[5] = lower_rstd(r.rstd_c, after, a.eps)
    moments = call.given_moments(a) if a.population else own
    call.use_moments(moments)
    args.keep = 1
    args.point(
        wx=None if plain or feature is not None else wx,
        wh=None if plain else r.wh,
        gates=r.gates,
        cand=r.cand,
        tanh_c=r.tanh_c,
    )
    dy = None if doutput is None else layout.rows(doutput).contiguous()
    dh, dc = layout.state_gradient(dh_n, h0), layout.state_gradient(dc_n, call.c0)
    dwh = packing.buffer(4 * H, wx)
    dwx: Tensor | None = None
    if feature is None:
        dwx = dwh if plain else packing.buffer(4 * H, wx)
    grads = {
        "d" + name: None if value is None else torch.zeros_like(value)
        for name, value in call.vectors.items()
    }
    args.point(dy=dy, dh=dh, dc=dc, dwh=dwh, dwx=None if plain else dwx, **grads)
    dbias = grads["dbias"]
    if call.sequence and dbias is None:
        dbias = wx.new_zeros(4 * H)
        args.point(dbias=dbias)
    if feature is not None:
        args.point(dscale_x=feature.dscale)
    panels = packed([call.weight.t()], 1, call.threads)
    args.point(packed=panels)
    run, address = call.library.rbn_lstm_backward_steps, ctypes.addressof(args)
    steps, common = len(packing.sizes), call.common
    call.own_steps(common == steps)
    if panels is not None:
        if common < steps:
            run(address, call.starts, common, steps, call.threads)
            call.own_steps(True)
        run(address, call.starts, 0, common, call.threads)
    else:
        dwhs = packing.split(dwh)
        for t in range(steps - 1, -1, -1):
            if t == common - 1:
                call.own_steps(True)
            run(address, call.starts, t, t + 1, call.threads)
            torch.mm(dwhs[t], call.weight, out=dh[: packing.sizes[t]])

    if call.sequence:
        assert dwx is not None
        call.through_statistics(dwx[:rows], dbias, grads["dgamma_x"])
    dweight = packing.outer(dwh, hidden, h0)
    vectors = {name: grads["d" + name] for name in VECTORS}
    if feature is not None:
        vectors |= feature.gradients()
    return layout.gradients(a, dwx, dweight, **vectors, h0=dh, c0=dc)
