"""Helpers for torch.compile and ONNX export."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

try:  # private: without it, layers in compiled code work as before, and take longer
    from torch._C._dynamo.eval_frame import set_eval_frame as set_eval_frame
except ImportError:

    def set_eval_frame(callback: Any) -> Any:  # type: ignore[misc]
        """Stands for torch's function: no compiler is active."""
        return None


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


@constant_result
def breaks_graph() -> bool:
    """Whether torch.compile, which is tracing, should run a layer eagerly, between two graphs.

    There is nothing to compile in a layer's kernels, and the guards and wrappers of a graph around
    them take time. So torch.compile breaks the graph at a layer, as it does at `torch.nn.LSTM`. It
    traces layers with ``fullgraph=True``, in `torch.export`, and with
    ``torch._dynamo.config.allow_rnn = True``.
    """
    global run_eagerly
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        in_one_graph = InstructionTranslator.current_tx().one_graph
    except AttributeError:  # another tracer, which has no graph breaks
        return False
    if in_one_graph or traces_layers():
        return False
    if "run_eagerly" not in globals():
        run_eagerly = torch.compiler.disable(_call_and_skip)
    return True


run_eagerly: Callable[..., Any]
"""Calls a function without tracing it, which breaks the graph. `breaks_graph` creates it."""

_layer_codes: list[CodeType] = []


def runs_between_graphs(forward: F) -> F:
    """Mark the forward method of layers at which torch.compile breaks the graph."""
    _layer_codes.append(forward.__code__)
    return forward


def run_in_compiled_code(
    callback: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a function from compiled code, outside of its graphs.

    It runs as if it was not compiled, or as a graph of its own if that may not break.
    ``set_eval_frame(None)`` turned the compiler off and returned `callback`; this turns it on
    again.
    """
    try:
        if _runs_eagerly(callback):
            return function(*args, **kwargs)
    finally:
        set_eval_frame(callback)
    return _call(function, *args, **kwargs)


def _latest_compiler() -> Any:
    """Stands for a weak reference: no compiler has called yet."""
    return None


_latest: tuple[Callable[[], Any], bool] = (_latest_compiler, True)
"""The most recent compiler that ran a layer, and whether it runs layers eagerly."""


def _runs_eagerly(callback: Any) -> bool:
    """Whether a compiler runs layers as if they were not compiled.

    The answer is kept for the next call, because torch's configuration takes long to read.
    """
    global _latest
    if not callback:  # runs what is compiled, and compiles nothing
        return True
    compiler, eagerly = _latest
    if compiler() is not callback:
        eagerly = _may_break(callback) and not traces_layers()
        _latest = weakref.ref(callback), eagerly
    return eagerly


def _may_break(callback: Any) -> bool:
    """Whether the compiler continues after a graph break: only one that does has a fallback."""
    while callback is not None and not hasattr(callback, "_inner_convert"):
        wrapped = getattr(callback, "_torchdynamo_orig_callable", None)  # before torch 2.7
        callback = getattr(callback, "_torchdynamo_orig_backend", wrapped)
    return callback is not None


def _call_and_skip(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and from now on without guards and without tracing it for each shape."""
    from torch._dynamo.eval_frame import skip_code

    for code in _layer_codes:
        skip_code(code)
    return function(*args, **kwargs)


def traces_layers() -> bool:
    """Whether torch.compile is asked to trace recurrent layers instead of breaking the graph."""
    import torch._dynamo.config

    return bool(getattr(torch._dynamo.config, "allow_rnn", False))


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
