"""The statistics of a decoder in `eval()`: how many of its recent training calls to use.

A decoder starts from the states of an encoder. The layer keeps the states of its training calls, so
older ones come from an encoder with older weights. Trains small models that reverse a sequence of
digits with PyTorch's own tools only. After every epoch it validates the same weights with several
statistics of the decoder: running averages, those re-estimated from the last 64 or 256 sequences as
the layer kept them, the default (one of these two), those of the last 256 sequences run through the
whole model again, and exact ones (the entire training set). Prints bits per digit, given the digits
before, and writes benchmarks/results/decoder-statistics.csv.

    python benchmarks/decoder_statistics.py
"""

import argparse
import copy
import csv
import datetime
import itertools
import math
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from fresh_statistics import buffers, with_rows
from torch import nn

import rbn
from rbn.experiments.results import commit
from rbn.nn import recent_calls

RESULTS = Path(__file__).parent / "results" / "decoder-statistics.csv"
KEPT = (64, 256)
ESTIMATES = ("running", *(f"kept_{rows}" for rows in KEPT), "default", "current_256", "exact")
COLUMNS = (
    *("encoder", "batch", "rate", "seed", "epoch", *ESTIMATES),
    *("device", "torch", "date", "commit"),
)
ENCODERS = {"nn.LSTM": nn.LSTM, "BatchNormLSTM": rbn.BatchNormLSTM}
BATCHES = (16, 64)
RATES = ("1e-3", "3e-3", "1e-2")
LENGTH, DIGITS, HIDDEN = 10, 10, 64
SEQUENCES, VALID = 4096, 1000


class EncoderDecoder(nn.Module):
    """Reads digits ``[T, B]`` and predicts them in reverse."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = ENCODERS[encoder](DIGITS, HIDDEN)
        self.decoder = rbn.BatchNormLSTM(DIGITS + 1, HIDDEN)
        self.linear = nn.Linear(HIDDEN, DIGITS)

    def forward(self, digits):
        """The mean cross-entropy of the output digits, in nats."""
        wanted = digits.flip(0)
        before = torch.cat([torch.full_like(digits[:1], DIGITS), wanted[:-1]])
        _, states = self.encoder(F.one_hot(digits, DIGITS).float())
        output, _ = self.decoder(F.one_hot(before, DIGITS + 1).float(), states)
        return F.cross_entropy(self.linear(output).flatten(0, 1), wanted.flatten())


@torch.no_grad()
def validate(model, digits):
    return float(model.eval()(digits)) / math.log(2)


def with_statistics_of(model, batches):
    result = copy.deepcopy(model)
    rbn.update_population_stats(result, batches)
    return result


def evaluate(model, batches, valid):
    """Validation with each estimate. Leaves the model as it is."""
    layers = [module for module in model.modules() if isinstance(module, rbn.BatchNormLSTM)]
    running = [b.clone() for layer in layers for b in buffers(layer)]
    logs = [layer.recent_calls for layer in layers]
    found = {}
    log, newest = model.decoder.recent_calls, recent_calls.ROWS_OF_STATES
    for rows in KEPT:
        recent_calls.ROWS_OF_STATES = rows  # uses all of them
        model.decoder.recent_calls = with_rows(model.decoder, rows)
        found[f"kept_{rows}"] = validate(model, valid)
        model.decoder.recent_calls = log
    recent_calls.ROWS_OF_STATES = newest
    found["default"] = validate(model, valid)
    last = batches[-(256 // batches[0].shape[1]) :]
    found["current_256"] = validate(with_statistics_of(model, last), valid)
    found["exact"] = validate(with_statistics_of(model, batches), valid)
    for layer in layers:
        layer.recent_calls = recent_calls.RecentCalls()  # nothing to refresh from
    old = iter(running)
    for layer in layers:
        for buffer in buffers(layer):
            buffer.copy_(next(old))
    found["running"] = validate(model, valid)
    for layer, log in zip(layers, logs, strict=True):
        layer.recent_calls = log
        log.new_rows = 0
    model.train()
    return [found[name] for name in ESTIMATES]


def run(encoder, batch, rate, seed, epochs):
    torch.manual_seed(seed)
    model = EncoderDecoder(encoder)
    optimizer = torch.optim.Adam(model.parameters(), float(rate))
    digits = torch.randint(DIGITS, (LENGTH, SEQUENCES + VALID))
    train, valid = digits[:, :SEQUENCES], digits[:, SEQUENCES:]
    for epoch in range(1, epochs + 1):
        batches = [train[:, rows] for rows in torch.randperm(SEQUENCES).split(batch)]
        for x in batches:
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        yield epoch, evaluate(model, batches, valid)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = (platform.machine(), torch.__version__, datetime.date.today().isoformat(), commit())
    rows = []
    seeds = map(int, args.seeds.split(","))
    for seed, encoder, batch, rate in itertools.product(seeds, ENCODERS, BATCHES, RATES):
        for epoch, values in run(encoder, batch, rate, seed, args.epochs):
            texts = [f"{value:.4f}" for value in values]
            pairs = [f"{n} {text}" for n, text in zip(ESTIMATES, texts, strict=True)]
            print(encoder, batch, rate, f"seed {seed} epoch {epoch} ", *pairs, flush=True)
            cells = (encoder, batch, rate, seed, epoch, *texts, *about)
            rows.append(dict(zip(COLUMNS, cells, strict=True)))
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
