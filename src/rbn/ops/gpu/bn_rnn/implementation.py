"""The batch-normalized simple RNN on the GPU: in one launch per pass, or step by step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rbn.ops.definition import RNNArguments
from rbn.ops.gpu.bn_rnn import rnn_single, rnn_steps
from rbn.ops.gpu.bn_rnn.rnn_single import Tiling
from rbn.ops.gpu.bn_rnn.rnn_steps import Saved
from rbn.ops.operator import Implementation, Incoming, Results


def _forward(calls: Sequence[RNNArguments], separate: bool) -> Results:
    (a,) = calls
    tiling = rnn_single.tiling_for(a)
    if tiling is None:
        return rnn_steps.forward(calls, separate)
    return rnn_single.forward(a, tiling, separate)


def _backward(
    calls: Sequence[RNNArguments], saved: Saved, plan: Tiling | None, incoming: Incoming
) -> list[dict[str, Tensor | None]]:
    (a,) = calls
    tiling = rnn_single.tiling_for(a) if plan is None else plan
    if tiling is None:
        return rnn_steps.backward(calls, saved, incoming)
    return [rnn_single.backward(a, saved, tiling, incoming)]


RETURNED = ("wx", "centered", "hidden")  # by the custom operator
IMPLEMENTATION = Implementation(Saved, _forward, _backward, rnn_steps.fake, RETURNED)
