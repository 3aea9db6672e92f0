"""Times the `grid` and the `portable` kernels of BatchNormLSTM for calls that both support.

Forward and backward of a training call in a CUDA graph, to exclude the host's time.
The selection in ``rbn.ops.gpu.lstm.grid.grid_kernels`` follows this table. Kernels are compiled in
several processes first. Appends to benchmarks/results/families.csv, row by row.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import torch

import rbn
from rbn.experiments.results import commit
from rbn.ops.gpu.lstm import cuda_kernels, plan
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.portable import portable_kernels
from rbn.ops.gpu.lstm.term import Term

BATCHES, HIDDEN = (2, 4, 8, 16, 32), (256, 512, 768, 1000)
SHAPES = [(100, B, 64, H) for B in BATCHES for H in HIDDEN]
SHAPES += [(1024, 16, 512, 512), (1024, 16, 768, 768), (100, 48, 64, 300)]
TYPES = (torch.bfloat16, torch.float32)
FAMILIES = ("portable", "grid")
RESULTS = Path(__file__).parent / "results" / "families.csv"
COLUMNS = ["T", "B", "I", "H", "dtype", *(f"{f}_ms" for f in FAMILIES)]
COLUMNS += ["gpu", "versions", "commit", "date"]


def cases():
    """The shapes and dtypes that both families support and `cluster` does not."""
    for shape in SHAPES:
        for dtype in TYPES:
            T, B, _, H = shape
            term = Term((T, B, 4 * H), dtype, torch.device("cuda", 0))
            both = grid_kernels.fits(term) and portable_kernels.fits(term)
            if both and cluster_kernels.choose(term) is None:
                yield shape, dtype


def training_step(shape, dtype):
    T, B, inputs, H = shape
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(inputs, H, max_length=T, refresh_stats=False)
    layer.to("cuda", dtype)
    x = torch.randn(T, B, inputs, device="cuda", dtype=dtype)
    grad = torch.randn(T, B, H, device="cuda", dtype=dtype)

    def step():
        layer.zero_grad()
        layer(x)[0].backward(grad)

    return step


def milliseconds(step):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 5)
    return statistics.median(times[1:])


def with_family(family):
    grid = grid_kernels.fits if family == "grid" else lambda term: False
    plan._CACHE.clear()
    return mock.patch.object(cuda_kernels, "fits_grid", grid)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=min(13, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)  # which part of the cases
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    origin = [torch.cuda.get_device_name(), versions, commit(), time.strftime("%Y-%m-%d")]
    jobs = [(shape, dtype, family) for shape, dtype in cases() for family in FAMILIES]
    if arguments.compile is not None:
        for shape, dtype, family in jobs[arguments.compile :: arguments.workers]:
            with with_family(family):
                training_step(shape, dtype)()
        return
    command = [sys.executable, __file__, "--workers", str(arguments.workers), "--compile"]
    workers = [subprocess.Popen([*command, str(k)]) for k in range(arguments.workers)]
    for worker in workers:
        worker.wait()
    new = not arguments.out.exists()
    with arguments.out.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(COLUMNS)
            file.flush()
        for shape, dtype in cases():
            found = []
            for family in FAMILIES:
                with with_family(family):
                    found.append(round(milliseconds(training_step(shape, dtype)), 3))
            row = [*shape, str(dtype).removeprefix("torch."), *found]
            writer.writerow([*row, *origin])
            file.flush()
            print(*row, f"grid / portable {found[1] / found[0]:.2f}", flush=True)


if __name__ == "__main__":
    main()
