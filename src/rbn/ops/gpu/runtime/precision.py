"""Products of float32 around the kernels, as exact as the kernels' own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class _Switch:
    """PyTorch's for products of float32, one for all threads: the last user sets it back."""

    def __init__(self) -> None:
        self._left = threading.Condition()
        self._users, self._wanted = 0, False
        self._change_back: Callable[[], None] = lambda: None

    def enter(self, wanted: bool) -> None:
        """Set it; waits for those who need it otherwise."""
        with self._left:
            while self._users and self._wanted != wanted:
                self._left.wait()
            if not self._users:
                self._wanted, self._change_back = wanted, _set(wanted)
            self._users += 1

    def leave(self) -> None:
        """No longer need it."""
        with self._left:
            self._users -= 1
            if not self._users:
                self._change_back()
                self._left.notify_all()


_SWITCH = _Switch()


@contextlib.contextmanager
def multiplied_in_tf32(wanted: bool) -> Iterator[None]:
    """Products of float32 are in tf32 or, if not wanted, in float32, as in the kernels.

    Those ask cuDNN's switch; PyTorch has another one for its own products, off by default.
    """
    _SWITCH.enter(wanted)
    try:
        yield
    finally:
        _SWITCH.leave()


def _set(wanted: bool) -> Callable[[], None]:
    """Set PyTorch's switch; gives what sets it to what it was."""
    matmul: Any = torch.backends.cuda.matmul
    newer = getattr(matmul, "fp32_precision", None)
    try:
        before, level = matmul.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer setting was made, and differs from the older one
        matmul.fp32_precision = "tf32" if wanted else "ieee"
        return lambda: setattr(matmul, "fp32_precision", newer)
    if before == wanted:
        return lambda: None
    matmul.allow_tf32 = wanted

    def change_back() -> None:
        matmul.allow_tf32 = before
        if level == "medium":  # which allows tf32 as well
            torch.set_float32_matmul_precision(level)
        if newer is not None:
            matmul.fp32_precision = newer

    return change_back
