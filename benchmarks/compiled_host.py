"""Host overhead of torch.compile for a layer's call: microseconds, eager and compiled.

Like `host.py`, it needs no GPU: kernels and products are stand-ins that do nothing. nn.LSTM runs on
the CPU for comparison. The modes alternate, and the minimum of many calls counts. Prints a table;
`--add` adds it to benchmarks/results/compiled-host.csv.
"""

import argparse
import csv
import time
from pathlib import Path

import host
import torch
import torch._inductor.compile_fx  # before the stand-ins, which replace some of what it reads

import rbn
from rbn.experiments.results import commit


def one_graph(layer):
    """Made in a function, so that its graph and the compiled layer share nothing."""
    return torch.compile(lambda x: layer(x), fullgraph=True)


def unguarded(layer):
    """One graph without guard checks, for programs that never change."""
    run = one_graph(layer)

    def call(x):
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            return run(x)

    return call


class Empty(torch.nn.Module):
    def forward(self):
        pass


def beside_empty(layer):
    """The eager layer after a compiled module that does nothing: the cost of torch.compile."""
    empty = torch.compile(Empty())

    def call(x):
        empty()
        return layer(x)

    return call


MODES = {
    "eager": lambda layer: layer,
    "compiled": torch.compile,
    "empty compiled module, eager": beside_empty,
    "fullgraph": one_graph,
    "fullgraph, guards skipped": unguarded,
}
RESULTS = Path(__file__).parent / "results" / "compiled-host.csv"
COLUMNS = ["layer", "call", "mode", "us", "cpu", "versions", "commit", "date"]


def calls(chosen):
    """The calls to time in these modes, by layer, kind and mode."""
    x = torch.randn(host.T, host.B, host.I, dtype=torch.bfloat16)
    grad = torch.randn(host.T, host.B, host.H, dtype=torch.bfloat16)
    functions = {}
    for make, modes in (
        (rbn.BatchNormLSTM, MODES),
        (rbn.LSTM, MODES),
        (torch.nn.LSTM, list(MODES)[:3]),
    ):
        options = {"max_length": host.T} if make is rbn.BatchNormLSTM else {}
        layer = make(host.I, host.H, **options).to(torch.bfloat16)
        name = "nn.LSTM" if make is torch.nn.LSTM else make.__name__
        for mode in (mode for mode in modes if mode in chosen):
            run = MODES[mode](layer)

            def forward(run=run):
                run(x)

            def both(run=run, layer=layer):
                layer.zero_grad()
                run(x)[0].backward(grad)

            functions[name, "forward", mode] = forward
            functions[name, "forward and backward", mode] = both
    return functions


def least(functions, rounds):
    """The minimum processor time of each function in microseconds; the functions alternate."""
    for function in functions.values():
        for _ in range(5):
            function()
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for key, function in functions.items():
            for _ in range(4):
                began = time.process_time()
                function()
                best[key] = min(best[key], (time.process_time() - began) * 1e6)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--add", action="store_true", help=f"add the table to {RESULTS.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with host.stand_ins("cluster"):
        best = least(calls(arguments.modes), arguments.rounds)
    origin = [host.cpu(), f"torch {torch.__version__}", commit(), time.strftime("%Y-%m-%d")]
    table = [[*key, round(us), *origin] for key, us in best.items()]
    for row in table:
        print(f"{row[0]:<14} {row[1]:<21} {row[2]:<28} {row[3]}")
    if arguments.add:
        new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            csv.writer(file).writerows(([COLUMNS] if new else []) + table)


if __name__ == "__main__":
    main()
