"""Compiles Triton's functions without its driver and launchers.

Those are C extensions, which Triton builds with the system's compiler: one for the driver and,
before Triton 3.7, one per signature of a kernel. Each takes longer to build than a small kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

# Before Triton 3.3, sources and compiled kernels took other arguments.
SINCE_3_3 = tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 3)
_POINTERS = {
    **{torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"},
    **{torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.uint8: "*u8"},
}
_DIVISIBLE = [["tt.divisibility", 16]]


def compile_for(
    kernel: Any, tensors: Sequence[Tensor], numbers: Sequence[float], flags: dict[str, Any]
) -> Any:
    """The kernel for the current device and arguments like these; None if Triton must launch it.

    It is specialized as by ``kernel[grid](*tensors, *numbers, **flags)``. All addresses must be
    multiples of 16.
    """
    if not SINCE_3_3 or not isinstance(kernel, JITFunction):  # the interpreter
        return None
    types = [_POINTERS.get(tensor.dtype) for tensor in tensors]
    if None in types:
        return None
    kinds: list[Any] = [(kind, None, True) for kind in types]
    parameters = kernel.params[len(kinds) : len(kinds) + len(numbers)]
    kinds += [_kind(n, p.do_not_specialize) for n, p in zip(numbers, parameters, strict=True)]
    return _compiled(kernel, torch.cuda.current_device(), tuple(kinds), tuple(flags.items()))


def _kind(number: float, general: bool) -> tuple[str, int | None, bool]:
    """The type of a number, its value if it is compiled in, and whether 16 divides it."""
    if isinstance(number, float):
        return "fp32", None, False
    if not general and number == 1:
        return "constexpr", 1, False
    fits = -(2**31) <= number < 2**31
    return "i32" if fits else "i64", None, not general and number % 16 == 0


@functools.lru_cache(maxsize=1024)
def _compiled(
    kernel: Any,
    device: int,
    kinds: tuple[tuple[str, int | None, bool], ...],
    flags: tuple[tuple[str, Any], ...],
) -> Any:
    names, options = kernel.arg_names, dict(flags)
    constants = {names[k]: value for k, (_, value, _) in enumerate(kinds) if value is not None}
    constants |= {name: options.pop(name) for name in names[len(kinds) :]}
    signature = {name: kind for name, (kind, _, _) in zip(names, kinds, strict=False)}
    signature |= dict.fromkeys(names[len(kinds) :], "constexpr")
    attributes = {(k,): _DIVISIBLE for k, (_, _, divisible) in enumerate(kinds) if divisible}
    major, minor = torch.cuda.get_device_capability(device)
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", 10 * major + minor, 32)
    return triton.compile(source, target=target, options=options)
