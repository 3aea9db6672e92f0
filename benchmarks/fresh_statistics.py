"""The quality of the statistics that `eval()` uses in an ordinary training loop.

Trains a small model with PyTorch's own tools only. After every epoch it validates the same
weights three times: with the running averages (``refresh_stats=False``), with the statistics that
the layer re-estimates from its most recent training inputs (the default), and with exact ones (the
entire training set at the current weights). ``--rows`` compares other numbers of kept sequences.
Prints a table and writes benchmarks/results/fresh_statistics.csv after every epoch, replacing the
task's rows.

    python benchmarks/fresh_statistics.py digits pdigits pydoc
    python benchmarks/fresh_statistics.py pmnist ptb --device cuda --data-dir DATA
"""

import argparse
import copy
import csv
import datetime
import math
import platform
from collections import deque
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import rbn
from rbn import data
from rbn.experiments.results import commit
from rbn.nn import recent_calls

RESULTS = Path(__file__).parent / "results" / "fresh_statistics.csv"
COLUMNS = (
    *("task", "seed", "epoch", "unit", "running", "rows", "refreshed", "exact", "gap"),
    *("device", "torch", "date", "commit"),
)


class Classifier(nn.Module):
    def __init__(self, hidden, **options):
        super().__init__()
        self.lstm = rbn.BatchNormLSTM(1, hidden, **options)
        self.linear = nn.Linear(hidden, 10)

    def forward(self, x):
        return self.linear(self.lstm(x)[0][-1])


class CharacterModel(nn.Module):
    def __init__(self, symbols, hidden, **options):
        super().__init__()
        self.lstm = rbn.BatchNormLSTM(symbols, hidden, **options)
        self.linear = nn.Linear(hidden, symbols)

    def forward(self, x):
        return self.linear(self.lstm(x)[0])


class Images:
    """Sequential images: accuracy in percent."""

    unit, lr, batch = "%", 1e-3, 100

    def __init__(self, splits, hidden, device, **options):
        self.data = splits.to(device)
        self.model = Classifier(hidden, **options).to(device)

    def batches(self, generator):
        order = torch.randperm(len(self.data.train), generator=generator)
        for rows in order.to(self.data.train.labels.device).split(self.batch):
            yield self.data.train.inputs[:, rows], self.data.train.labels[rows]

    def loss(self, batch):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    @torch.no_grad()
    def validate(self, model):
        right, valid = 0, self.data.valid
        for rows in torch.arange(len(valid), device=valid.labels.device).split(500):
            right += int((model(valid.inputs[:, rows]).argmax(1) == valid.labels[rows]).sum())
        return 100 * right / len(valid)


