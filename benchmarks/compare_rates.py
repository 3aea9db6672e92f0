"""Trains models at several learning rates, each run in its own process, and compares them.

All runs share one GPU (through NVIDIA's MPS if it is installed) or the CPU, and have the same
settings apart from model, learning rate and seed. Prints validation and test results by model and
rate at the last step that all runs reached. Run the same command again to continue runs that the
time limit stopped.

    python3 benchmarks/compare_rates.py dailymail-built --models lstm,bi-lstm --rates 8e-4,2.5e-3
    python3 benchmarks/compare_rates.py dailymail-built --best runs/rates/rates.csv --seeds 1,2,3

The second form trains each model at the best rate of the first. Writes rates.csv and table.txt into
the runs' folder. --out gets copies, and runs.tar.gz with settings, curve, result and log of each.
"""

import argparse
import csv
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RATES = "8e-5,2.5e-4,8e-4,2.5e-3"
HIGHER_IS_BETTER = ("digits", "mnist", "pmnist")  # accuracy; elsewhere errors or bits
COLUMNS = [
    *("model", "rate", "seed", "state", "steps", "common_step", "valid", "valid_step"),
    *("target", "target_step", "result_valid", "test", "test_cnn", "diverged_at", "skipped"),
    *("seconds", "steps_per_second"),
]
SMALL_FILES = ("config.json", "metrics.jsonl", "result.json", "log.txt")
GRACE = 20  # seconds that a run has to save when time is up


@dataclass(frozen=True)
class Run:
    """One training run and its folder."""

    model: str
    rate: str
    seed: int
    folder: Path

    def records(self):
        """The evaluations so far, without a line that is still being written."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def result(self):
        try:
            return json.loads((self.folder / "result.json").read_text())
        except (OSError, ValueError):
            return {}

    def log(self):
        try:
            return (self.folder / "log.txt").read_text(errors="replace")
        except OSError:
            return ""


def runs_of(models, rates, seeds, folder):
    """One run per model, rate and seed; seeds vary slowest."""
    found = []
    for seed in seeds:
        for model in models:
            for rate in rates[model]:
                name = f"{model.replace('*', '-star')}-{rate}-seed{seed}"
                found.append(Run(model, rate, seed, folder / name))
    return found


def command_of(run, options):
    tag = "best-rate" if options.best else f"rate-{run.rate}"
    command = [sys.executable, "-m", "rbn", "train", options.task, "--model", run.model]
    for setting in (f"tag={tag}", f"optimizer.lr={run.rate}", *options.set):
        command += ["--set", setting]
    command += ["--seed", str(run.seed), "--device", options.device, "--out", str(run.folder)]
    command += ["--precision", options.precision] if options.precision else []
    command += ["--data-dir", str(options.data_dir)] if options.data_dir else []
    return command


@contextmanager
def shared_gpu(device):
    """Inside the ``with`` block, processes share the GPU through MPS if it can be started.

    Without MPS, their kernels take turns. Yields the environment variables of the processes.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    already = "CUDA_MPS_PIPE_DIRECTORY" in os.environ  # several commands share a server
    if device == "cpu" or control is None or already:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        settings = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = subprocess.run(
            [control, "-d"], env=os.environ | settings, capture_output=True, text=True, timeout=60
        )
        if started.returncode:
            print(f"MPS did not start: {started.stdout} {started.stderr}", flush=True)
            yield {}
            return
        try:
            yield settings
        finally:
            subprocess.run([control], input="quit\n", env=os.environ | settings, text=True)


def train(runs, options, deadline):
    """Train the runs, some at a time, until all have ended or time is up."""
    waiting, active = list(runs), {}
    threads = max(1, (os.cpu_count() or 1) // min(options.processes, len(runs)))
    began = said = time.monotonic()
    with shared_gpu(options.device) as settings:
        source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **settings}
        environment["PYTHONPATH"] = source
        try:
            while (waiting or active) and time.monotonic() < deadline:
                while waiting and len(active) < options.processes:
                    run = waiting.pop(0)
                    run.folder.mkdir(parents=True, exist_ok=True)
                    with (run.folder / "log.txt").open("a") as log:
                        active[run] = subprocess.Popen(
                            command_of(run, options),
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            env=environment,
                        )
                active = {run: process for run, process in active.items() if process.poll() is None}
                if time.monotonic() - said > 60:
                    said = time.monotonic()
                    _say(runs, said - began)
                time.sleep(0.2)
        finally:
            _stop(active.values())


