"""What the host does around a GPU kernel: PyTorch operations and microseconds of a layer's call.

Needs no GPU: the kernels, and the matrix products around them, are stand-ins that do nothing, and
tensors are small and on the CPU. So the times are those of Python and of making operations ready,
without a driver's share; they compare two states of the source on one machine, no more.
"""

import argparse
import contextlib
import importlib
import os
import statistics
import time
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import rbn

T, B, I, H = 3, 16, 8, 8  # noqa: E741


class _Kernel:
    at_once, cluster, together = 1000, 0, True

    def launch(self, *arguments):
        pass


class _Compiled:
    packed_metadata = ()

    def __getitem__(self, grid):
        return lambda *arguments: None


class _Triton:
    arg_names = ()

    def __getitem__(self, grid):
        return lambda *arguments, **flags: _Compiled()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad):
        return None, torch.empty_like(ctx.saved_tensors[0])


def _linear(x, weight):
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _mm(a, b, out=None):
    return _product(a, b) if out is None else out


def _product(a, b):
    return a.new_empty(*a.shape[:-1], b.shape[-1])


@contextlib.contextmanager
def stand_ins():
    """The kernels in CUDA C++ take every call, and do nothing; nor do products."""
    backward, constant_terms, cuda_kernels, forward, plan, prepare = (
        importlib.import_module(f"rbn.ops.gpu.lstm.{name}")
        for name in ("backward", "constant_terms", "cuda_kernels", "forward", "plan", "prepare")
    )
    portable_kernels = importlib.import_module("rbn.ops.gpu.lstm.portable.portable_kernels")
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (cuda_kernels, "covers", lambda term, a: True),
            (portable_kernels, "_fits", lambda *sizes: True),
            (portable_kernels, "kernel", lambda *sizes: _Kernel()),
            (plan, "_CACHE", {}),
            (plan, "_fits_side_by_side", lambda a, count: True),
            (prepare, "begin", _Triton()),
            (backward, "finish", _Triton()),
            (forward, "input_moments", _Triton()),
            (forward, "last_states", _Triton()),
            (constant_terms, "kernel", _Triton()),
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
    """The three calls of a layer, by name, each in the mode that it is for."""
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
    """How many of PyTorch's operations a call makes, not counting those inside of others."""
    for _ in range(3):
        function()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    found = [e for e in seen.events() if e.name.startswith("aten::")]
    return sum(not (e.cpu_parent and e.cpu_parent.name.startswith("aten::")) for e in found)


def microseconds(function, repeats):
    """The fastest of some rounds, in processor time: others at work on the machine only add."""
    rounds = []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(30):
            function()
        rounds.append((time.process_time() - began) / 30 * 1e6)
    return min(rounds), statistics.median(rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="rounds of 30 calls")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    head = f"{'layer':<15}{'directions':>11}  {'call':<22}{'operations':>11}"
    print(head + f"{'us, least':>11}{'median':>8}")
    with stand_ins():
        for make in (rbn.LSTM, rbn.BatchNormLSTM):
            for directions in (1, 2):
                for name, function in calls(make, directions):
                    count = operations(function)
                    least, median = microseconds(function, arguments.repeats)
                    print(
                        f"{make.__name__:<15}{directions:>11}  {name:<22}{count:>11}"
                        f"{least:>11.0f}{median:>8.0f}"
                    )


if __name__ == "__main__":
    main()
