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
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

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
    "BatchNormLSTM, gamma=1": partial(rbn.BatchNormLSTM, gamma=1.0),
    "LayerNormLSTM": rbn.LayerNormLSTM,
}
LENGTH, DIGITS, HIDDEN, EVERY = 40, 3, 32, 25
HELD_OUT = 500  # sequences for validation, and for the test
GOAL = 0.99


@dataclass(frozen=True)
class Task:
    """Training steps, sequences in a batch, options of the layer, and the models that train.

    in_loss: how many sequences of a batch the loss counts; the others only add to its statistics.
    """

    steps: int = 400
    batch: int = 32
    in_loss: int | None = None
    layers: int = 1
    bidirectional: bool = False
    models: tuple[str, ...] = ("nn.LSTM", "BatchNormLSTM", "LayerNormLSTM")


TASKS = {
    "one layer": Task(models=tuple(MODELS)),
    "one layer, batches of 128": Task(batch=128),
    "one layer, 32 of 128 in the loss": Task(batch=128, in_loss=32, models=("BatchNormLSTM",)),
    "two bidirectional layers": Task(steps=200, layers=2, bidirectional=True),
}


def draw(sequences, generator):
    """Digits ``[T, B]`` and the sum after each, modulo 3."""
    digits = torch.randint(DIGITS, (LENGTH, sequences), generator=generator)
    return digits, digits.cumsum(0) % DIGITS


class Network(nn.Module):
    def __init__(self, model, task):
        super().__init__()
        layer = MODELS[model]
        self.layer = layer(DIGITS, HIDDEN, task.layers, bidirectional=task.bidirectional)
        self.linear = nn.Linear(HIDDEN * (1 + task.bidirectional), DIGITS)

    def forward(self, digits):
        """Scores of the sum after each digit, ``[T, B, 3]``."""
        return self.linear(self.layer(F.one_hot(digits, DIGITS).float())[0])


@torch.no_grad()
def accuracy(network, digits, sums):
    return float((network.eval()(digits).argmax(-1) == sums).float().mean())


def train(task, model, rate, seed):
    """Validation and test accuracy, the step that reached the goal, the step that diverged."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    held_out = torch.Generator().manual_seed(0)
    valid, test = draw(HELD_OUT, held_out), draw(HELD_OUT, held_out)
    network = Network(model, task)
    optimizer = torch.optim.Adam(network.parameters(), float(rate))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1, 2 - 2 * k / task.steps)
    )
    goal, found = None, 0.0
    for step in range(1, task.steps + 1):
        digits, sums = draw(task.batch, generator)
        scores = network(digits)[:, : task.in_loss]
        loss = F.cross_entropy(scores.flatten(0, 1), sums[:, : task.in_loss].flatten())
        if not loss.isfinite():
            return None, None, goal, step
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % EVERY == 0:
            found = accuracy(network, *valid)
            goal = step if goal is None and found >= GOAL else goal
            network.train()
    return found, accuracy(network, *test), goal, None


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
        for model in TASKS[task].models
        for rate in RATES
    )
    for task, model, rate, seed in runs:
        valid, test, goal, diverged = train(TASKS[task], model, rate, seed)
        values = [f"{value:.4f}" if value is not None else "" for value in (valid, test)]
        steps = TASKS[task].steps
        cells = (task, model, rate, seed, steps, *values, goal or "never", diverged or "")
        print(*cells, flush=True)
        rows.append(dict(zip(COLUMNS, (*cells, *about), strict=True)))
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
