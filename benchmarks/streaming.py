"""Times inference and compares with PyTorch's modules: single steps of cells, and folded layers.

A stream is one sequence, fed one step at a time from Python, with the states of the previous step.
A layer gets a full sequence in one call. Modules alternate, so that a slow moment of the machine
affects all of them. Prints a table and writes benchmarks/results/streaming-<device>.csv, row by
row.
"""

import argparse
import contextlib
import csv
import itertools
import platform
import statistics
import time
from pathlib import Path

import torch
from cpu import machine

import rbn
from rbn.experiments.results import commit

UNITS = (128, 512)
SHAPES = [(100, 1, 256, 256), (784, 1, 1, 100), (784, 1, 100, 100), (100, 64, 256, 256)]
SEEN = 20  # steps with population statistics
CHUNK = 25  # steps of a stream per time measurement: within and beyond the statistics
MODES = {"no_grad": torch.no_grad, "grad": contextlib.nullcontext}
RESULTS = Path(__file__).parent / "results"
COLUMNS = [
    *("what", "mode", "T", "B", "I", "H", "median_us", "spread_us", "peer", "ratio"),
    *("device", "versions", "commit", "date"),
]


def cells(units, device):
    """Name, cell in eval(), and the name of its counterpart in torch.nn."""
    torch.manual_seed(0)
    found = {
        "torch.nn.LSTMCell": (torch.nn.LSTMCell(units, units), "torch.nn.LSTMCell"),
        "rbn.BatchNormLSTMCell": (rbn.BatchNormLSTMCell(units, units), "torch.nn.LSTMCell"),
        "rbn.LSTMCell": (rbn.LSTMCell(units, units), "torch.nn.LSTMCell"),
        "rbn.LayerNormLSTMCell": (rbn.LayerNormLSTMCell(units, units), "torch.nn.LSTMCell"),
        "torch.nn.RNNCell": (torch.nn.RNNCell(units, units), "torch.nn.RNNCell"),
        "rbn.BatchNormRNNCell": (rbn.BatchNormRNNCell(units, units), "torch.nn.RNNCell"),
        "torch.nn.GRUCell": (torch.nn.GRUCell(units, units), "torch.nn.GRUCell"),
        "rbn.BatchNormGRUCell": (rbn.BatchNormGRUCell(units, units), "torch.nn.GRUCell"),
    }
    for name, (cell, _) in found.items():
        if name.startswith("rbn.BatchNorm"):
            for step in range(SEEN):
                cell(torch.randn(4, units), None, step)
        cell.to(device).eval()
    return found


def stream(cell, x, states):
    """One chunk of a stream."""
    both = isinstance(cell, (torch.nn.LSTMCell, rbn.LSTMCell, rbn.BatchNormLSTMCell))
    hx = states if both or isinstance(cell, rbn.LayerNormLSTMCell) else states[0]
    takes_step = not isinstance(cell, torch.nn.RNNCellBase)
    for step in range(CHUNK):
        hx = cell(x, hx, step) if takes_step else cell(x, hx)


def layers(shape, device):
    """Name and layer in eval(), for one shape."""
    steps, _, inputs, hidden = shape
    torch.manual_seed(0)
    trained = rbn.BatchNormLSTM(inputs, hidden)
    trained(torch.randn(steps, 8, inputs))
    found = {
        "torch.nn.LSTM": torch.nn.LSTM(inputs, hidden),
        "rbn.BatchNormLSTM": trained,
        "rbn.FoldedLSTM": rbn.fold(trained),
    }
    return {name: layer.to(device).eval() for name, layer in found.items()}


def microseconds(functions, repeats, calls, device):
    """Median and spread (quartiles) of each function in microseconds for one of its calls."""
    # With one thread use processor time, which excludes other processes on a busy machine.
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    samples = {name: [] for name in functions}
    for round_ in range(repeats + 2):
        for name, function in functions.items():
            wait(device)
            start = clock()
            function()
            wait(device)
            if round_ >= 2:  # the first rounds warm up
                samples[name].append((clock() - start) / calls * 1e6)
    found = {}
    for name, values in samples.items():
        quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [0, 0, 0]
        found[name] = (statistics.median(values), quarters[2] - quarters[0])
    return found


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def measure_streams(units, mode, repeats, device):
    x, h, c = (torch.randn(1, units, device=device) for _ in range(3))
    found = cells(units, device)
    functions = {
        name: lambda cell=cell: stream(cell, x, (h, c)) for name, (cell, _) in found.items()
    }
    with MODES[mode]():
        times = microseconds(functions, repeats, CHUNK, device)
    for name, (_, peer) in found.items():
        yield {
            **{"what": name, "mode": mode, "T": 1, "B": 1, "I": units, "H": units, "peer": peer},
            **numbers(times, name, peer),
        }


def measure_layers(shape, repeats, device):
    steps, batch, inputs, hidden = shape
    x = torch.randn(steps, batch, inputs, device=device)
    found = layers(shape, device)
    functions = {name: lambda layer=layer: layer(x) for name, layer in found.items()}
    with torch.no_grad():
        times = microseconds(functions, repeats, 1, device)
    peer = "torch.nn.LSTM"
    for name in found:
        yield {
            **{"what": name, "mode": "no_grad", "T": steps, "B": batch, "I": inputs, "H": hidden},
            **{"peer": peer, **numbers(times, name, peer)},
        }


def numbers(times, name, peer):
    median, spread = times[name]
    ratio = round(median / times[peer][0], 3)
    return {"median_us": round(median, 1), "spread_us": round(spread, 1), "ratio": ratio}


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=101, help="timed chunks of each stream")
    parser.add_argument("--layer-repeats", type=int, default=11, help="timed calls of each layer")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if min(arguments.repeats, arguments.layer_repeats, arguments.threads) < 1:
        parser.error("--repeats, --layer-repeats and --threads must be at least 1")
    torch.set_num_threads(arguments.threads)
    device = arguments.device
    cuda = device == "cuda"
    versions = (
        f"rbn {rbn.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    common = {
        "device": torch.cuda.get_device_name() if cuda else machine(),
        "versions": versions + (f", CUDA {torch.version.cuda}" if cuda else ""),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"{common['device']}; {common['versions']}\n")
    print(f"{'T,B,I,H':>15}  {'what':<24}{'mode':<9}{'median us':>11}{'ratio':>8}")
    streams = (
        row
        for units in UNITS
        for mode in MODES
        for row in measure_streams(units, mode, arguments.repeats, device)
    )
    whole = (r for shape in SHAPES for r in measure_layers(shape, arguments.layer_repeats, device))
    out = arguments.out or RESULTS / f"streaming-{device}.csv"
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in itertools.chain(streams, whole):
        rows.append({**row, **common})
        write(out, rows)
        shape = ",".join(str(row[k]) for k in "TBIH")
        print(
            f"{shape:>15}  {row['what']:<24}{row['mode']:<9}{row['median_us']:>11}"
            f"{row['ratio']:>8.2f}",
            flush=True,
        )
    print(f"\nwritten to {out}")


if __name__ == "__main__":
    main()
