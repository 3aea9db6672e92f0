"""How much training gains from steps that only a few sequences of a minibatch reach.

The data are digits, read pixel by pixel after noise of random (exponential) length. The longest
sequence of a minibatch is alone for 64 steps on average, and ends with its digit. A BatchNormLSTM
continues the longest sequences with constant statistics (the default) or with their own, in which
case the terms of a single one are 0. Both train at two learning rates, then with three seeds at the
better one. Prints the validation accuracy and writes
benchmarks/results/few-sequences-training.csv.

    python benchmarks/few_sequences_training.py
"""

import argparse
import csv
import datetime
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import rbn
from rbn import data
from rbn.experiments.results import commit
from rbn.nn import batch_normalized

RESULTS = Path(__file__).parent / "results" / "few-sequences-training.csv"
COLUMNS = (
    *("batch", "normalized_with", "rate", "seed", "steps", "valid", "unit"),
    *("cpu", "torch", "date", "commit"),
)
RATES = ("3e-3", "1e-2")
HIDDEN, MEAN, MOST = 48, 64, 320  # units; mean and maximum number of noise pixels


def padded(images, generator):
    """Images ``[64, B, 1]`` after noise of random lengths: ``[T, B, 1]`` and the lengths."""
    before = torch.rand(images.shape[1], generator=generator)
    before = (-MEAN * before.log()).long().clamp(max=MOST)
    sequences = [
        torch.cat([torch.rand(int(n), 1, generator=generator), image])
        for n, image in zip(before, images.unbind(1), strict=True)
    ]
    return nn.utils.rnn.pad_sequence(sequences), before + len(images)


def accuracy(model, head, part):
    """Accuracy in percent on a part of the data, in `eval()`."""
    generator, right = torch.Generator().manual_seed(0), 0
    model.eval()
    with torch.no_grad():
        for rows in torch.arange(len(part)).split(200):
            x, lengths = padded(part.inputs[:, rows], generator)
            logits = head(model(x, lengths=lengths)[1][0][-1])
            right += int((logits.argmax(1) == part.labels[rows]).sum())
    model.train()
    return 100 * right / len(part)


def train(way, batch, rate, seed, steps):
    """Validation accuracy after training; None if it diverged."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    splits = data.digits()
    model, head = rbn.BatchNormLSTM(1, HIDDEN), nn.Linear(HIDDEN, 10)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, float(rate))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, 2 - 2 * k / steps))
    enough_rows = batch_normalized.enough_rows
    if way == "own":
        batch_normalized.enough_rows = lambda batch: 1
    try:
        for _ in range(steps):
            rows = torch.randint(len(splits.train), (batch,), generator=generator)
            x, lengths = padded(splits.train.inputs[:, rows], generator)
            logits = head(model(x, lengths=lengths)[1][0][-1])
            loss = F.cross_entropy(logits, splits.train.labels[rows])
            if not loss.isfinite():
                return None
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
        return accuracy(model, head, splits.valid)
    finally:
        batch_normalized.enough_rows = enough_rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batches", default="4,16", help="batch sizes, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []

    def run(batch, way, rate, seed):
        valid = train(way, batch, rate, seed, args.steps)
        text = "" if valid is None else f"{valid:.2f}"
        facts = batch, way, rate, seed, args.steps, text, "%"
        versions = platform.machine(), torch.__version__, f"{datetime.date.today()}", commit()
        rows.append(dict(zip(COLUMNS, (*facts, *versions), strict=True)))
        print(*facts, flush=True)
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda r: [r[name] for name in COLUMNS[:4]]))
        return -1.0 if valid is None else valid

    best = {}
    for batch in map(int, args.batches.split(",")):
        for way in ("constants", "own"):
            first = {rate: run(batch, way, rate, 1) for rate in RATES}
            best[batch, way] = max(first, key=first.get)
    for seed in range(2, args.seeds + 1):
        for case, rate in best.items():
            run(*case, rate, seed)


if __name__ == "__main__":
    main()
