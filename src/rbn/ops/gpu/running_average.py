"""Averages minibatch statistics into the population statistics, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rbn.ops.gpu.lstm.prepare_kernels import average
from rbn.ops.gpu.runtime.launch_cache import launch_cached

_BLOCK = 1024
_TERMS = 3


def average_in(terms: Sequence[Sequence[Tensor]], momentum: float) -> bool:
    """See `rbn.ops.dispatch.average_in`. Returns False if the kernel does not cover the call."""
    if len(terms) > _TERMS:
        return False
    features, steps = [], []
    for *rows, count in terms:
        for row in rows:
            if row.dtype != torch.float32 or not row.is_contiguous():
                return False
        features.append(rows[0].shape[1])
        steps.append(count.numel())
    missing = _TERMS - len(terms)
    tensors = [tensor for term in (*terms, *[terms[0]] * missing) for tensor in term]
    launch_cached(
        average,
        (max(steps), len(terms)),
        tuple([tensor.data_ptr() for tensor in tensors]),
        lambda: tensors,
        (*features, *[0] * missing, *steps, *[0] * missing, momentum),
        {"LARGE": momentum >= 0.5, "BLOCK": _BLOCK},
        (),
        tensors[0],
    )
    # Like PyTorch's in-place operations: autograd notices if it saved one of these tensors.
    increment_version([old for mean, var, *_, count in terms for old in (mean, var, count)])
    return True
