"""Trains BN-LSTMs at full size for two of the paper's claims, several at once on one GPU.

Initial hidden states on MNIST in order: noise, zeros, the mean of the image, a fixed and a learned
projection of it. Population statistics averaged over time, on MNIST and Penn Treebank: each trained
model is also tested with them. Adds a row per run to benchmarks/results/claims.csv, from which
full_size_claims.py makes the report's findings.

    python3 benchmarks/full_size_runs.py --seeds 1,2,3 --at-once 6
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import rbn
from rbn.experiments import build, results
from rbn.experiments import config as configs
from rbn.experiments.paper.initial_states import initialize_from_data
from rbn.nn import PopulationStatistics

RESULTS = Path(__file__).parent / "results" / "claims.csv"
STARTS = {"mnist": ("noise", "none", "mean", "fixed", "learned"), "ptb": ("none", "noise")}
SETTINGS = {
    "mnist": ("mnist", "epochs=40", "decay_from=0.5", "optimizer.lr=0.003", "evaluate_every=5000"),
    "ptb": ("ptb-short",),
}
NOISE = 0.1
COLUMNS = ["task", "start", "seed", "steps", "valid", "test", "test_averaged", "skipped"]
COLUMNS += ["diverged_at", "seconds", "gpu", "versions", "commit", "date"]


def train(task_name, start, seed, epochs, device):
    """Train one model to the end. Returns its row."""
    began = time.monotonic()
    config_name, *settings = SETTINGS[task_name]
    settings += [f"layer.hidden_noise={NOISE if start == 'noise' else 0.0}"]
    settings += [f"epochs={epochs}"] if epochs else []
    values = configs.for_model(configs.read_yaml(configs.find(config_name)), "bn-lstm")
    config = configs.from_mapping(values)
    config = configs.with_settings(config, (*settings, "precision=bf16-mixed"))
    loaded = build.load(config, device)
    task = build.build(config, seed, device, loaded=loaded)
    if start in ("mean", "fixed", "learned"):
        initialize_from_data(task, loaded.train.inputs.cpu(), start, seed)
        task.model.to(device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build.make_trainer(config, task, Path(folder), graph=device.type == "cuda")
        diverged = None
        try:
            progress = trainer.run()
        except FloatingPointError as error:
            progress, diverged = trainer.progress, str(error)
    row = {"task": task_name, "start": start, "seed": seed, "steps": progress.step}
    row |= {"skipped": progress.skipped, "diverged_at": progress.diverged_at}
    if diverged is None:
        results.exact_statistics(config, task)
        row |= {name: task.measure_with(name, "population") for name in ("valid", "test")}
        for module in task.model.modules():
            if isinstance(module, PopulationStatistics):
                module.shared = True
        row["test_averaged"] = task.measure_with("test", "population")
    return row | {"seconds": round(time.monotonic() - began, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default="mnist,ptb")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--epochs", type=int, help="train fewer epochs, as a trial")
    parser.add_argument("--minutes", type=float, default=9, help="time limit of all runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.one:
        task, start, seed = arguments.one
        print(json.dumps(train(task, start, int(seed), arguments.epochs, device)))
        return
    facts = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "versions": f"rbn {rbn.__version__}, torch {torch.__version__}",
        "commit": results.commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    waiting = [
        (task, start, seed)
        for seed in arguments.seeds.split(",")
        for task in arguments.tasks.split(",")
        for start in STARTS[task]
    ]
    end, running = time.monotonic() + 60 * arguments.minutes, []
    epochs = ["--epochs", str(arguments.epochs)] if arguments.epochs else []
    while waiting or running:
        while waiting and len(running) < arguments.at_once and time.monotonic() < end:
            case = waiting.pop(0)
            command = [sys.executable, __file__, *epochs, "--one", *case]
            running.append((case, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
        if time.monotonic() >= end:
            for _, process in running:
                process.kill()
            print("not finished:", [case for case, _ in running] + waiting)
            return
        for case, process in [one for one in running if one[1].poll() is not None]:
            running.remove((case, process))
            lines = process.stdout.read().splitlines()
            if process.returncode or not lines:
                print(f"{case} ended with {process.returncode}")
                continue
            row = json.loads(lines[-1]) | facts
            print({name: row.get(name) for name in COLUMNS[:10]}, flush=True)
            new = not arguments.out.exists()
            with arguments.out.open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
