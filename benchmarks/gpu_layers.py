"""The layers of the GPU benchmark: ours, cuDNN's, and implementations without a kernel."""

import torch
import torch.nn.functional as F
from gpu_rows import (
    BATCH_FIRST,
    BN_LSTM,
    COMPILED,
    CUDNN,
    LSTM,
    SCRIPTED,
    SEQUENCE_STATISTICS,
    ZONEOUT,
)
from torch import nn

import rbn


def _weights(inputs, hidden):
    ih = nn.Parameter(torch.randn(4 * hidden, inputs) * inputs**-0.5)
    return ih, nn.Parameter(torch.randn(4 * hidden, hidden) * hidden**-0.5)


class ScriptedLayerNormLSTM(nn.Module):
    """A LayerNorm LSTM as a loop over its cell, for `torch.jit.script`, as in PyTorch's benchmarks.

    The input product is one for all steps here; theirs is in the loop.
    """

    def __init__(self, inputs, hidden):
        super().__init__()
        self.weight_ih, self.weight_hh = _weights(inputs, hidden)
        self.norm_x = nn.LayerNorm(4 * hidden)
        self.norm_h = nn.LayerNorm(4 * hidden)
        self.norm_c = nn.LayerNorm(hidden)
        self.hidden = hidden

    def forward(self, x: torch.Tensor):
        h = torch.zeros(x.size(1), self.hidden, dtype=x.dtype, device=x.device)
        c = torch.zeros_like(h)
        wx = self.norm_x(torch.matmul(x, self.weight_ih.t()))
        weight = self.weight_hh.t()
        outputs: list[torch.Tensor] = []
        for t in range(x.size(0)):
            i, f, g, o = (wx[t] + self.norm_h(torch.mm(h, weight))).chunk(4, 1)
            c = self.norm_c(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g))
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)


EPS = 1e-5


def _moments(x):
    var, mean = torch.var_mean(x.float(), 0, correction=0)
    return mean, var


def _bn(x, gamma, mean, var):
    return (x.float() - mean) * (torch.rsqrt(var + EPS) * gamma)


def _next(wx, wh, c):
    i, f, g, o = (wx + wh).chunk(4, 1)
    return torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g), torch.sigmoid(o)


def training_cell(wx, h, c, weight, gamma_h, gamma_c, beta_c):
    """A step of equations 6 to 8 with minibatch statistics."""
    wh = h @ weight
    c, o = _next(wx, _bn(wh, gamma_h, *_moments(wh)), c)
    h = o * torch.tanh(_bn(c, gamma_c, *_moments(c)) + beta_c)
    return h.to(weight.dtype), c


def inference_cell(wx, h, c, weight, gamma_h, gamma_c, beta_c, mean_h, var_h, mean_c, var_c):
    """A step with given statistics."""
    c, o = _next(wx, _bn(h @ weight, gamma_h, mean_h, var_h), c)
    h = o * torch.tanh(_bn(c, gamma_c, mean_c, var_c) + beta_c)
    return h.to(weight.dtype), c


class CompiledCellBatchNormLSTM(nn.Module):
    """The BN-LSTM as a loop over a cell compiled by torch.compile: the best without a kernel.

    The cell is float32 except for its product, as in `rbn.BatchNormLSTM`. In `eval()` all steps use
    the statistics in its buffers.
    """

    def __init__(self, inputs, hidden, compile=torch.compile):
        super().__init__()
        self.weight_ih, self.weight_hh = _weights(inputs, hidden)
        for name, size in (("x", 4 * hidden), ("h", 4 * hidden), ("c", hidden)):
            self.register_parameter(f"gamma_{name}", nn.Parameter(torch.full((size,), 0.1)))
            self.register_buffer(f"mean_{name}", torch.zeros(size))
            self.register_buffer(f"var_{name}", torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        self.beta_c = nn.Parameter(torch.zeros(hidden))
        self.hidden = hidden
        self.training_cell, self.inference_cell = compile(training_cell), compile(inference_cell)

    def forward(self, x):
        wx = F.linear(x, self.weight_ih).float()
        if self.training:
            var, mean = torch.var_mean(wx, 1, correction=0, keepdim=True)
        else:
            mean, var = self.mean_x.float(), self.var_x.float()
        wx = ((wx - mean) * torch.rsqrt(var + EPS) * self.gamma_x + self.bias).unbind(0)
        h = x.new_zeros(x.shape[1], self.hidden)
        c = h.float()
        cell, given = self.training_cell, ()
        if not self.training:
            cell = self.inference_cell
            given = self.mean_h, self.var_h, self.mean_c, self.var_c
        outputs = []
        for step in wx:
            h, c = cell(
                step, h, c, self.weight_hh.t(), self.gamma_h, self.gamma_c, self.beta_c, *given
            )
            outputs.append(h)
        return torch.stack(outputs), (h, c)


class BothWays(nn.Module):
    """Two layers, one of which runs backwards in time."""

    def __init__(self, there, back):
        super().__init__()
        self.there, self.back = there, back

    def forward(self, x):
        outputs = self.there(x)[0], self.back(x.flip(0))[0].flip(0)
        return torch.cat(outputs, 2), None


def make_layer(what, shape):
    """A layer for the shape T, B, I, H, directions."""
    T, _, I, H, directions = shape  # noqa: E741
    both = directions == 2
    if what.startswith(CUDNN):
        return nn.LSTM(I, H, bidirectional=both, batch_first=BATCH_FIRST in what)
    if what.startswith(LSTM):
        return rbn.LSTM(I, H, bidirectional=both)
    if what.startswith(BN_LSTM):
        options = {"zoneout": (0.3, 0.05)} if ZONEOUT in what else {}
        if SEQUENCE_STATISTICS in what:
            options = {"input_stats": "sequence"}
        return rbn.BatchNormLSTM(I, H, bidirectional=both, max_length=T, **options)
    if what == COMPILED:
        torch._dynamo.reset()  # else many shapes count as too many recompilations
        make = CompiledCellBatchNormLSTM
    elif what == SCRIPTED:

        def make(inputs, hidden):
            return torch.jit.script(ScriptedLayerNormLSTM(inputs, hidden))

    else:
        raise ValueError(f"there is no layer {what!r}")
    return BothWays(make(I, H), make(I, H)) if both else make(I, H)
