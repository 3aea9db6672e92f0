"""With zoneout, should population statistics be estimated with its masks?

Trains small models with nothing but PyTorch's own tools. After some epochs it validates the same
weights with four estimates: without the masks, as evaluation runs, and with them, as training does;
each from the layer's most recent training inputs and from the whole training set. Prints a table
and writes benchmarks/results/statistics-with-masks.csv, replacing the rows of the same tasks and
cases.

    python benchmarks/statistics_with_masks.py digits pdigits black-pdigits pydoc
"""

import argparse
import copy
import csv
import dataclasses
import datetime
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from fresh_statistics import inputs, make, train_epoch

import rbn
from rbn.data.split import Split, Splits
from rbn.experiments.results import commit
from rbn.nn import keep_running_averages

RESULTS = Path(__file__).parent / "results" / "statistics-with-masks.csv"
ESTIMATES = ("recent_without", "recent_with", "exact_without", "exact_with")
COLUMNS = (
    *("task", "case", "seed", "epoch", "unit", *ESTIMATES),
    *("device", "torch", "date", "commit"),
)
CASES = {
    "zoneout 0.5, 0.05": {"zoneout": (0.5, 0.05)},
    "zoneout 0.1, 0.1": {"zoneout": (0.1, 0.1)},
}
# The epochs after which a task is validated, and its learning rate. ``black-pdigits`` are permuted
# digits after three black pixels: like permuted MNIST, they begin alike.
TASKS = {
    "digits": ((3, 6, 9, 12, 18), 4e-3),
    "pdigits": ((3, 6, 9, 12, 18), 4e-3),
    "black-pdigits": ((3, 6, 9, 12, 18), 4e-3),
    "pydoc": ((1, 2), 2e-3),
}
BLACK = 3


def evaluate(task, batches):
    """Validation with each estimate, of copies: training goes on as if there were none."""
    calls = [call for sequences in task.model.lstm.recent_calls for call in sequences]
    recent = [call.x if task.unit == "%" else call.x[..., 0] for call in calls]
    for estimate in ESTIMATES:
        model = copy.deepcopy(task.model)
        keep_running_averages(model)
        rbn.update_population_stats(
            model,
            recent if estimate.startswith("recent") else batches,
            train_mode=estimate.endswith("_with"),
        )
        yield task.validate(model.eval())


def run(name, case, seed):
    torch.manual_seed(seed)
    epochs, rate = TASKS[name]
    task = make(name.removeprefix("black-"), torch.device("cpu"), None, **CASES[case])
    if name.startswith("black-"):
        before = dataclasses.astuple(task.data)
        task.data = Splits(*(Split(F.pad(x, (0, 0, 0, 0, BLACK, 0)), y) for x, y in before))
    optimizer = torch.optim.Adam(task.model.parameters(), rate)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs[-1] + 1):
        train_epoch(task, optimizer, generator)
        if epoch in epochs:
            state = generator.get_state()
            yield epoch, task.unit, list(evaluate(task, inputs(task, generator)))
            generator.set_state(state)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--cases", default=list(CASES), nargs="+", choices=CASES)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    about = (platform.machine(), torch.__version__, datetime.date.today().isoformat(), commit())
    kept = []
    if args.out.exists():
        with args.out.open(newline="") as file:
            kept = [
                row
                for row in csv.DictReader(file)
                if row["task"] not in args.tasks or row["case"] not in args.cases
            ]
    new = []
    for task in args.tasks:
        for case in args.cases:
            for seed in map(int, args.seeds.split(",")):
                for epoch, unit, values in run(task, case, seed):
                    texts = [f"{value:.4f}" for value in values]
                    print(task, case, f"seed {seed} epoch {epoch} ", *texts, unit, flush=True)
                    cells = (task, case, seed, epoch, unit, *texts, *about)
                    new.append(dict(zip(COLUMNS, cells, strict=True)))
            with args.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows([*kept, *new])


if __name__ == "__main__":
    main()
