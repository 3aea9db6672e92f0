"""The fused recurrences as a scan over time, built from operators that every exporter supports.

`rbn::cpu_lstm` and its siblings do not exist outside of PyTorch. `torch.onnx.export` sees these
functions instead and turns the scan into ONNX's `Scan`. Inference only, with population statistics
and without masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rbn.ops.definition import LSTM, Arguments, LSTMArguments, RNNArguments
from rbn.ops.input_term import with_term
from rbn.ops.types import compute_dtype, valid_steps

Step = dict[str, Tensor]  # what one step reads, by name
Population = tuple[Tensor | None, Tensor | None]  # mean and var of a term


def lstm(*args: Any) -> tuple[Tensor, ...]:
    """`rbn::cpu_lstm` as a scan: ``output [T, B, H]``, ``h_n``, ``c_n``; the rest empty."""
    a: LSTMArguments
    a, _ = with_term(LSTM, LSTMArguments(*args))
    _check_inference(a.norm != "batch" or a.population, (a.mask_c, a.mask_h))
    terms = _Terms(a)
    terms.add_input(a.gamma_x, None if a.joint else a.bias, a.norm, (a.mean_x, a.var_x))
    terms.add("h", a.gamma_h, a.norm, (a.mean_h, a.var_h))
    terms.add("c", a.gamma_c, a.norm, (a.mean_c, a.var_c))
    if a.joint and a.bias is not None:
        terms.fixed["bias"] = a.bias.to(terms.dtype)
    if a.beta_c is not None:
        terms.fixed["beta"] = a.beta_c.to(terms.dtype)

    def step(states: tuple[Tensor, ...], now: Step) -> tuple[Tensor, ...]:
        h, c = states
        recurrent = h @ now["weight"]
        if a.joint:  # one normalization of the sum
            gates = terms.normalized("h", recurrent + now["x"], now)
            if "bias" in now:
                gates = gates + _like(gates, now["bias"])
        else:
            gates = terms.normalized("h", recurrent, now) + now["x"]
        i, f, g, o = gates.chunk(4, dim=1)
        c_t = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        c_hat = terms.normalized("c", c_t, now)
        if "beta" in now:
            c_hat = c_hat + _like(c_hat, now["beta"])
        h_t = torch.sigmoid(o) * torch.tanh(c_hat)
        if a.pass_normalized_cell:
            c_t = c_hat
        return _zoneout(a.rate_h, h, h_t), _zoneout(a.rate_c, c, c_t)

    return _scanned(terms, step, (a.h0, a.c0), len(LSTM.moments))


def rnn(*args: Any) -> tuple[Tensor, ...]:
    """`rbn::cpu_rnn`, or `rbn::cpu_gru`, as a scan: ``output [T, B, H]``, ``h_n``; others empty."""
    a = RNNArguments(*args)
    a, _ = with_term(a.definition, a)
    _check_inference(a.population, (a.mask_h,))
    terms = _Terms(a)
    terms.add_input(a.gamma_x, a.bias, "batch", (a.mean_x, a.var_x))
    terms.add("h", a.gamma_h, "batch", (a.mean_h, a.var_h))
    if a.beta_n is not None:
        terms.fixed["beta"] = a.beta_n.to(terms.dtype)

    def gates(of_h: Tensor, of_x: Tensor, h: Tensor, now: Step) -> Tensor:
        (r, z, n), (r_x, z_x, n_x) = of_h.chunk(3, dim=1), of_x.chunk(3, dim=1)
        n = n + _like(n, now["beta"]) if "beta" in now else n
        z, n = torch.sigmoid(z + z_x), torch.tanh(n_x + torch.sigmoid(r + r_x) * n)
        return (1 - z) * n + z * h

    def step(states: tuple[Tensor, ...], now: Step) -> tuple[Tensor, ...]:
        (h,) = states
        of_h, of_x = terms.normalized("h", h @ now["weight"], now), now["x"]
        phi = torch.tanh if a.nonlinearity == "tanh" else torch.relu
        h_t = gates(of_h, of_x, h, now) if a.gated else phi(of_h + of_x)
        return (_zoneout(a.rate_h, h, h_t),)

    return _scanned(terms, step, (a.h0,), len(a.definition.moments))


class _Terms:
    """Inputs of the steps: `rows` has one entry per step, `fixed` is shared by all steps."""

    def __init__(self, a: Arguments) -> None:
        self.wx, self.eps, self.dtype = a.input, a.eps, compute_dtype(a.input.dtype)
        self.steps = a.input.shape[0]
        self.valid = valid_steps(a.lengths, self.steps)  # [T, B]
        self.rows: Step = {}
        self.fixed: Step = {"weight": a.weight_hh.to(self.dtype).t()}  # [H, gates * H]
        self.norms: dict[str, str] = {}
        if self.valid is not None:
            self.rows["valid"] = self.valid[:, :, None]

    def add_input(
        self, gamma: Tensor | None, bias: Tensor | None, norm: str, population: Population
    ) -> None:
        """The input term of all steps, normalized, plus the bias."""
        wx = self.wx.to(self.dtype)
        if self.valid is not None:
            wx = torch.where(self.valid[:, :, None], wx, 0)
        if gamma is not None and norm == "layer":
            wx = F.layer_norm(wx, wx.shape[2:], gamma.to(self.dtype), None, self.eps)
        elif gamma is not None and norm == "batch":
            mean, scale = self._of_steps(gamma, population)
            wx = (wx - _like(wx, mean[:, None])) * _like(wx, scale[:, None])
        if bias is not None:
            wx = wx + _like(wx, bias.to(self.dtype))
        self.rows["x"] = wx

    def add(self, term: str, gamma: Tensor | None, norm: str, population: Population) -> None:
        """Add a term that is normalized in each step; without a gamma it is not normalized."""
        self.norms[term] = "none" if gamma is None else norm
        if self.norms[term] == "layer":
            assert gamma is not None
            self.fixed[f"gamma_{term}"] = gamma.to(self.dtype)
        elif self.norms[term] == "batch":
            assert gamma is not None
            mean, scale = self._of_steps(gamma, population)
            self.rows[f"mean_{term}"], self.rows[f"scale_{term}"] = mean, scale

    def _of_steps(self, gamma: Tensor, population: Population) -> tuple[Tensor, Tensor]:
        """Mean and gamma / sqrt(var + eps), ``[T, F]``; the last row serves all later steps."""
        given = [statistic for statistic in population if statistic is not None]
        mean, var = (statistic.to(self.dtype) for statistic in given)
        row = torch.arange(self.steps, device=mean.device).clamp(max=mean.shape[0] - 1)
        scale = gamma.to(self.dtype) * torch.rsqrt(var + self.eps)
        return mean[row], scale[row]

    def normalized(self, term: str, x: Tensor, now: Step) -> Tensor:
        """Normalize x ``[B, F]`` of one step."""
        if self.norms[term] == "batch":
            return (x - _like(x, now[f"mean_{term}"])) * _like(x, now[f"scale_{term}"])
        if self.norms[term] == "layer":
            return F.layer_norm(x, x.shape[1:], now[f"gamma_{term}"], None, self.eps)
        return x


def _scanned(
    terms: _Terms,
    step: Callable[[tuple[Tensor, ...], Step], tuple[Tensor, ...]],
    states: tuple[Tensor, ...],
    count: int,
) -> tuple[Tensor, ...]:
    """Run `step` over time. Returns the output, the last states, and `count` empty tensors.

    states: the initial states, ``[B, H]`` each.
    """
    n, names = len(states), (*terms.rows, *terms.fixed)

    def combine(*values: Tensor) -> list[Tensor]:
        before, now = values[:n], dict(zip(names, values[n:], strict=True))
        after = step(before, now)
        if "valid" not in now:
            return [*after, after[0].clone()]
        after = tuple(torch.where(now["valid"], s, b) for s, b in zip(after, before, strict=True))
        return [*after, torch.where(now["valid"], after[0], 0)]

    *last, output = torch.ops.higher_order.scan(
        combine,
        [state.to(terms.dtype).clone(memory_format=torch.contiguous_format) for state in states],
        list(terms.rows.values()),
        tuple(terms.fixed.values()),
    )
    dtype = terms.wx.dtype
    results = [value.to(dtype) for value in (output, *last)]
    return (*results, *(terms.wx.new_empty(0) for _ in range(count)))


def _like(x: Tensor, values: Tensor) -> Tensor:
    """Expand values that broadcast to x, if the broadcast would lose x's symbolic sizes.

    It does if a size is 1 in the exporter's example input: the result would have the constant 1.
    """
    kept = all(type(n) is type(m) for n, m in zip((x + values).shape, x.shape, strict=True))
    return values if kept else values.expand_as(x)


def _zoneout(rate: float, previous: Tensor, new: Tensor) -> Tensor:
    return new if rate == 0 else rate * previous + (1 - rate) * new


def _check_inference(evaluated: bool, masks: tuple[Tensor | None, ...]) -> None:
    if not evaluated or any(mask is not None for mask in masks):
        raise RuntimeError(
            "torch.onnx.export needs the layer as in evaluation, with population statistics and "
            "without random masks: call model.eval() first"
        )
