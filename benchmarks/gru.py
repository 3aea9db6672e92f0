"""The effect of normalization on a GRU: `rbn.BatchNormGRU` and `torch.nn.GRU` on small tasks.

The tasks are digits in order and permuted, read pixel by pixel, and characters of Python's
documentation. Both layers train for the same number of steps with Adam at four learning rates,
which decay to 0 over the second half, then with two more seeds at the rate with the best validation
result. Prints results
and writes benchmarks/results/gru.csv.

    python benchmarks/gru.py
"""

import argparse
import csv
import datetime
import math
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from fresh_statistics import Characters, Images
from torch import nn

import rbn
from rbn import data
from rbn.experiments.results import commit

RESULTS = Path(__file__).parent / "results" / "gru.csv"
COLUMNS = (
    *("task", "model", "rate", "seed", "steps", "valid", "unit"),
    *("cpu", "torch", "date", "commit"),
)
MODELS = {"nn.GRU": nn.GRU, "BatchNormGRU": rbn.BatchNormGRU}
RATES = ("1e-3", "3e-3", "1e-2", "3e-2")
STEPS = {"digits": 600, "pdigits": 600, "pydoc": 1000}


class Network(nn.Module):
    """The recurrent layer and a linear layer, at every step or only at the last."""

    def __init__(self, layer, outputs, last):
        super().__init__()
        self.gru, self.linear, self.last = layer, nn.Linear(layer.hidden_size, outputs), last

    def forward(self, x):
        if not x.is_floating_point():
            x = F.one_hot(x, self.gru.input_size).float()
        output, _ = self.gru(x)
        return self.linear(output[-1] if self.last else output)


def make(task, model):
    """The task of fresh_statistics.py with a GRU."""
    if task == "pydoc":
        text = data.pydoc()
        result = Characters(text, 128, 65, 32, "cpu")
        symbols = len(text.symbols)
        result.model = Network(MODELS[model](symbols, 128), symbols, False)
    else:
        result = Images(data.digits(task == "pdigits"), 64, "cpu")
        result.model = Network(MODELS[model](1, 64), 10, True)
    return result


def train(task, model, rate, seed, steps):
    """The validation result after training, and its unit; None if it diverged."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    job = make(task, model)
    parameters = list(job.model.parameters())
    optimizer = torch.optim.Adam(parameters, float(rate))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, 2 - 2 * k / steps))
    done = 0
    while done < steps:
        for batch in job.batches(generator):
            loss = job.loss(batch)
            if not loss.isfinite():
                return None, job.unit
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            done += 1
            if done == steps:
                break
    value = float(job.validate(job.model.eval()))
    return (value if math.isfinite(value) else None), job.unit


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=list(STEPS), help="digits, pdigits, pydoc")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []

    def run(task, model, rate, seed):
        valid, unit = train(task, model, rate, seed, STEPS[task])
        text = "" if valid is None else f"{valid:.4f}"
        facts = task, model, rate, seed, STEPS[task], text, unit
        versions = platform.machine(), torch.__version__, f"{datetime.date.today()}", commit()
        rows.append(dict(zip(COLUMNS, (*facts, *versions), strict=True)))
        print(*facts, flush=True)
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        if valid is None:
            return math.inf
        return -valid if unit == "%" else valid

    for task in args.tasks:
        for model in MODELS:
            first = {rate: run(task, model, rate, 1) for rate in RATES}
            best = min(first, key=first.get)
            for seed in range(2, args.seeds + 1):
                run(task, model, best, seed)


if __name__ == "__main__":
    main()
