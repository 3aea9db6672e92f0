"""Launches Triton kernels directly through the CUDA driver, reusing argument buffers.

Triton's own launcher costs more per launch.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from rbn.ops.gpu.runtime import driver

# Bytes of an argument by Triton's name of its type; pointers take 8.
_BYTES = {"i32": 4, "i64": 8, "fp32": 4}
_SCRATCH = 2  # pointers that Triton appends to the arguments, at most; null if unused
# Metadata of a compiled kernel that requires more than a plain launch.
_SPECIAL = (
    *("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"),
    "tensordesc_meta",
)


def _hooked(result: Any) -> bool:
    """Whether a launch hook is installed in Triton, for example by a profiler."""
    knobs = getattr(triton, "knobs", None)
    where = type(result) if knobs is None else knobs.runtime
    hooks = (getattr(where, f"launch_{when}_hook", None) for when in ("enter", "exit"))
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


@functools.lru_cache(maxsize=1024)
def _loaded(result: Any) -> int:
    metadata = result.metadata
    return driver.load(result.asm["cubin"], metadata.name, metadata.shared).value or 0


def _function(result: Any) -> int:
    """The driver's handle of a compiled kernel, which is loaded if Triton has not done that."""
    return _loaded(result) if result.function is None else int(result.function)


def kinds_of(result: Any, names: Sequence[str]) -> list[str | None] | None:
    """The types of a compiled kernel's arguments; None for those that were compiled in.

    Returns None instead of a list if a plain launch is not possible, or if the number and sizes of
    the arguments do not match what the driver reports.
    """
    signature = getattr(getattr(result, "src", None), "signature", None)
    metadata = getattr(result, "metadata", None)
    if not isinstance(signature, dict) or metadata is None:
        return None
    if torch.version.hip is not None:
        return None
    if any(getattr(metadata, name, None) for name in _SPECIAL):
        return None
    if getattr(metadata, "num_ctas", 1) != 1:
        return None
    kinds = [signature.get(name) for name in names]
    kinds = [None if kind == "constexpr" else kind for kind in kinds]
    sizes = [8 if kind.startswith("*") else _BYTES.get(kind) for kind in kinds if kind is not None]
    taken = driver.parameter_sizes(_function(result))
    beyond = None if taken is None else taken[len(sizes) :]
    if taken is None or taken[: len(sizes)] != sizes or beyond not in ([], [8], [8] * _SCRATCH):
        return None
    return kinds


def _in_order(kinds: list[str | None]) -> bool:
    """Whether pointers come first, then integers, then all others, with none compiled in."""
    ranks = [-1 if k is None else 0 if k[0] == "*" else 1 if k[0] == "i" else 2 for k in kinds]
    return -1 not in ranks and ranks == sorted(ranks)


def _bits(kind: str | None, value: Any) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0] if kind == "fp32" else int(value)


def launcher(
    result: Any, kinds: list[str | None], grid: tuple[int, ...], values: Sequence[Any]
) -> Callable[..., None] | None:
    """Returns a function that launches a compiled kernel on the now current stream.

    kinds: from `kinds_of`. values: addresses, integers and other numbers, in this order, one for
    each of `kinds`. Each launch takes new integers and ignores its other arguments.
    Returns None if Triton has launch hooks or the arguments are in another order.
    """
    if _hooked(result) or not _in_order(kinds):
        return None
    driver.enter()
    slots = (ctypes.c_int64 * (len(kinds) + _SCRATCH))()  # null after the arguments
    for k, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        slots[k] = _bits(kind, value)
    changing = [k for k, kind in enumerate(kinds) if kind in ("i32", "i64")]
    first = ctypes.addressof(slots)
    places = (ctypes.c_void_p * len(slots))(*range(first, first + 8 * len(slots), 8))
    stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    sizes = (*grid, 1, 1)[:3], 32 * result.metadata.num_warps, result.metadata.shared
    start = driver.starter(_function(result), *sizes, stream, places)

    def launch(*numbers: int) -> None:
        for place, number in zip(changing, numbers, strict=False):
            slots[place] = number
        start()

    return launch


def launcher_at(
    result: Any, kinds: list[str | None], grid: tuple[int, ...], numbers: Sequence[Any]
) -> Callable[[Sequence[int]], None] | None:
    """Like `launcher`, for fixed numbers and new addresses on each launch.

    Several threads may call the result at once, on any stream. numbers: the arguments after the
    addresses. Launch hooks that are installed in Triton later do not see these launches.
    """
    if _hooked(result):
        return None
    of_numbers = kinds[len(kinds) - len(numbers) :]
    pairs = zip(of_numbers, numbers, strict=True)
    rest = [_bits(kind, value) for kind, value in pairs if kind is not None] + [0] * _SCRATCH
    tensors = len(kinds) - len(numbers)
    count, write = tensors + len(rest), struct.Struct(f"{tensors}P").pack_into
    free: list[tuple[Any, Any]] = []  # argument buffers that no launch is using
    sizes = (*grid, 1, 1)[:3], 32 * result.metadata.num_warps, result.metadata.shared
    start = driver.starter_on_stream(_function(result), *sizes)

    def launch(addresses: Sequence[int]) -> None:
        try:
            slots, places = free.pop()
        except IndexError:  # there are as many buffers as threads that launch at once
            slots = (ctypes.c_int64 * count)(*[0] * tensors, *rest)
            first = ctypes.addressof(slots)
            places = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        write(slots, 0, *addresses)
        start(places)  # the driver copies them
        free.append((slots, places))

    return launch
