"""Helpers for torch.compile and ONNX export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def constant_result(function: F) -> F:
    """Mark a function whose result torch.compile may treat as a constant.

    Does the same as `torch.compiler.assume_constant_result`, which would import the compiler and so
    take as long as importing the rest of torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_result
def exporting_to_onnx() -> bool:
    """`torch.onnx.is_in_onnx_export`, which torch.compile would otherwise see as False."""
    return torch.onnx.is_in_onnx_export()


run_eagerly: Callable[..., Any]
"""Calls a function without tracing it, which breaks the graph. `breaks_graph` creates it."""


@constant_result
def breaks_graph() -> bool:
    """Whether torch.compile should run a layer eagerly, between two graphs.

    There is nothing to compile in a layer's kernels, and the guards and wrappers of a graph around
    them take time. So torch.compile breaks the graph at a layer, as it does at `torch.nn.LSTM`. It
    traces layers with ``fullgraph=True``, in `torch.export`, and with
    ``torch._dynamo.config.allow_rnn = True``.
    """
    global run_eagerly
    import torch._dynamo.config
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if "run_eagerly" not in globals():
        run_eagerly = torch.compiler.disable(_call)
    try:
        in_one_graph = InstructionTranslator.current_tx().one_graph
    except AttributeError:  # another tracer, which has no graph breaks
        return False
    return not in_one_graph and not getattr(torch._dynamo.config, "allow_rnn", False)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
