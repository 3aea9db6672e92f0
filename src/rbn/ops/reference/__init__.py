"""The recurrences as the papers print them: plain PyTorch, any dtype and device, plain autograd.

Tests compare every other implementation with these. They run if no faster implementation exists.
"""

from __future__ import annotations

from collections.abc import Sequence

from rbn.ops.definition import Arguments, Definition
from rbn.ops.reference.call import run
from rbn.ops.reference.cross_entropy import linear_cross_entropy
from rbn.ops.reference.symbol_rows import symbol_rows

__all__ = ["linear_cross_entropy", "operator_for", "run", "symbol_rows", "tf32_allowed"]


def tf32_allowed() -> bool:
    """Whether fused operators may use tf32: the reference has none."""
    return False


def operator_for(definition: Definition, calls: Sequence[Arguments]) -> None:
    """The reference has no fused operators: `run` computes every call."""
