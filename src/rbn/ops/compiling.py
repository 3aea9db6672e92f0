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
