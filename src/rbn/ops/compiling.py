"""What torch.compile is told about functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def constant_result(function: F) -> F:
    """Mark a function whose result torch.compile may take for a constant.

    Just what `torch.compiler.assume_constant_result` does; but that loads the whole compiler, which
    takes as long as loading the rest of torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_result
def exporting_to_onnx() -> bool:
    """`torch.onnx.is_in_onnx_export`, which torch.compile would take for False."""
    return torch.onnx.is_in_onnx_export()