def _stop(processes):
    """Let processes save and end. Kills those that do not."""
    processes = [process for process in processes if process.poll() is None]
    for process in processes:
        process.send_signal(signal.SIGINT)
    until = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _say(runs, seconds):
    steps = [records[-1]["step"] if (records := run.records()) else 0 for run in runs]
    print(
        f"{seconds:4.0f} s: evaluated at step {min(steps):,} to {max(steps):,}, "
        f"{sum(bool(run.result()) for run in runs)} of {len(runs)} runs tested",
        flush=True,
    )


def state_of(run):
    """The outcome of a run: finished, diverged, stopped, or failed with its last output."""
    result = run.result()
    if result:
        return "finished" if result["diverged_at"] is None else "diverged"
    if (run.folder / "diverged.safetensors").exists():
        return "diverged"
    words = (run.log().strip().splitlines() or ["did not start"])[-1]
    return "stopped" if "stopped" in words else f"failed: {words}"


def target_step(records, target, higher):
    """The step of the first evaluation that is as good as the target, or "never"."""
    for record in records:
        figure = record["valid_population"]
        if figure >= target if higher else figure <= target:
            return record["step"]
    return "never"


def rows_of(runs, higher, target=None):
    """Results of all runs at the last evaluation that every run that did not diverge reached."""
    curves = {run: run.records() for run in runs}
    states = {run: state_of(run) for run in runs}
    going = [run for run in runs if states[run] in ("finished", "stopped")]
    common = min((curves[run][-1]["step"] if curves[run] else 0 for run in going), default=0)
    best = max if higher else min
    rows = []
    for run in runs:
        records = [
            r for r in curves[run] if r["step"] <= common and math.isfinite(r["valid_population"])
        ]
        result = run.result()
        row = dict.fromkeys(COLUMNS, "")
        row |= {"model": run.model, "rate": run.rate, "seed": run.seed, "state": states[run]}
        row |= {"common_step": common}
        if records:
            chosen = best(records, key=lambda r: r["valid_population"])
            row |= {"valid": chosen["valid_population"], "valid_step": chosen["step"]}
        if target is not None:
            row |= {"target": target, "target_step": target_step(curves[run], target, higher)}
        if last := curves[run][-1:]:
            row |= {"steps": last[0]["step"], "seconds": round(last[0]["seconds"], 1)}
            row["steps_per_second"] = round(last[0]["step"] / max(last[0]["seconds"], 1e-9), 1)
        if result:
            row |= {name: result.get(name, "") for name in ("test", "test_cnn", "steps")}
            row |= {"diverged_at": result["diverged_at"] or "", "skipped": result["skipped"]}
            row["result_valid"] = result["valid"]
        rows.append(row)
    return rows


def best_rates(rows, higher):
    """The rate of each model with the best mean validation result. A diverged run excludes a rate.

    If every rate of a model has a diverged run, those count, too. The result is that of finished
    runs or, while any run of the model is unfinished, at the step that all runs reached.
    """
    groups = {}
    for row in rows:
        groups.setdefault(row["model"], {}).setdefault(row["rate"], []).append(row)
    chosen = {}
    for model, rates in groups.items():
        measured = {r: g for r, g in rates.items() if all(row["valid"] != "" for row in g)}
        steady = {r: g for r, g in measured.items() if all(row["state"] != "diverged" for row in g)}
        candidates = steady or measured
        finished = all(row.get("result_valid") for group in candidates.values() for row in group)
        figure = "result_valid" if finished else "valid"
        means = {
            rate: statistics.mean(float(row[figure]) for row in group)
            for rate, group in candidates.items()
        }
        if means:
            chosen[model] = (max if higher else min)(means, key=means.__getitem__)
    return chosen


