"""Chooses the backend and runs it: `run` is the entry point of every recurrence.

Each backend is a package with `operator_for`, which returns the operator of a recurrence, and the
functions `symbol_rows` and `linear_cross_entropy`. By default the input's device selects the
backend; the context manager `backend` overrides that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rbn.ops import cpu, reference
from rbn.ops.compiling import constant_result, exporting_to_onnx
from rbn.ops.definition import Arguments, Definition
from rbn.ops.operator import CallResults, is_traced, needs_grad, without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Backend = Literal["reference", "cpu", "gpu"]
_NAMES: tuple[Backend, ...] = ("reference", "cpu", "gpu")
_BY_DEVICE = {"cpu": "cpu", "cuda": "gpu"}
_OLDEST = (7, 0)  # lowest compute capability that the kernels' compiler supports
_gpu: Any = None  # the module `rbn.ops.gpu`, imported on first use
# The most recently entered block of any thread: a plain global, which torch.compile can guard on.
_forced: str | None = None
_blocks: list[list[str]] = []  # active blocks of all threads, in the order they were entered
_blocks_lock = threading.Lock()


class _Own(threading.local):
    name: str | None = None  # the backend of this thread's innermost block


_own = _Own()


def _asked_for() -> str | None:
    """The backend forced by this thread's innermost `backend` block; None outside of any block."""
    return _forced if torch.compiler.is_compiling() else _own.name


def backends() -> tuple[Backend, ...]:
    """The names that `backend` accepts."""
    return _NAMES


@functools.lru_cache(maxsize=1)
def _load_gpu() -> Any | None:
    """Imports `rbn.ops.gpu`; None if Triton is missing (it ships with torch for CUDA)."""
    try:
        return importlib.import_module("rbn.ops.gpu")
    except ImportError:
        return None


@constant_result
def _has_gpu_kernels(device: int | None) -> bool:
    """Whether the kernels support this CUDA device; None asks only whether they can be loaded."""
    global _gpu
    _gpu = _load_gpu()
    if _gpu is None or torch.version.hip is not None:  # AMD GPUs use other drivers
        return False
    return device is None or _capability(device) >= _OLDEST


@functools.lru_cache(maxsize=64)
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@contextlib.contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Force one implementation inside the ``with`` block, in this thread.

    Functions compiled by `torch.compile` cannot see which thread calls them. They follow the most
    recently entered block of any thread.

    ``"reference"`` runs the plain equations on any device (slow, differentiable any number of
    times); ``"cpu"`` the fused CPU operator, for CPU tensors only; ``"gpu"`` the CUDA kernels, for
    CUDA tensors only. Outside of any block the input's device decides, except under `torch.func`
    and forward-mode differentiation, which use the reference.
    """
    if name not in _NAMES:
        raise ValueError(f"backend must be one of {', '.join(_NAMES)}, got {name!r}")
    global _forced
    if torch.compiler.is_compiling():  # torch.compile can trace neither locks nor threads
        before, _forced = _forced, name
        try:
            yield
        finally:
            _forced = before
        return
    block: list[str] = [name]
    outer, _own.name = _own.name, name
    with _blocks_lock:
        _blocks.append(block)
        _forced = name
    try:
        yield
    finally:
        _own.name = outer
        with _blocks_lock:
            _blocks[:] = [other for other in _blocks if other is not block]
            _forced = _blocks[-1][0] if _blocks else None


def run(
    definition: Definition, calls: Sequence[Arguments], group: ProcessGroup | None = None
) -> list[CallResults]:
    """Run the recurrence. Returns the output, last states and statistics of each call.

    Args:
        definition: the recurrence.
        calls: one call, or several that differ only in the values of their tensors, such as the
            two directions of a layer. The GPU runs them in one launch if they fit.
        group: processes that share the minibatch. Only the reference supports this.
    """
    a = calls[0]
    device = a.input.device.type
    for each in calls:
        definition.check(each, may_be_empty=group is not None)
    if group is None:
        name = backend_for(a.input)
    elif _asked_for() in (None, "reference"):
        name = "reference"
    else:
        raise RuntimeError(
            f'rbn.backend("{_asked_for()}") has no statistics over several processes; only '
            'rbn.backend("reference") does'
        )
    module = _module(name)
    count = len(definition.gradients)
    save = needs_grad([tensor for each in calls for tensor in (*each,)[:count]])
    tf32 = module.tf32_allowed()
    calls = [definition.for_run(each, save, tf32) for each in calls]
    with _autocast_off(device):
        operator = module.operator_for(definition, calls)
        if operator is None:
            return [reference.run(definition, each, group) for each in calls]
        if len(calls) == 1 or module.joins(definition, calls):
            results: list[CallResults] = operator(calls)
            return results
        return [operator([each])[0] for each in calls]


_NOTHING = contextlib.nullcontext()


def _autocast_off(device: str) -> contextlib.AbstractContextManager[Any]:
    """Disables autocast: the operators choose their own dtypes."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _NOTHING
    if torch.compiler.is_compiling():
        return torch.autocast(device, enabled=False)
    return without_autocast(device)


