"""Caches Triton launches, which makes repeated ones cheap for the host."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rbn.ops.gpu.runtime import direct_launch, triton_compiler
from rbn.ops.gpu.runtime.driver import device_of, on_current_device

# Before Triton 3.3, compiled kernels were called without their compile-time arguments.
_TAKES_ALL = triton_compiler.SINCE_3_3


def _as_triton(
    kernel: Any, result: Any, grid: tuple[int, ...], count: int, flags: dict[str, Any]
) -> tuple[Callable[..., object], list[Any]]:
    """Triton's launcher of a compiled kernel, and what follows its first `count` arguments."""
    names = kernel.arg_names[count:]
    return result[(*grid, 1, 1)[:3]], [flags[name] for name in names] if _TAKES_ALL else []


def _is_compiled(result: Any) -> bool:
    return hasattr(result, "packed_metadata")  # the interpreter returns None


class RepeatedLaunch:
    """A kernel that is launched repeatedly with the same tensors and changing integers.

    Triton inspects every argument of a launch to look up or compile the matching kernel. With some
    fifty arguments that takes several times as long as a small kernel runs. Here it happens once
    for all calls with tensors of the same dtypes. Later launches go directly to the driver
    (`direct_launch`), or to the kernel that Triton compiled, with addresses for tensors.

    Args:
        kernel: takes tensors, then numbers, then `flags`. It must not be specialized for numbers
            that change (``do_not_specialize``).
        grid: number of programs.
        tensors: must keep their addresses as long as this object is used.
        flags: compile-time arguments and options, by name.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor], flags: dict[str, Any]
    ) -> None:
        self._kernel, self._grid, self._flags = kernel, grid, flags
        self._tensors = list(tensors)
        self._again: Callable[..., object] | None = None

    def __call__(self, *numbers: float) -> None:
        """Launch with these numbers. Only the values of integers may differ between launches.

        The tensors' device must be the current device; device and stream must stay the same.
        """
        if self._again is not None:
            self._again(*numbers)
            return
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        key = self._key(addresses, numbers)
        known = _COMPILED.get(key)
        if known is not None:
            self._again = self._launcher(*known[:2], addresses, numbers)
            self._again(*numbers)
            return
        kernel, flags = self._kernel, self._flags
        names = kernel.arg_names[: len(addresses) + len(numbers)]
        result = None
        if not any(at % 16 for at in addresses):
            result = triton_compiler.compile_for(kernel, self._tensors, numbers, flags)
        kinds = None if result is None else direct_launch.kinds_of(result, names)
        launched = kinds is None
        if launched:
            result = kernel[self._grid](*self._tensors, *numbers, **flags)
            if not _is_compiled(result):
                return
            kinds = direct_launch.kinds_of(result, names)
        if len(_COMPILED) >= _MOST:  # probably filled by layers that no longer exist
            _COMPILED.clear()
        # Keeps the kernel alive, so that no other object gets its id.
        _COMPILED[key] = result, kinds, kernel
        self._again = self._launcher(result, kinds, addresses, numbers)
        if not launched:
            self._again(*numbers)

    def _key(self, addresses: list[int], numbers: tuple[float, ...]) -> tuple[Any, ...]:
        """A key that covers everything Triton may specialize the kernel for."""
        types = tuple(tensor.dtype for tensor in self._tensors)
        unaligned = tuple(at % 16 != 0 for at in addresses)
        values = tuple(_kind(n) for n in numbers)
        device = self._tensors[0].device
        return id(self._kernel), device, types, unaligned, values, tuple(self._flags.items())

    def _launcher(
        self, result: Any, kinds: Any, addresses: list[int], numbers: tuple[float, ...]
    ) -> Callable[..., object]:
        values = (*addresses, *numbers)
        launch = (
            None if kinds is None else direct_launch.launcher(result, kinds, self._grid, values)
        )
        if launch is not None:
            return launch
        again, rest = _as_triton(self._kernel, result, self._grid, len(values), self._flags)
        return lambda *numbers: again(*addresses, *numbers, *rest)


def _kind(number: float) -> Any:
    """The properties of a number that Triton may specialize a kernel for."""
    if isinstance(number, float):
        return float
    return number == 1, number % 16 == 0, -(2**31) <= number < 2**31


_COMPILED: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
# Keeps the kernel alive, so that no other object gets its id.
_LAUNCHERS: dict[tuple[Any, ...], tuple[Callable[[Sequence[int]], object], Any]] = {}
_MOST = 1024
# The grid, the tensors, the numbers and the flags.
LaunchArguments = tuple[tuple[int, int], Sequence[Tensor], tuple[float, ...], dict[str, Any]]


def launch_cached(
    kernel: Any,
    grid: tuple[int, int],
    addresses: tuple[int, ...],
    tensors: Callable[[], Sequence[Tensor]],
    numbers: tuple[float, ...],
    flags: dict[str, Any],
    types: tuple[torch.dtype, ...],
    like: Tensor,
) -> None:
    """Launch a kernel; Triton inspects the arguments once for calls that differ only in addresses.

    addresses: of the tensors. tensors: returns them; called only if Triton must inspect them.
    numbers, flags: as in `RepeatedLaunch`, but the kernel may be specialized for all of them.
    types: those dtypes of the tensors that may differ between calls. like: any tensor on their
    device.
    """
    key = (grid, numbers, *flags.values(), *types)
    launch_by_key(kernel, key, addresses, lambda: (grid, tensors(), numbers, flags), like)


def launch_by_key(
    kernel: Any,
    key: tuple[Any, ...],
    addresses: tuple[int, ...],
    arguments: Callable[[], LaunchArguments],
    like: Tensor,
) -> None:
    """`launch_cached` with a smaller cache key.

    key: must determine the grid, the numbers, the flags and the tensors' dtypes.
    arguments: returns the grid, the tensors, the numbers and the flags; called only if Triton must
    inspect them.
    """
    full_key = (id(kernel), key, like.device)
    launcher = _LAUNCHERS.get(full_key)
    # Triton compiles another kernel for unaligned addresses, so only aligned ones are cached.
    aligned = not functools.reduce(operator.or_, addresses) % 16
    if launcher is not None and aligned and on_current_device(like):
        launcher[0](addresses)
        return
    with device_of(like):
        if launcher is not None and aligned:
            launcher[0](addresses)
            return
        grid, tensors, numbers, flags = arguments()
        count = len(addresses) + len(numbers)
        names = kernel.arg_names[:count]
        result = triton_compiler.compile_for(kernel, tensors, numbers, flags) if aligned else None
        launch = None if result is None else _directly(result, names, grid, numbers)
        if launch is not None:
            launch(addresses)
        else:
            result = kernel[grid](*tensors, *numbers, **flags)
    if aligned and _is_compiled(result):
        if len(_LAUNCHERS) >= _MOST:
            _LAUNCHERS.clear()
        if launch is None:
            launch = _directly(result, names, grid, numbers)
        if launch is None:
            launch = _through_triton(kernel, result, grid, numbers, flags, count)
        _LAUNCHERS[full_key] = launch, kernel


def _through_triton(
    kernel: Any,
    result: Any,
    grid: tuple[int, int],
    numbers: tuple[float, ...],
    flags: dict[str, Any],
    count: int,
) -> Callable[[Sequence[int]], object]:
    """Returns a function that launches a compiled kernel, given the addresses of its tensors.

    count: the number of tensors and numbers.
    """
    again, rest = _as_triton(kernel, result, grid, count, flags)
    return lambda addresses: again(*addresses, *numbers, *rest)


def _directly(
    result: Any, names: Sequence[str], grid: tuple[int, int], numbers: tuple[float, ...]
) -> Callable[[Sequence[int]], object] | None:
    """Like `_through_triton`, without Triton's launcher; None if that is not possible."""
    kinds = direct_launch.kinds_of(result, names)
    return None if kinds is None else direct_launch.launcher_at(result, kinds, grid, numbers)