class Characters:
    """Next characters: bits per character."""

    unit, lr = "bits", 2e-3

    def __init__(self, text, hidden, length, batch, device, **options):
        self.text, self.length, self.batch, self.device = text, length, batch, device
        self.model = CharacterModel(len(text.symbols), hidden, **options).to(device)
        self.valid = self._windows(text.valid, 0)

    def _windows(self, stream, offset):
        stream = stream[offset : offset + (len(stream) - offset) // self.length * self.length]
        return stream.to(self.device).view(-1, self.length).t().long()  # [length, windows]

    def batches(self, generator):
        offset = int(torch.randint(self.length, (), generator=generator))
        windows = self._windows(self.text.train, offset)
        order = torch.randperm(windows.shape[1], generator=generator).to(self.device)
        for rows in order.split(self.batch):
            if len(rows) == self.batch:
                yield (windows[:, rows],)

    def loss(self, batch, model=None):
        (window,) = batch
        logits = (model or self.model)(window[:-1])
        return F.cross_entropy(logits.flatten(0, 1), window[1:].flatten())

    @torch.no_grad()
    def validate(self, model):
        losses = [self.loss((w,), model) * w.shape[1] for w in self.valid.split(256, 1)]
        return float(sum(losses)) / self.valid.shape[1] / math.log(2)


def make(task, device, folder, **options):
    """A task with its model. options: those of the layer."""
    if task in ("digits", "pdigits"):
        return Images(data.digits(task == "pdigits"), 64, device, **options)
    if task == "pmnist":
        return Images(data.pmnist(root=folder), 100, device, **options)
    if task == "pydoc":
        return Characters(data.pydoc(), 128, 65, 32, device, **options)
    return Characters(data.ptb(root=folder), 1000, 100, 64, device, **options)


def train_epoch(task, optimizer, generator):
    for batch in task.batches(generator):
        loss = task.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizer.step()


def inputs(task, generator):
    """The inputs of one epoch."""
    return [batch[0] if task.unit == "%" else batch[0][:-1] for batch in task.batches(generator)]


def buffers(layer):
    return [b for s in layer._all_statistics() for b in (s.mean, s.var, s.count)]


def with_rows(layer, rows):
    """A log of the layer's most recent calls, with at least that many sequences."""
    log, total = recent_calls.RecentCalls(), 0
    kept = deque()
    for sequences in reversed(layer.recent_calls._kept):
        if total >= rows:
            break
        kept.appendleft(sequences)
        total += sequences.rows
    log._kept, log.new_rows = kept, total
    return log


def evaluate(task, layer, numbers, generator):
    """Validation with running averages, with each number of rows, and with exact statistics."""
    running = [b.clone() for b in buffers(layer)]
    log, model = layer.recent_calls, task.model
    refreshed = {}
    for rows in numbers:
        layer.recent_calls = with_rows(layer, rows)
        model.eval()
        refreshed[rows] = task.validate(model)
        layer.recent_calls = log
    exact = copy.deepcopy(model)
    rbn.update_population_stats(exact, inputs(task, generator))
    exact_value = task.validate(exact.eval())
    layer.recent_calls = recent_calls.RecentCalls()  # nothing to refresh from
    for buffer, old in zip(buffers(layer), running, strict=True):
        buffer.copy_(old)
    running_value = task.validate(model)
    layer.recent_calls = log
    log.new_rows = 0
    model.train()
    return running_value, refreshed, exact_value


def run(name, seed, epochs, numbers, device, folder):
    torch.manual_seed(seed)
    recent_calls.ROWS = max(numbers)
    task = make(name, device, folder)
    layer = task.model.lstm
    optimizer = torch.optim.Adam(task.model.parameters(), task.lr)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        train_epoch(task, optimizer, generator)
        state = generator.get_state()
        running, refreshed, exact = evaluate(task, layer, numbers, generator)
        generator.set_state(state)
        for rows, value in refreshed.items():
            yield epoch, task.unit, running, rows, value, exact


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tasks", nargs="+", choices=("digits", "pdigits", "pydoc", "pmnist", "ptb"))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--rows", default=str(recent_calls.ROWS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    about = (machine, torch.__version__, datetime.date.today().isoformat(), commit())
    numbers = [int(rows) for rows in args.rows.split(",")]
    kept = []
    if args.out.exists():
        with args.out.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["task"] not in args.tasks]
    new = []
    for task in args.tasks:
        for seed in map(int, args.seeds.split(",")):
            found = run(task, seed, args.epochs, numbers, torch.device(args.device), args.data_dir)
            for epoch, unit, running, rows, value, exact in found:
                gap = exact - value if unit == "%" else value - exact
                numbers_ = [f"{n:.4f}" for n in (running, value, exact, gap)]
                print(
                    f"{task:8} seed {seed} epoch {epoch}  running {numbers_[0]}  "
                    f"{rows:5} rows {numbers_[1]}  exact {numbers_[2]}  gap {numbers_[3]} {unit}",
                    flush=True,
                )
                values = (task, seed, epoch, unit, numbers_[0], rows, *numbers_[1:], *about)
                new.append(dict(zip(COLUMNS, values, strict=True)))
                args.out.parent.mkdir(exist_ok=True)
                with args.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows([*kept, *new])


if __name__ == "__main__":
    main()
