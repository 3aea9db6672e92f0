"""Adds the runs of compare_rates.py to comparison.csv, and marks the runs at each best rate.

    python3 benchmarks/collect_rates.py text8 runs/rates/rates.csv --steps 2500 --commit 5526f7b

The best rate of a model is the one with the best mean validation result over its seeds, among the
runs with the most steps; a diverged or unfinished seed excludes a rate. Those runs get the phase
``best``. Runs of seed 1 at rates that several models share are the ``grid``, all others ``other``;
runs with fewer steps keep their phase (``short``). The best rate's run of seed 1 is listed in both
phases.
"""

import argparse
import csv
import statistics
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
HIGHER_IS_BETTER = ("mnist", "pmnist")  # accuracy; elsewhere errors or bits
PHASES = {"grid": 0, "best": 1, "other": 2}


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def from_rates(row, task, steps, about):
    """Convert a row of rates.csv to a row of comparison.csv."""
    if int(row["steps"] or 0) != steps and row["state"] == "finished":
        raise SystemExit(f"{row['model']} {row['rate']} has {row['steps']} steps, not {steps}")
    same = ("model", "rate", "seed", "state", "steps", "valid_step", "target", "target_step")
    new = {name: row[name] for name in (*same, "test", "test_cnn", "diverged_at", "skipped")}
    new["valid"] = row["result_valid"] or row["valid"]
    new |= {"task": task, "of_steps": str(steps), "seconds": row["seconds"], **about}
    for name in ("valid", "test", "test_cnn"):
        new[name] = f"{float(new[name]):.6f}" if new[name] else ""
    return new


def best_rate(rows, higher):
    """The rate with the best mean validation result; None if every rate has an unfinished run."""
    rates = {}
    for row in rows:
        rates.setdefault(row["rate"], []).append(row)
    means = {
        rate: statistics.mean(float(row["valid"]) for row in group)
        for rate, group in rates.items()
        if all(row["state"] == "finished" for row in group)
    }
    return (max if higher else min)(means, key=means.__getitem__, default=None)


def with_phases(rows, higher):
    """The runs of one task with the most steps, by phase."""
    runs = {(row["model"], row["rate"], int(row["seed"])): row for row in rows}
    models = dict.fromkeys(model for model, *_ in runs)
    first_seeds = [rate for _, rate, seed in runs if seed == 1]
    grid = {rate for rate in first_seeds if first_seeds.count(rate) > 1}
    found = []
    for model in models:
        own = [row for key, row in sorted(runs.items(), key=_order) if key[0] == model]
        chosen = best_rate(own, higher)
        for row in own:
            best = row["rate"] == chosen
            first = row["seed"] == "1" and row["rate"] in grid
            phases = ["grid"] * first + ["best"] * best or ["other"]
            found += [row | {"phase": phase} for phase in phases]
    position = list(models).index
    return sorted(found, key=lambda row: (PHASES[row["phase"]], position(row["model"])))


def _order(item):
    (model, rate, seed), _ = item
    return model, float(rate), seed


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("rates", type=Path, nargs="*", help="rates.csv files of compare_rates.py")
    parser.add_argument("--steps", type=int, required=True, help="steps of a complete run")
    parser.add_argument("--commit", default="")
    parser.add_argument("--gpu", default="NVIDIA H200")
    parser.add_argument("--torch", default="2.11.0")
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--file", type=Path, default=RESULTS / "comparison.csv")
    options = parser.parse_args(arguments)
    rows = read(options.file)
    columns = list(rows[0])
    about = {name: getattr(options, name) for name in ("gpu", "torch", "date", "commit")}
    new = [
        from_rates(row, options.task, options.steps, about)
        for path in options.rates
        for row in read(path)
    ]
    full = [
        row for row in rows if (row["task"], row["of_steps"]) == (options.task, str(options.steps))
    ]
    ours = with_phases([*full, *new], options.task in HIGHER_IS_BETTER)
    others = [row for row in rows if row not in full]
    with options.file.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*others, *ours])
    for row in ours:
        print(*(row[name] for name in ("phase", "model", "rate", "seed", "state", "valid", "test")))


if __name__ == "__main__":
    main()
