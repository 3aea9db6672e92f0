"""Times a training step of a batch-normalized LSTM with one process and with two, on this CPU.

Forward and backward of one layer: the full batch in one process, or half of it in each of two that
exchange gradients (gloo, DDP), with statistics per process or over both. Counts the numbers that
are exchanged for statistics, and the time spent on that. Writes benchmarks/results/scaling.csv.
"""

import argparse
import contextlib
import csv
import os
import platform
import re
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rbn
from rbn.experiments.results import commit
from rbn.training import launch
from rbn.training.world import ddp_options

SHAPES = {"digits": (64, 1, 100), "medium": (100, 50, 256)}  # T, I, H
BATCHES = {"digits": (16, 100, 400), "medium": (16, 64)}
RESULTS = Path(__file__).parent / "results" / "scaling.csv"
SIZES = ("shape", "T", "B", "I", "H")
COLUMNS = [
    *(*SIZES, "what", "processes", "threads", "step_ms", "median_ms", "exchange_ms", "exchanges"),
    *("statistics_bytes", "gradient_bytes", "machine", "versions", "commit", "date"),
]


def exchanged(T, H):
    """How many numbers a process sends for the statistics of a step, and in how many messages."""
    forward = T * (2 * 4 * H + 1) + T * (2 * 4 * H + 1) + T * (2 * H + 1)  # x, h, c
    backward = T * 2 * 4 * H + T * 2 * 4 * H + T * 2 * H
    identical = (2 * H + 2) + (4 * H + 1)  # whether all rows are, at first and after step 1
    return forward + backward + identical, 2 * (2 * T + 1) + 2


class Counter:
    """Counts the messages for statistics, their numbers, and the time spent on them."""

    def __init__(self):
        self.seconds, self.messages, self.numbers = 0.0, 0, 0
        self.real = dist.all_gather, dist.all_reduce
        dist.all_gather = lambda out, own, **k: self._call(0, own, out, own, **k)
        dist.all_reduce = lambda own, *a, **k: self._call(1, own, own, *a, **k)

    def _call(self, which, own, *arguments, **options):
        began = time.perf_counter()
        self.real[which](*arguments, **options)
        self.seconds += time.perf_counter() - began
        if own.is_floating_point():  # not those that agree on the number of steps
            self.messages += 1
            self.numbers += own.numel()

    def close(self):
        dist.all_gather, dist.all_reduce = self.real


def step_of(shape, rows, sync=False, wrap=False, exchange=True):
    """A training step of a layer on this many rows."""
    T, I, H = shape  # noqa: E741
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(I, H, max_length=T, sync_stats=sync)
    model = DistributedDataParallel(layer, **ddp_options()) if wrap else layer
    x, grad = torch.randn(T, rows, I), torch.randn(T, rows, H)

    def step():
        layer.zero_grad()
        with contextlib.nullcontext() if exchange else model.no_sync():
            model(x)[0].backward(grad)

    return step, sum(p.numel() for p in layer.parameters())


def measured(step, repeats, meet=lambda: None, counter=None):
    """Minimum and median of some repeats in milliseconds, and the exchanges of the fastest.

    The minimum counts, because other work on the machine can only add to it.
    """
    samples = []
    for k in range(repeats + 2):
        meet()
        before = counter.seconds if counter else 0.0
        began = time.perf_counter()
        step()
        if k >= 2:
            spent = (counter.seconds if counter else 0.0) - before
            samples.append(((time.perf_counter() - began) * 1e3, spent * 1e3))
    samples.sort()
    found = {"step_ms": samples[0][0], "median_ms": samples[len(samples) // 2][0]}
    return found | ({"exchange_ms": samples[0][1]} if counter else {})


def two_processes(shape, batch, repeats, path):
    """The work of each of two processes; the first one saves the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = batch // 2
    lines = []
    for what, options in (
        ("two, statistics of each", {}),
        ("two, gradients kept", {"exchange": False}),
        ("two, statistics of both", {"sync": True}),
    ):
        step, parameters = step_of(shape, rows, wrap=True, **options)
        step()
        line = {"what": what, "processes": 2, "threads": 1}
        if "exchange" not in options:
            line["gradient_bytes"] = 4 * parameters
        if "sync" in options:
            counter = Counter()
            step()
            assert (counter.numbers, counter.messages) == exchanged(shape[0], shape[2])
            line["exchanges"], line["statistics_bytes"] = counter.messages, 4 * counter.numbers
            line |= measured(step, repeats, dist.barrier, counter)
            counter.close()
        else:
            line |= measured(step, repeats, dist.barrier)
        lines.append(line)
    if dist.get_rank() == 0:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(lines)
    dist.barrier()
    dist.destroy_process_group()


def one_process(shape, batch, repeats):
    """The full batch with one thread and two, and half of it with the plain equations."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        yield {"what": "one", "threads": threads} | measured(step_of(shape, batch)[0], repeats)
    torch.set_num_threads(1)
    with rbn.backend("reference"):
        line = measured(step_of(shape, batch // 2)[0], repeats)
    yield {"what": "one, half of it, plain equations", "threads": 1} | line


def on_cpu(repeats, out, facts):
    os.environ["OMP_NUM_THREADS"] = "1"
    part = out.with_suffix(".part")
    for name, shape in SHAPES.items():
        for batch in BATCHES[name]:
            lines = list(one_process(shape, batch, repeats))
            launch(two_processes, (shape, batch, repeats, str(part)), 2)
            with part.open(newline="") as file:
                lines += [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
            part.unlink()
            for line in lines:
                sizes = (name, shape[0], batch, *shape[1:])
                row = dict(zip(SIZES, sizes, strict=True)) | {"processes": 1} | line | facts
                for key in ("step_ms", "median_ms", "exchange_ms"):
                    if row.get(key):
                        row[key] = round(float(row[key]), 3)
                print(f"{name:>8} {batch:>5} {row['what']:<34} {row['step_ms']:>10}", flush=True)
                yield row


def machine():
    found = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    names = re.findall(r"Model name:\s*(.+)", found)
    return f"{names[0].strip() if names else platform.machine()}, {os.cpu_count()} cores"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    facts = {
        "machine": machine(),
        "versions": f"rbn {rbn.__version__}, torch {torch.__version__}",
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in on_cpu(arguments.repeats, arguments.out, facts):
            writer.writerow(row)
    print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
