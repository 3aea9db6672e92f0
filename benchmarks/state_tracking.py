"""A task on which a state must be kept exactly: running sums modulo 3 of digits from 0 to 2.

Trains `torch.nn.LSTM`, `rbn.BatchNormLSTM` and `rbn.LayerNormLSTM` to name the sum after every
digit, for the same number of steps with Adam at four learning rates and three seeds. The rate
decays to 0 over the second half. Validates during training, with `eval()` as in any training loop.
Prints accuracies and the first step that reaches the goal of 99 %, and writes
benchmarks/results/state-tracking.csv, replacing the rows of the same tasks.

    python benchmarks/state_tracking.py
"""

import argparse
import csv
import datetime
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rbn
from rbn.experiments.results import commit

RESULTS = Path(__file__).parent / "results" / "state-tracking.csv"
COLUMNS = (
    *("task", "model", "rate", "seed", "steps", "valid", "test", "goal_step", "diverged_at"),
    *("cpu", "torch", "date", "commit"),
)
RATES = ("1e-3", "3e-3", "1e-2", "3e-2")
MODELS = {
    "nn.LSTM": nn.LSTM,
    "BatchNormLSTM": rbn.BatchNormLSTM,
    "LayerNormLSTM": rbn.LayerNormLSTM,
}
LENGTH, SHORTEST, DIGITS = 40, 4, 3
HIDDEN, BATCH, STEPS, EVERY = 32, 32, 400, 25
HELD_OUT = 500  # sequences for validation, and for the test
GOAL = 0.99


@dataclass(frozen=True)
class Task:
    """Sequences of `LENGTH` digits, or of `SHORTEST` to `LENGTH`, and options of the layer."""

    variable: bool = False
    layers: int = 1
    bidirectional: bool = False


TASKS = {
    "one layer": Task(),
    "one layer, variable length": Task(variable=True),
    "two bidirectional layers": Task(layers=2, bidirectional=True),
}


@dataclass(frozen=True)
class Batch:
    """digits: ``[T, B]``. lengths: ``[B]``, or None if all sequences have the same."""

    digits: Tensor
    lengths: Tensor | None

    @classmethod
    def draw(cls, task, sequences, generator):
        digits = torch.randint(DIGITS, (LENGTH, sequences), generator=generator)
        lengths = None
        if task.variable:
            lengths = torch.randint(SHORTEST, LENGTH + 1, (sequences,), generator=generator)
        return cls(digits, lengths)

    @property
    def sums(self):
        """The sum after each digit, ``[valid]``."""
        return self.valid(self.digits.cumsum(0) % DIGITS)

    def valid(self, values):
        """The unpadded entries of ``[T, B, ...]``."""
        if self.lengths is None:
            return values.flatten(0, 1)
        return values[torch.arange(LENGTH)[:, None] < self.lengths]


class Network(nn.Module):
    def __init__(self, model, task):
        super().__init__()
        layer = MODELS[model]
        self.layer = layer(DIGITS, HIDDEN, task.layers, bidirectional=task.bidirectional)
        self.linear = nn.Linear(HIDDEN * (1 + task.bidirectional), DIGITS)

    def forward(self, batch):
        """Scores of the sum after each digit, ``[valid, 3]``."""
        x = F.one_hot(batch.digits, DIGITS).float()
        if batch.lengths is None:
            output, _ = self.layer(x)
        else:
            packed = pack_padded_sequence(x, batch.lengths, enforce_sorted=False)
            output, _ = pad_packed_sequence(self.layer(packed)[0], total_length=LENGTH)
        return batch.valid(self.linear(output))


@torch.no_grad()
def accuracy(network, batch):
    return float((network.eval()(batch).argmax(-1) == batch.sums).float().mean())


def train(task, model, rate, seed):
    """Validation and test accuracy, the step that reached the goal, the step that diverged."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.Generator().manual_seed(0)
    valid, test = (Batch.draw(task, HELD_OUT, held_out) for _ in range(2))
    network = Network(model, task)
    optimizer = torch.optim.Adam(network.parameters(), float(rate))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, 2 - 2 * k / STEPS))
    goal, found = None, 0.0
    for step in range(1, STEPS + 1):
        batch = Batch.draw(task, BATCH, generator)
        loss = F.cross_entropy(network(batch), batch.sums)
        if not loss.isfinite():
            return None, None, goal, step
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % EVERY == 0:
            found = accuracy(network, valid)
            goal = step if goal is None and found >= GOAL else goal
            network.train()
    return found, accuracy(network, test), goal, None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help=", ".join(TASKS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = platform.machine(), torch.__version__, f"{datetime.date.today()}", commit()
    rows = []
    if args.out.exists():
        with args.out.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["task"] not in args.tasks]
    runs = (
        (task, model, rate, seed)
        for task in args.tasks
        for seed in map(int, args.seeds.split(","))
        for model in MODELS
        for rate in RATES
    )
    for task, model, rate, seed in runs:
        valid, test, goal, diverged = train(TASKS[task], model, rate, seed)
        values = [f"{value:.4f}" if value is not None else "" for value in (valid, test)]
        cells = (task, model, rate, seed, STEPS, *values, goal or "never", diverged or "")
        print(*cells, flush=True)
        rows.append(dict(zip(COLUMNS, (*cells, *about), strict=True)))
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
