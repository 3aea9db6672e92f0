"""The recurrences on the GPU.

All recurrences but the GRU run in CUDA C++ kernels, one launch for all steps. For calls that those
do not cover, each step is a matrix product and a Triton kernel, as always for the GRU. The
reference runs what no kernel covers: float64, and layer-normalized rows that are too long.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from rbn.ops.definition import GRU, LSTM, RNN, Arguments, Definition
from rbn.ops.gpu.bn_rnn import rnn_single, rnn_steps
from rbn.ops.gpu.cross_entropy.loss import linear_cross_entropy
from rbn.ops.gpu.ln_lstm import ln_single, ln_steps
from rbn.ops.gpu.lstm import plan
from rbn.ops.gpu.lstm.backward import backward
from rbn.ops.gpu.lstm.forward import fake, forward
from rbn.ops.gpu.lstm.joined import RETURNED, Saved
from rbn.ops.gpu.lstm_cell.step import step as lstm_cell_step
from rbn.ops.gpu.one_launch_or_steps import implementation
from rbn.ops.gpu.running_average import average_in
from rbn.ops.gpu.runtime.precision import tf32_allowed
from rbn.ops.gpu.symbols.look_up import symbol_rows
from rbn.ops.operator import Implementation, Operator

__all__ = [
    "average_in",
    "joins",
    "linear_cross_entropy",
    "lstm_cell_step",
    "operator_for",
    "symbol_rows",
    "tf32_allowed",
]

log = logging.getLogger("rbn.ops.gpu")

_LSTM = Operator(LSTM, "gpu", Implementation(Saved, forward, backward, fake, RETURNED))
_BY_LAYER = implementation(ln_single, ln_steps, ("wx", "centered", "cs", "moments"))
_LAYER_NORM_LSTM = Operator(LSTM, "gpu_ln", _BY_LAYER)
_RNN = implementation(rnn_single, rnn_steps, ("wx", "centered", "hidden"))
_ONE_STATE = {d.name: Operator(d, "gpu", _RNN) for d in (RNN, GRU)}


def operator_for(definition: Definition, calls: Sequence[Arguments]) -> Operator | None:
    """The operator of a recurrence, or None if the reference must run."""
    a = calls[0]
    if a.input.dtype == torch.float64:
        _log_reference(a)
        return None
    if definition.name in _ONE_STATE:
        return _ONE_STATE[definition.name]
    if a.norm != "layer":
        return _LSTM
    if a.weight_hh.shape[1] <= ln_steps.LARGEST:
        return _LAYER_NORM_LSTM
    _log_reference(a)
    return None


def _log_reference(a: Arguments) -> None:
    if not torch.compiler.is_compiling():
        log.debug("the reference runs for %s %s", tuple(a.input.shape), a.input.dtype)


def joins(definition: Definition, calls: Sequence[Arguments]) -> bool:
    """Whether several calls can run in one launch."""
    if definition.name != "lstm" or torch.compiler.is_compiling():
        return False
    return plan.joins(calls)
