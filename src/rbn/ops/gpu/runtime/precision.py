"""The precision of float32 products: the kernels' own, and PyTorch's around them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


def tf32_allowed() -> bool:
    """Whether float32 products may use tf32; follows the setting of cuDNN's recurrent networks."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # newer settings are in use that differ for convolutions
        rnn: Any = torch.backends.cudnn.rnn
        return bool(rnn.fp32_precision == "tf32")


class _Switch:
    """PyTorch's tf32 setting, shared by all threads: the last user restores it."""

    def __init__(self) -> None:
        self._left = threading.Condition()
        self._users, self._wanted = 0, False
        self._change_back: Callable[[], None] = lambda: None

    def enter(self, wanted: bool) -> None:
        """Set it; waits for threads that need the other value."""
        with self._left:
            while self._users and self._wanted != wanted:
                self._left.wait()
            if not self._users:
                self._wanted, self._change_back = wanted, _set(wanted)
            self._users += 1

    def leave(self) -> None:
        """Stop using it; the last user restores the setting."""
        with self._left:
            self._users -= 1
            if not self._users:
                self._change_back()
                self._left.notify_all()


_SWITCH = _Switch()


@contextlib.contextmanager
def multiplied_in_tf32(wanted: bool) -> Iterator[None]:
    """Run PyTorch's float32 products in tf32 (or in float32, if not wanted), like the kernels.

    The kernels follow cuDNN's setting. PyTorch has a separate one for its own products, which is
    off by default.
    """
    _SWITCH.enter(wanted)
    try:
        yield
    finally:
        _SWITCH.leave()


def _set(wanted: bool) -> Callable[[], None]:
    """Set PyTorch's setting; returns a function that restores the old value."""
    matmul: Any = torch.backends.cuda.matmul
    newer = getattr(matmul, "fp32_precision", None)
    try:
        before, level = matmul.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer setting is in use and differs from the older one
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
