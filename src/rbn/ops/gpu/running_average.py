"""Averages minibatch statistics into the population statistics, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rbn.ops.gpu.lstm.prepare_kernels import average
from rbn.ops.gpu.runtime.launch_cache import launch_by_key

_BLOCK = 1024
_TERMS = 3


def average_in(terms: Sequence[Sequence[Tensor]], momentum: float) -> bool:
    """See `rbn.ops.dispatch.average_in`. Returns False if the kernel does not cover the call."""
    count = len(terms)
    if count > _TERMS:
        return False
    tensors: list[Tensor] = []
    changed: list[Tensor] = []
    sizes: list[torch.Size] = []
    for mean, var, new_mean, new_var, seen in terms:
        rows = mean, var, new_mean, new_var
        for row in rows:
            if row.dtype != torch.float32 or not row.is_contiguous():
                return False
        sizes.append(mean.shape)
        tensors += *rows, seen
        changed += mean, var, seen
    missing = _TERMS - count
    tensors += tensors[:5] * missing

    def arguments() -> Any:
        steps, features = ([size[k] for size in sizes] + [0] * missing for k in (0, 1))
        numbers = (*features, *steps, momentum)
        return (max(steps), count), tensors, numbers, {"LARGE": momentum >= 0.5, "BLOCK": _BLOCK}

    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    launch_by_key(average, (*sizes, momentum), addresses, arguments, tensors[0])
    # As in PyTorch's in-place operations, so that autograd detects changes of saved tensors.
    increment_version(changed)
    return True
