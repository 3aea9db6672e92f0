"""Launches of a Triton kernel like one before, at little cost for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

# Before, what Triton compiled was called without its compile-time arguments.
_TAKES_ALL = tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 3)


def _again(found: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """What launches a compiled kernel, given all its arguments."""
    launch: Callable[..., object] = found[(*grid, 1, 1)[:3]]
    return launch


class Repeated:
    """A kernel that is launched again and again, with the same tensors and other numbers.

    Triton looks at every argument of a launch, to find or compile the kernel that fits: with some
    fifty of them, several times as long as a small kernel runs. Here it does so once. The other
    launches call what it found, with addresses for tensors.

    Args:
        kernel: takes tensors, then numbers, then `flags`. It must not be compiled for values of
            those numbers that change (``do_not_specialize``).
        grid: number of programs.
        tensors: all stay where they are as long as this object is used.
        flags: compile-time arguments and options, by name.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], tensors: Sequence[Tensor], flags: dict[str, Any]
    ) -> None:
        self._kernel, self._grid, self._flags = kernel, grid, flags
        self._tensors = list(tensors)
        self._again: Callable[..., object] | None = None
        self._addresses: list[int] = []
        self._rest: list[Any] = []

    def __call__(self, *numbers: float) -> None:
        """Launch with these numbers, whose types are the same each time."""
        if self._again is not None:
            self._again(*self._addresses, *numbers, *self._rest)
            return
        found = self._kernel[self._grid](*self._tensors, *numbers, **self._flags)
        if not hasattr(found, "packed_metadata"):  # the interpreter's: nothing was compiled
            return
        names = self._kernel.arg_names[len(self._tensors) + len(numbers) :]
        self._rest = [self._flags[name] for name in names] if _TAKES_ALL else []
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._again = _again(found, self._grid)


_KEPT: dict[tuple[Any, ...], tuple[Callable[..., object], list[Any]]] = {}
_MOST = 1024


def launch_kept(
    kernel: Any,
    grid: tuple[int, int],
    addresses: tuple[int, ...],
    tensors: Callable[[], Sequence[Tensor]],
    numbers: tuple[float, ...],
    flags: dict[str, Any],
    types: tuple[torch.dtype, ...],
    like: Tensor,
) -> None:
    """Launch a kernel that Triton looks at once for all calls that differ in addresses alone.

    addresses: of what `tensors` gives, which is asked for it only where Triton is to look.
    numbers, flags: as in `Repeated`, but for all of them the kernel may be compiled.
    types: of the tensors, as far as they may differ between calls. like: any on their device.
    """
    key = (id(kernel), grid, numbers, *flags.values(), *types, like.device)
    kept = _KEPT.get(key)
    # For others, and only those, the kernel is compiled differently.
    aligned = not any(at % 16 for at in addresses)
    with torch.cuda.device_of(like):
        if kept is not None and aligned:
            kept[0](*addresses, *numbers, *kept[1])
            return
        found = kernel[grid](*tensors(), *numbers, **flags)
    if aligned and hasattr(found, "packed_metadata"):
        if len(_KEPT) >= _MOST:  # of layers long gone, probably
            _KEPT.clear()
        names = kernel.arg_names[len(addresses) + len(numbers) :]
        _KEPT[key] = _again(found, grid), [flags[name] for name in names] if _TAKES_ALL else []
