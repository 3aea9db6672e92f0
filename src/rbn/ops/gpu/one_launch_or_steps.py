"""Recurrences with CUDA C++ kernels for some calls and a step-by-step version for all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rbn.ops.operator import Implementation, Incoming, Results


def implementation(single: Any, steps: Any, returned: tuple[str, ...]) -> Implementation:
    """Runs `single` if it has a tiling for the call, otherwise `steps`.

    single: a module with `tiling_for`, `forward` and `backward`, which take one launch each.
    steps: a module with `Saved`, `forward`, `backward` and `fake`. returned: see `Implementation`.
    """

    def forward(calls: Sequence[Any], separate: bool) -> Results:
        (a,) = calls
        tiling = single.tiling_for(a)
        if tiling is None:
            return steps.forward(a, separate)  # type: ignore[no-any-return]
        return single.forward(a, tiling, separate)  # type: ignore[no-any-return]

    def backward(
        calls: Sequence[Any], saved: Any, plan: Any, incoming: Incoming
    ) -> list[dict[str, Tensor | None]]:
        (a,) = calls
        tiling = single.tiling_for(a) if plan is None else plan
        if tiling is None:
            return [steps.backward(a, saved, incoming)]
        return [single.backward(a, saved, tiling, incoming)]

    return Implementation(steps.Saved, forward, backward, steps.fake, returned)
