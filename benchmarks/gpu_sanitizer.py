"""Finds compute-sanitizer, and runs it on the kernels, one family at a time."""

import glob
import json
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import torch

TOOLS = ("memcheck", "racecheck")
FAMILIES = ("small", "cuda", "wide", "steps")
AT_ONCE = 3
LONGEST = 240  # seconds of one check: a hanging kernel blocks the GPU's other users
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
_MOST = 2000  # maximum number of printed reports
_ACCESS = r"(Read|Write) access at (.+)\+(0x[0-9a-f]+)"
_RACE = re.compile(
    rf"(Error|Warning): (?:\([^)]*\) )?Race reported between {_ACCESS}.*\n((?:=+ +and .*\n?)+)"
)
_OTHER = re.compile(rf"and {_ACCESS}.*\[(\d+) hazards\]")


def find_sanitizer():
    """The binary on the PATH, in a CUDA toolkit, or in a Python package; None if there is none."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    site = Path(torch.__file__).parents[1]
    patterns = [
        "/usr/local/cuda*/bin/compute-sanitizer",
        "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
        "/opt/nvidia/**/compute-sanitizer",
        f"{site}/nvidia/**/compute-sanitizer",
        f"{site}/triton/**/compute-sanitizer",
    ]
    for pattern in patterns:
        for path in sorted(glob.glob(pattern, recursive=True)):
            if Path(path).is_file():
                return path
    return None


def version(binary, run):
    """The version of compute-sanitizer: what it reports as a race differs between versions."""
    if binary is None:
        return "absent"
    words = run([binary, "--version"], 60).output
    found = re.search(r"[Vv]ersion (\S+)", words)
    return found[1] if found else words.strip()[-80:]


def races(output):
    """What racecheck reported: kernel, locations in its machine code, total hazards and launches.

    output: its output. A location reported for several launches is listed once.
    """
    found = {}
    for severity, access, kernel, at, others in _RACE.findall(output):
        with_, hazards = [], 0
        for other_access, _, other_at, count in _OTHER.findall(others):
            with_.append(f"{other_access.lower()} {other_at}")
            hazards += int(count)
        one = {
            "kernel": kernel,
            "severity": severity.lower(),
            "between": f"{access.lower()} {at}",
            "and": ", ".join(sorted(with_)),
        }
        same = found.setdefault(tuple(one.values()), one | {"hazards": 0, "launches": 0})
        same["hazards"] += hazards
        same["launches"] += 1
    return list(found.values())


def check_tool(binary, tool, family, script, run, timeout):
    """The outcome of one tool on the kernels of one family, with its output.

    clean, errors, absent (no tool), not run (kernels not for this GPU), stopped, failed.
    """
    if binary is None:
        return {"outcome": "absent", "words": "no compute-sanitizer was found"}
    command = [binary, "--tool", tool, "--error-exitcode", "9", "--print-limit", str(_MOST)]
    # Ignore API errors: "no such argument" is how the number of arguments is found.
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    # A separate allocation for each tensor, so that reads beyond one are detected.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    case = [sys.executable, str(script), "kernels", family]
    # Racecheck ignores barriers at which only some threads wait.
    case += ["--all-wait"] if tool == "racecheck" else []
    done = run([*command, *case], timeout, **alone)
    summary = _SUMMARY.findall(done.output)
    ran = re.search(r'^{"ran": .*}$', done.output, re.M)
    if done.rc is None:
        outcome = "stopped"
    elif done.rc == 0 and ran and summary:
        outcome = "clean" if json.loads(ran[0])["ran"] else "not run"
    elif done.rc == 9 and summary:
        outcome = "errors"
    else:
        outcome = "failed"
    found = {"outcome": outcome, "words": "; ".join(summary), "seconds": done.seconds}
    if outcome == "errors" and tool == "racecheck":
        found["races"] = races(done.output)
    elif outcome in ("errors", "failed", "stopped"):
        marked = [line for line in done.output.splitlines() if line.startswith("=====")]
        # Host stack frames say nothing about a kernel, and an error has dozens of them.
        marked = [line for line in marked if "Host Frame" not in line and line.strip("= ")]
        found["log"] = (marked or done.output.splitlines())[:80]
    return found


def check_all(binary, script, run, timeout, pool):
    """Start all tools on all families. Returns a function that waits for the outcomes by family.

    Runs a few at a time, because the GPU's other users wait while a kernel is checked.
    """
    end, turn = time.monotonic() + timeout, threading.Semaphore(AT_ONCE)

    def check(tool, family):
        with turn:
            left = min(LONGEST, max(1.0, end - time.monotonic()))
            return check_tool(binary, tool, family, script, run, left)

    jobs = {
        family: {tool: pool.submit(check, tool, family) for tool in TOOLS} for family in FAMILIES
    }
    return lambda: {
        "version": version(binary, run),
        **{f: {tool: job.result() for tool, job in tools.items()} for f, tools in jobs.items()},
    }


def clean(found):
    """Whether no tool found anything. found: the outcomes of `check_all`."""
    outcomes = [one["outcome"] for family in FAMILIES for one in found[family].values()]
    return all(outcome in ("clean", "absent", "not run") for outcome in outcomes)
