"""Times the layers and torch.nn.LSTM on this CPU, in one run.

For each shape and layer: the forward pass, forward and backward together, and the peak memory
of a training step (in a separate process). Prints a table and writes
benchmarks/results/cpu.csv, row by row.
"""

import argparse
import csv
import gc
import json
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import rbn
from rbn.experiments.results import commit

SHAPES = [
    (64, 100, 1, 100),
    (784, 100, 1, 100),
    (100, 64, 50, 256),
    (100, 64, 50, 1000),
]  # T, B, I, H
LAYERS = {
    "torch.nn.LSTM": torch.nn.LSTM,
    "rbn.LSTM": rbn.LSTM,
    "rbn.BatchNormLSTM": rbn.BatchNormLSTM,
    "rbn.LayerNormLSTM": rbn.LayerNormLSTM,
    "eager loop, BN-LSTM": rbn.BatchNormLSTM,  # the plain equations, an autograd node per operation
}
PEER, LOOP = "torch.nn.LSTM", "eager loop, BN-LSTM"
RESULTS = Path(__file__).parent / "results" / "cpu.csv"
COLUMNS = [
    "shape",
    "what",
    "fwd_ms",
    "fwdbwd_ms",
    "peak_mb",
    "ratio_to_nn_lstm",
    "machine",
    "versions",
    "commit",
    "date",
]


class Case:
    """One layer on one shape, ready to run."""

    def __init__(self, what, shape):
        steps, batch, inputs, hidden = shape
        torch.manual_seed(0)
        self.backend = "reference" if what == LOOP else "cpu"
        self.layer = LAYERS[what](inputs, hidden)
        self.x = torch.randn(steps, batch, inputs)
        self.grad = torch.randn(steps, batch, hidden)

    def forward(self):
        with rbn.backend(self.backend):
            return self.layer(self.x)[0]

    def forward_backward(self):
        self.layer.zero_grad()
        self.forward().backward(self.grad)


def seconds(function):
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def time_shape(shape, repeats, loop):
    """Medians in milliseconds. The layers alternate, so that a slow moment affects all of them."""
    cases = {what: Case(what, shape) for what in LAYERS if what != LOOP or loop}
    samples = {what: ([], []) for what in cases}
    for round_ in range(repeats + 1):
        for what, case in cases.items():
            if what == LOOP and round_ > 2:
                continue
            forward, both = seconds(case.forward), seconds(case.forward_backward)
            if round_ > 0:  # the first round warms up
                samples[what][0].append(forward * 1e3)
                samples[what][1].append(both * 1e3)
    return {what: tuple(map(statistics.median, pair)) for what, pair in samples.items()}


def peak_memory(what, shape):
    """Peak increase of a fresh process's resident memory by a training step, in MiB."""
    command = [sys.executable, __file__, "--memory-of", json.dumps([what, shape])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure_memory(what, shape):
    warm = Case(what, (3, 8, shape[2], 16))  # loads what the first call loads
    warm.forward_backward()
    case = Case(what, shape)
    before = high_water()
    case.forward_backward()
    return high_water() - before


def high_water():
    """The peak resident memory of this process so far, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # a child's ru_maxrss starts at its parent's
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 2**20


def machine():
    """The processor's name and the number of torch's threads."""
    name = platform.processor() or platform.machine()
    for command in (["lscpu"], ["sysctl", "machdep.cpu.brand_string"]):
        try:
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        names = re.findall(r"(?:Model name|brand_string):\s*(.+)", lines)
        if names:
            name = f"{names[0].strip()} ({platform.machine()})"
            break
    return f"{name}, {torch.get_num_threads()} threads"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds per shape")
    parser.add_argument("--threads", type=int, help="number of torch's threads")
    parser.add_argument("--no-loop", action="store_true", help="skip the slow eager loop")
    parser.add_argument("--no-memory", action="store_true", help="time only, no fresh processes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print(measure_memory(*json.loads(arguments.memory_of)))
        return

    versions = (
        f"rbn {rbn.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    facts = {
        "machine": machine(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    print(f"{facts['machine']}; {versions}\n")
    header = f"{'shape T,B,I,H':>17}  {'what':<20}{'fwd ms':>10}{'fwd+bwd ms':>12}{'peak MiB':>10}"
    print(header + f"{'ratio':>7}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for shape in SHAPES:
        times = time_shape(shape, arguments.repeats, not arguments.no_loop)
        for what, (forward, both) in times.items():
            row = {
                "shape": "x".join(map(str, shape)),
                "what": what,
                "fwd_ms": round(forward, 2),
                "fwdbwd_ms": round(both, 2),
                "peak_mb": "" if arguments.no_memory else round(peak_memory(what, shape), 1),
                "ratio_to_nn_lstm": round(both / times[PEER][1], 3),
                **facts,
            }
            rows.append(row)
            with arguments.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
            print(
                f"{row['shape']:>17}  {what:<20}{forward:>10.1f}{both:>12.1f}"
                f"{row['peak_mb']:>10}{row['ratio_to_nn_lstm']:>7.2f}",
                flush=True,
            )
    print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
