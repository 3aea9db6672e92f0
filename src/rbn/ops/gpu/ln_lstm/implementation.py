"""The layer-normalized LSTM on the GPU: in one launch per pass, or step by step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rbn.ops.definition import LSTMArguments
from rbn.ops.gpu.ln_lstm import ln_single, ln_steps
from rbn.ops.gpu.ln_lstm.ln_single import Tiling
from rbn.ops.gpu.ln_lstm.ln_steps import Saved
from rbn.ops.operator import Implementation, Incoming, Results


def _forward(calls: Sequence[LSTMArguments], separate: bool) -> Results:
    (a,) = calls
    tiling = ln_single.tiling_for(a)
    if tiling is None:
        return ln_steps.forward(calls, separate)
    return ln_single.forward(a, tiling, separate)


def _backward(
    calls: Sequence[LSTMArguments], saved: Saved, plan: Tiling | None, incoming: Incoming
) -> list[dict[str, Tensor | None]]:
    (a,) = calls
    tiling = ln_single.tiling_for(a) if plan is None else plan
    if tiling is None:
        return ln_steps.backward(calls, saved, incoming)
    return [ln_single.backward(a, saved, tiling, incoming)]


RETURNED = ("wx", "centered", "cs", "moments")  # by the custom operator
IMPLEMENTATION = Implementation(Saved, _forward, _backward, ln_steps.fake, RETURNED)
