"""Gradients when few sequences of a minibatch reach the late steps.

Measures the norm of W_h's gradient at initialization for a BatchNormLSTM with 64 units and a
minibatch of 16 sequences: some have all steps, the others 20. Compares the statistics of the few
sequences with the constants that the layer uses instead. Prints the norms and writes
benchmarks/results/few-sequences.csv.

    python benchmarks/few_sequences.py
"""

import csv
import datetime
import platform
from pathlib import Path

import torch

import rbn
from rbn.experiments.results import commit
from rbn.nn import batch_normalized

RESULTS = Path(__file__).parent / "results" / "few-sequences.csv"
COLUMNS = (
    *("steps", "sequences", "statistics", "seed", "gradient_norm"),
    *("cpu", "torch", "date", "commit"),
)


def norm(steps, sequences, seed):
    """The norm of the gradient of the mean of one sequence's last state."""
    torch.manual_seed(seed)
    layer = rbn.BatchNormLSTM(8, 64)
    lengths = [steps] * sequences + [20] * (16 - sequences)
    _, (h, _) = layer(torch.randn(steps, 16, 8), lengths=lengths)
    h[0, 0].mean().backward()
    return layer.weight_hh_l0.grad.norm().item()


def main():
    enough_rows = batch_normalized.enough_rows
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for steps in (300, 600):
            for sequences in (1, 2, 3, 4, 8, 16):
                for name, enough in (("own", lambda batch: 1), ("layer's", enough_rows)):
                    batch_normalized.enough_rows = enough
                    norms = [norm(steps, sequences, seed) for seed in (1, 2, 3)]
                    print(steps, sequences, name, *(f"{value:.1e}" for value in norms), flush=True)
                    for seed, value in enumerate(norms, 1):
                        facts = (steps, sequences, name, seed, f"{value:.1e}")
                        machine = platform.machine(), torch.__version__, datetime.date.today()
                        writer.writerow((*facts, *machine, commit()))


if __name__ == "__main__":
    main()
