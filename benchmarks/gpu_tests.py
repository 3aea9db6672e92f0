"""Runs everything that needs a GPU to test, and writes a summary.

The tests marked gpu, in several processes that share the card; compute-sanitizer's memcheck and
racecheck on each family of kernels; the seconds of a first call with nothing compiled; the digits
demo on the GPU and on the CPU. Writes benchmarks/results/gpu-tests.json, and exits with 1 if
anything failed.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_sanitizer import check_all, clean, find_sanitizer

from rbn.experiments.results import commit

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu-tests.json"
CASE = Path(__file__).with_name("gpu_case.py")
FIRST = {"ptb, bf16": (100, 64, 50, 1000, "bf16"), "text8, tf32": (180, 128, 27, 2000, "tf32")}
_TURNS = 3  # rounds of each test process, with a part of the tests in each
MODELS, SEEDS = ("LSTM", "BN-LSTM"), (1, 2)
_OUTCOME = re.compile(r"^(tests/.+?::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.M)
_REASON = re.compile(r"^(?:FAILED|ERROR) (tests/.+?::.+?)(?: - (.*))?$", re.M)


@dataclass(frozen=True)
class Done:
    """The outcome of a process; rc is None if it was stopped by the time limit."""

    rc: int | None
    output: str
    seconds: float


def run(command, timeout, **environment):
    """Run a command from the repository's root, stdout and stderr together.

    At the time limit its children are killed, too: a program left behind by compute-sanitizer
    would keep the GPU busy.
    """
    began = time.monotonic()
    paths = [str(ROOT / "src"), str(CASE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            rc = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            rc = None
        log.seek(0)
        return Done(rc, log.read(), round(time.monotonic() - began, 1))


def last_json(done):
    """The last object that a case printed, or one that describes the failure."""
    for line in reversed(done.output.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    tail = " | ".join(done.output.splitlines()[-3:])
    return {"error": "stopped at its time" if done.rc is None else f"exit {done.rc}: {tail}"}


# The tests --------------------------------------------------------------------------------------


def pytest_command(*arguments):
    return [sys.executable, "-u", "-m", "pytest", "-o", "addopts=", *arguments]


def collect():
    """The names of all tests marked gpu."""
    done = run(pytest_command("-m", "gpu", "--collect-only", "-q", "tests"), 120)
    if done.rc != 0:
        sys.exit(f"the tests could not be collected:\n{done.output}")
    return [line for line in done.output.splitlines() if line.startswith("tests/")]


def run_tests(names, timeout, run):
    """Run some of the tests in a separate process, with a line for each as soon as it ends."""
    flags = ["-v", "-rfE", "--tb=short", "-p", "no:cacheprovider", "--strict-markers"]
    flags += ["-p", "gpu_report", "-o", "faulthandler_timeout=90"]  # shows where a test hangs
    if importlib.util.find_spec("pytest_timeout"):
        flags.append("--timeout=180")
    # Wide enough for the reasons of failures in the summary.
    return run(pytest_command(*flags, *names), timeout, COLUMNS="400")


def outcomes(names, logs):
    """The counts, with the reason of each failure. Tests without an outcome were stopped.

    names: all tests. logs: pytest's output, for each process.
    """
    found, reasons = {}, {}
    for log in logs:
        found |= dict(_OUTCOME.findall(log))
        reasons |= {name: reason for name, reason in _REASON.findall(log) if reason}
    count = {word: sum(v == word for v in found.values()) for word in ("PASSED", "SKIPPED")}
    failed = [name for name in names if found.get(name) in ("FAILED", "ERROR")]
    return {
        "tests": len(names),
        "passed": count["PASSED"],
        "skipped": count["SKIPPED"],
        "failed": [f"{name}: {reasons.get(name, '')}"[:300] for name in failed],
        "unfinished": [name for name in names if name not in found],
        "same_bits_every_time": {
            name.split("::")[-1]: found[name].lower()
            for name in names
            if "same_bits_every_time" in name and name in found
        },
    }


# The demo ---------------------------------------------------------------------------------------


def compare_demos(found):
    """Whether the GPU's models are as good as the CPU's.

    found: output of `gpu_case.py demo`, by device, model and seed. The accuracy on a few hundred
    images has a standard error; two accuracies differ by chance by up to twice the standard error
    of their difference.
    """
    verdict = {}
    for model in MODELS:
        means, variance = {}, 0.0
        for device, models in found.items():
            runs = list(models[model].values())
            if any("error" in one for one in runs):
                return {"same": False, "runs": found}
            means[device] = sum(one["test"] for one in runs) / len(runs)
            variance += means[device] * (1 - means[device]) / runs[0]["images"]
        difference = means["cuda"] - means["cpu"]
        verdict[model] = {
            **{device: round(mean, 4) for device, mean in means.items()},
            "two_standard_errors": round(2 * math.sqrt(variance), 4),
            "same": abs(difference) <= 2 * math.sqrt(variance),
        }
    return {"same": all(v["same"] for v in verdict.values()), **verdict, "runs": found}


# All of it --------------------------------------------------------------------------------------


def everything(workers, seconds, run=run, collect=collect, sanitizer=find_sanitizer, keep=None):
    """Run all parts at the same time, which also tests sharing a GPU. Returns the summary.

    keep: called with the output of all test processes.
    """
    os.environ.setdefault("RBN_TEST_SEED", str(secrets.randbelow(2**31)))
    began, names = time.monotonic(), collect()
    left = max(1.0, seconds - (time.monotonic() - began))
    binary = sanitizer()
    python = [sys.executable, str(CASE)]
    with ThreadPoolExecutor(64) as pool, tempfile.TemporaryDirectory() as empty:
        first = {}
        for name, arguments in FIRST.items():
            folder = os.path.join(empty, name.replace(", ", "-"))
            caches = {"RBN_CACHE": folder + "-rbn", "TRITON_CACHE_DIR": folder + "-triton"}
            command = [*python, "first", *map(str, arguments)]
            first[name] = pool.submit(run, command, left, **caches)
        demos = {
            (device, model, seed): pool.submit(
                run, [*python, "demo", device, model, str(seed)], left
            )
            for device in ("cuda", "cpu")
            for model in MODELS
            for seed in SEEDS
        }
        checked = check_all(binary, CASE, run, left, pool)
        # More parts than processes, because some take twice as long as others.
        shards = [names[k :: _TURNS * workers] for k in range(min(_TURNS * workers, len(names)))]
        end = time.monotonic() + left
        with ThreadPoolExecutor(workers) as turns:
            logs = list(
                turns.map(lambda s: run_tests(s, max(1.0, end - time.monotonic()), run), shards)
            )
        if keep is not None:
            keep("\n".join(log.output for log in logs))
        summary = outcomes(names, [log.output for log in logs])
        summary |= {
            "processes": min(workers, len(shards)),
            "seed": int(os.environ["RBN_TEST_SEED"]),
            "compute_sanitizer": checked(),
            "first_call": {name: last_json(job.result()) for name, job in first.items()},
        }
        trained = {}
        for (device, model, seed), job in demos.items():
            runs = trained.setdefault(device, {}).setdefault(model, {})
            runs[f"seed {seed}"] = last_json(job.result())
        summary["digits_demo"] = compare_demos(trained)
    summary["seconds"] = round(time.monotonic() - began, 1)
    return summary


def passed(summary):
    """Whether nothing failed. A missing sanitizer is reported, but is not a failure."""
    return (
        not summary["failed"]
        and not summary["unfinished"]
        and clean(summary["compute_sanitizer"])
        and summary["digits_demo"]["same"]
        and not any("error" in one for one in summary["first_call"].values())
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20, help="stop whatever takes longer")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--log", type=Path, default=os.devnull, help="file for the tests' output")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; the tests marked gpu would all be skipped")
    summary = {
        "command": "make test-gpu",
        "gpu": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    } | everything(arguments.workers, 60 * arguments.minutes, keep=arguments.log.write_text)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    sys.exit(not passed(summary))


if __name__ == "__main__":
    main()
