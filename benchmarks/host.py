"""Host overhead of a GPU layer's call: PyTorch operations and microseconds.

Needs no GPU: the kernels, and the matrix products around them, are stand-ins that do nothing, and
tensors are small and on the CPU. So the times are those of Python and PyTorch's
dispatch, without the driver. Use them only to compare two versions of the source on one machine.
"""

import argparse
import contextlib
import csv
import functools
import importlib
import os
import sys
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import torch
import torch.nn.functional as F
from machine import cpu
from torch.profiler import ProfilerActivity, profile

import rbn
from rbn.experiments.results import commit

T, B, I, H = 3, 16, 8, 8  # noqa: E741
RESULTS = Path(__file__).parent / "results" / "host.csv"
COLUMNS = (
    *("layer", "directions", "kernels", "dtype", "call", "operations", "allocations", "launches"),
    *("python_calls", "us", "cpu", "versions", "commit", "date"),
)
_launched = [0]  # kernels and products


class _Kernel:
    at_once, cluster, together = 1000, 0, True

    def launch(self, *arguments):
        _launched[0] += 1


class _Compiled:
    packed_metadata = ()

    def __getitem__(self, grid):
        return _count


class _Triton:
    arg_names = ()

    def __getitem__(self, grid):
        return self._run

    def _run(self, *arguments, **flags):
        _launched[0] += 1
        return _Compiled()


def _count(*arguments):
    _launched[0] += 1


def _linear(x, weight):
    _launched[0] += 1
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _mm(a, b, out=None):
    _launched[0] += out is not None
    return _product(a, b) if out is None else out


def _product(a, b):
    _launched[0] += 1
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _average_in(traced, kernel, terms, momentum, seen):
    if torch.compiler.is_compiling():
        return traced(terms, momentum, seen)
    return kernel(terms, momentum)


@contextlib.contextmanager
def stand_ins(kernels="portable"):
    """Make the CUDA C++ kernels of one family accept every call and do nothing, like products."""
    backward, cuda_kernels, forward, plan, prepare, prepare_kernels = (
        importlib.import_module(f"rbn.ops.gpu.lstm.{name}")
        for name in ("backward", "cuda_kernels", "forward", "plan", "prepare", "prepare_kernels")
    )
    portable_kernels = importlib.import_module("rbn.ops.gpu.lstm.portable.portable_kernels")
    cluster_kernels = importlib.import_module("rbn.ops.gpu.lstm.cluster.cluster_kernels")
    row_counts, running_average, sequence_statistics = (
        importlib.import_module(f"rbn.ops.gpu.{name}")
        for name in ("row_counts", "running_average", "sequence_statistics")
    )
    averages = importlib.import_module("rbn.nn.statistics")
    with contextlib.ExitStack() as stack:
        if kernels == "cluster":
            tiling = cluster_kernels.cluster_tiling(torch.bfloat16, B, H)
            stack.enter_context(mock.patch.object(cluster_kernels, "choose", return_value=tiling))
        for target, name, value in (
            (cuda_kernels, "family", lambda term, a: cuda_kernels.fastest(term)),
            (portable_kernels, "_fits", lambda *sizes: True),
            (portable_kernels, "kernel", lambda *sizes: _Kernel()),
            (cluster_kernels, "cluster_of", lambda *sizes: 1),
            (cluster_kernels, "kernel", lambda *sizes: _Kernel()),
            # The kernel for running averages, which a layer on a CPU does not use.
            (
                averages,
                "average_in",
                functools.partial(_average_in, averages.average_in, running_average.average_in),
            ),
            (running_average, "average", _Triton()),
            (plan, "_CACHE", {}),
            (plan, "_fits_side_by_side", lambda a, count: True),
            (prepare, "begin", _Triton()),
            (prepare, "input_moments", _Triton()),
            (prepare, "write_constants", _Triton()),
            (row_counts, "count_rows", _Triton()),
            (sequence_statistics, "subtract_spread", _Triton()),
            (backward, "finish", _Triton()),
            (forward, "last_states", _Triton()),
            (prepare_kernels, "begin_backward", _Triton()),
            (F, "linear", _linear),
            (torch, "matmul", _product),
            (torch, "mm", _mm),
            (torch, "bmm", _product),
            (torch, "addmm", lambda c, a, b: _product(a, b)),
            (torch, "baddbmm", lambda c, a, b: _product(a, b)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(rbn.backend("gpu"))
        yield


def calls(make, directions, dtype=torch.bfloat16):
    """The three calls of a layer by name, each in its mode."""
    options = {"max_length": T} if make is rbn.BatchNormLSTM else {}
    layer = make(I, H, bidirectional=directions == 2, **options).to(dtype)
    x = torch.randn(T, B, I, dtype=dtype)
    grad = torch.randn(T, B, H * directions, dtype=dtype)

    def forward():
        layer(x)

    def both():
        layer.zero_grad()
        layer(x)[0].backward(grad)

    def infer():
        with torch.no_grad():
            layer(x)

    layer.train()
    yield "forward", forward
    yield "forward and backward", both
    layer.eval()
    yield "inference", infer


def operations(function):
    """Number of PyTorch operations of a call, not counting those inside others."""
    return counts(function)["operations"]


def counts(function):
    """PyTorch's operations, allocations, launches and Python's calls of one call."""
    for _ in range(3):
        function()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    found = [e for e in seen.events() if e.name.startswith("aten::")]
    outer = [e for e in found if not (e.cpu_parent and e.cpu_parent.name.startswith("aten::"))]
    allocated = [e for e in found if e.name in ("aten::empty", "aten::empty_strided")]
    # Copies and fills without a stand-in are launches, too.
    filled = [e for e in found if e.name in ("aten::copy_", "aten::fill_", "aten::zero_")]
    before, calls = _launched[0], [0]

    def count(frame, event, argument):
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    function()
    sys.setprofile(None)
    return {
        "operations": len(outer),
        "allocations": len(allocated),
        "launches": _launched[0] - before + len(filled),
        "python_calls": calls[0],
    }


def microseconds(function, repeats):
    """The fastest of some rounds, in processor time: other work can only add to it."""
    rounds = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(30):
            function()
        rounds.append((time.process_time() - began) / 30 * 1e6)
    return min(rounds)


def rows(repeats):
    """A row of the table for each layer and call."""
    origin = [cpu(), f"torch {torch.__version__}", commit(), time.strftime("%Y-%m-%d")]
    for kernels in ("cluster", "portable"):
        with stand_ins(kernels):
            for make, directions, dtype in (
                (rbn.LSTM, 1, torch.bfloat16),
                (rbn.LSTM, 2, torch.bfloat16),
                (rbn.BatchNormLSTM, 1, torch.bfloat16),
                (rbn.BatchNormLSTM, 1, torch.float32),
                (rbn.BatchNormLSTM, 2, torch.bfloat16),
            ):
                name = str(dtype).removeprefix("torch.")
                for call, function in calls(make, directions, dtype):
                    found = counts(function).values()
                    us = round(microseconds(function, repeats))
                    yield [make.__name__, directions, kernels, name, call, *found, us, *origin]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="number of rounds of 30 calls")
    parser.add_argument("--add", action="store_true", help=f"add the table to {RESULTS.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for row in rows(arguments.repeats):
        table.append(row)
        print("".join(f"{value!s:<15}" for value in row[:4]), f"{row[4]:<22}", *row[5:10])
    if arguments.add:
        new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            csv.writer(file).writerows(([COLUMNS] if new else []) + table)


if __name__ == "__main__":
    main()