def table_of(rows, higher):
    """Models by rates: mean best validation result, and mean test result of finished runs."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    rates = sorted(dict.fromkeys(row["rate"] for row in rows), key=float)
    chosen = best_rates(rows, higher)
    common = rows[0]["common_step"]
    lines = [
        f"Best validation figure up to step {common:,} / test (/ second test set) of finished "
        "runs, %, means over seeds; * the best rate of a model.",
        "",
        f"| model | {' | '.join(rates)} |",
        f"|---|{'---|' * len(rates)}",
    ]
    for model in models:
        cells = [
            _cell([r for r in rows if (r["model"], r["rate"]) == (model, rate)])
            + ("*" if chosen.get(model) == rate else "")
            for rate in rates
        ]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    troubled = [r for r in rows if r["state"] not in ("finished", "stopped")]
    lines += ["", *(f"{r['model']} {r['rate']} seed {r['seed']}: {r['state']}" for r in troubled)]
    speeds = [float(r["steps_per_second"]) for r in rows if r["steps_per_second"] != ""]
    if speeds:
        lines.append(
            f"Steps a second: {min(speeds):.1f} to {max(speeds):.1f} for a run, {sum(speeds):.0f} "
            "in all if all ran at the same time."
        )
    return "\n".join(lines) + "\n"


def _cell(rows):
    """The results of the runs of a cell, in percent, with the spread over seeds."""
    parts = []
    for name in ("valid", "test", "test_cnn"):
        values = [100 * float(row[name]) for row in rows if row[name] not in ("", None)]
        if not values:
            if name == "valid":
                parts.append("none")
            continue
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        parts.append(f"{statistics.mean(values):.1f}{spread}")
    diverged = sum(row["state"] == "diverged" for row in rows)
    return " / ".join(parts) + (f" ({diverged} diverged)" if diverged else "")


def write(runs, rows, text, folder, out):
    with (folder / "rates.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "table.txt").write_text(text)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for name in ("rates.csv", "table.txt"):
        shutil.copyfile(folder / name, out / name)
    with tarfile.open(out / "runs.tar.gz", "w:gz") as tar:
        for run in runs:
            for name in SMALL_FILES:
                if (run.folder / name).is_file():
                    tar.add(run.folder / name, f"{run.folder.name}/{name}")


def _listed(text):
    return [part for part in text.split(",") if part]


def _options(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("--models", type=_listed, help="models of rbn train")
    parser.add_argument("--rates", type=_listed, default=_listed(RATES), help=RATES)
    parser.add_argument("--best", type=Path, help="rates.csv with rates to choose from")
    parser.add_argument("--seeds", type=_listed, default=["1"])
    parser.add_argument("--target", type=float, help="also write the step that reaches this result")
    parser.add_argument(
        "--set", action="append", default=[], help="setting of all runs, as key=value"
    )
    parser.add_argument("--precision", help="bf16-mixed, for instance")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=24, help="number of runs at a time")
    parser.add_argument("--minutes", type=float, help="save and stop after this many minutes")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/rates"))
    parser.add_argument("--out", type=Path, help="folder for copies of the results")
    options = parser.parse_args(arguments)
    if (options.models is None) == (options.best is None):
        parser.error("give --models with --rates, or --best")
    for name in ("processes", "minutes"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be positive, got {value}")
    return options


def main(arguments=None):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else children may ignore it
    began = time.monotonic()
    options = _options(arguments)
    higher = options.task in HIGHER_IS_BETTER
    if options.best:
        with options.best.open(newline="") as file:
            rates = {
                model: [rate]
                for model, rate in best_rates(list(csv.DictReader(file)), higher).items()
            }
    else:
        rates = dict.fromkeys(options.models, options.rates)
    runs = runs_of(list(rates), rates, list(map(int, options.seeds)), options.runs)
    deadline = math.inf if options.minutes is None else began + 60 * options.minutes - GRACE
    train(runs, options, deadline)
    rows = rows_of(runs, higher, options.target)
    text = table_of(rows, higher)
    write(runs, rows, text, options.runs, options.out)
    print(text)
    return int(any(row["state"].startswith("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