def average_in(terms: Sequence[Sequence[Tensor]], momentum: float, seen: bool = False) -> None:
    """Average a minibatch's statistics into those of the population, in place.

    terms: for each term, the running mean and var, the minibatch's mean and var (all ``[S, F]``),
        and the number of minibatches so far ``[S]``, which grows by one. The first estimate of a
        step replaces the running value.
    seen: whether every step already has an estimate, which is faster on a CPU.
    """
    like = terms[0][0]
    by_kernel = like.is_cuda and _asked_for() in (None, "gpu")
    if by_kernel and not is_traced(like) and not _under_torch_func():
        ready = _has_gpu_kernels(like.device.index or 0)
        if ready and _gpu.average_in(terms, momentum):
            return
    averages = [average for mean, var, *_ in terms for average in (mean, var)]
    new = [value for _, _, mean, var, _ in terms for value in (mean, var)]
    with torch.no_grad():
        if seen:
            torch._foreach_lerp_(averages, new, momentum)
        else:
            for mean, var, new_mean, new_var, count in terms:
                weight = torch.where(count > 0, momentum, mean.new_ones(()))[:, None]
                mean.lerp_(new_mean, weight)
                var.lerp_(new_var, weight)
        # Last, so that nothing is counted if `torch.func` refuses to change the averages.
        torch._foreach_add_([count for *_, count in terms], 1)


def _under_torch_func() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is active.

    A custom operator refuses the former and has no tangents for the latter.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def chosen_by_device() -> bool:
    """Whether only the input's device selects the backend: no `backend` block, no transform."""
    return _asked_for() is None and not _under_torch_func()


def select(function: str, like: Tensor) -> Callable[..., Any]:
    """Look up the function of that name in the backend for a tensor like this one."""
    selected: Callable[..., Any] = getattr(_module(backend_for(like)), function)
    return selected


def gpu_kernels(like: Tensor) -> Any | None:
    """The GPU backend if its kernels support this CUDA tensor's device, else None."""
    return _gpu if _has_gpu_kernels(like.device.index or 0) else None


def _module(name: str) -> Any:
    return {"reference": reference, "cpu": cpu, "gpu": _gpu}[name]


def backend_for(like: Tensor) -> str:
    """The name of the backend that runs for a tensor like this one."""
    device = like.device.type
    forced = _asked_for()
    name = forced or _BY_DEVICE.get(device, "reference")
    if forced is None and torch.compiler.is_compiling() and exporting_to_onnx():
        # On any device: nothing runs, and the exporter replaces these operators by ONNX ones.
        return "cpu"
    if name != "reference" and _under_torch_func():
        if forced is not None:
            raise RuntimeError(
                f'rbn.backend("{name}") does not work under torch.func or forward-mode AD; '
                'only rbn.backend("reference") does'
            )
        name = "reference"
    if name == "cpu" and device != "cpu":
        raise RuntimeError(f'rbn.backend("cpu") was asked for, but the input is on {device}')
    if name == "gpu":
        ready = _has_gpu_kernels((like.device.index or 0) if device == "cuda" else None)
        if ready and (device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"):
            return "gpu"
        if forced is None:
            return "reference"
        if ready:
            raise RuntimeError(f'rbn.backend("gpu") was asked for, but the input is on {device}')
        raise RuntimeError('rbn.backend("gpu") needs triton and a card it supports')
    return name
