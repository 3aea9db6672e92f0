"""A sweep with two workers: Ctrl-C, SIGTERM and the parent's death, at any moment."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from warm_commands import Command

pytest.importorskip("optuna")

from rbn.experiments.search.status import sweep_status
from rbn.experiments.search.storage import load_study

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/stat").exists(), reason="needs /proc to find processes"
    ),
]

# Short trials, so that a signal comes at the end of one as often as within it; far more of them
# than can be trained before a test times out.
SWEEP = """
config: digits
set: {hidden_size: 2, epochs: 1, evaluate_every: 3, batch_size: 300, population_batch: 600}
sampler: random
trials: 100000
space:
  model: [lstm, bn-lstm]
  optimizer.lr: {low: 1e-3, high: 1e-1, log: true}
heartbeat: 1
"""
thorough = pytest.mark.skipif(
    os.environ.get("RBN_FAULTS") != "all", reason="only with RBN_FAULTS=all"
)
LONGEST = 60  # seconds from a signal to the end of the command on a busy machine


def children(pid):
    """The processes that a process started and that are still running."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if entry.name.isdecimal() and int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


class Sweep:
    """A sweep with two workers, in its own session like in a terminal."""

    def __init__(self, folder, warm=None):
        folder.mkdir()
        (folder / "mine.yaml").write_text(SWEEP)
        self.folder = folder
        words = ["sweep", "mine.yaml", "--workers", "2", "--device", "cpu"]
        if warm is not None:
            self.process = Command(warm, words, folder, folder)
            self.pid = self.process.pid
            return
        program = "import rbn_script; print('ready', flush=True); rbn_script.main()"
        with (folder / "stdout.txt").open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, *words],
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self.pid = self.process.pid
        assert wait_for(lambda: self.said, 60)

    @property
    def said(self):
        paths = [self.folder / name for name in ("stdout.txt", "stderr.txt")]
        return "".join(path.read_text() for path in paths if path.exists())


@contextlib.contextmanager
def sweeping(folder, warm=None):
    """A running sweep, and a list for the processes that it started."""
    command, started = Sweep(folder, warm), []
    try:
        yield command, started
    finally:
        for pid in (command.pid, *started):
            if is_alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        command.process.wait(LONGEST)


def at_work(folder):
    return list(folder.glob("runs/mine/trial-*/result.json"))


def finished(folder):
    return sum(row.state == "complete" for row in sweep_status(study(folder)).rows)


def study(folder):
    return load_study("mine", str(folder / "runs/mine/sweep.db"))


def interrupt(folder, number, wait, moment, to_group, warm=None):
    """Start a sweep, send it a signal, and return the outcome and its output."""
    with sweeping(folder, warm) as (command, started):
        if wait:
            assert wait_for(lambda: at_work(folder) or not is_alive(command.pid), 240)
            assert is_alive(command.pid), command.said
        time.sleep(moment)
        started += children(command.pid)
        (os.killpg if to_group else os.kill)(command.pid, number)
        if not wait_for(lambda: not is_alive(command.pid), LONGEST):
            return "hung", command.said
        if not wait_for(lambda: not any(map(is_alive, started)), 10):
            return "left workers", command.said
        code = command.process.wait(LONGEST)
    outcome = "stopped" if code == 128 + number else f"ended with {code}"
    if "Traceback" in command.said:
        outcome += " and a traceback"
    if wait:
        states = {row.state for row in sweep_status(study(folder)).rows}
        if not states <= {"complete", "waiting"}:
            outcome += ", trials not released"
    return outcome, command.said


@pytest.mark.parametrize("way", ["warm", pytest.param("from scratch", marks=thorough)])
def test_interrupts_at_random_moments(way, request, tmp_path, tries, count_outcomes):
    """Warm, signals come while trials start, train and end; from scratch, also during start-up."""
    moments = random.Random(os.environ["RBN_TEST_SEED"])
    outcomes, failures = Counter(), []
    warm = request.getfixturevalue("warm_process") if way == "warm" else None
    for attempt in range(tries(2, 100) if warm else 40):
        wait = warm is not None or attempt % 2 == 0
        number = signal.SIGTERM if attempt % 5 == 1 else signal.SIGINT
        moment = moments.uniform(0, 3 if wait else 25)
        folder = tmp_path / str(attempt)
        outcome, said = interrupt(folder, number, wait, moment, attempt % 2 == 0, warm)
        outcomes[outcome] += 1
        print(end=f"{attempt} {outcome}; ", flush=True)
        if outcome != "stopped":
            failures.append((attempt, moment, outcome, said))
    count_outcomes(f"signals to a sweep with two workers, {way}", outcomes)
    assert not failures


def test_workers_stop_when_their_parent_is_killed(warm_process, tmp_path, tries, count_outcomes):
    moments = random.Random(os.environ["RBN_TEST_SEED"])
    outcomes = Counter()
    for attempt in range(tries(1, 40)):
        folder = tmp_path / str(attempt)
        with sweeping(folder, warm_process) as (command, started):
            assert wait_for(lambda folder=folder: at_work(folder), 240)
            time.sleep(moments.uniform(0, 3))
            started += children(command.pid)
            os.kill(command.pid, signal.SIGKILL)
            ended = wait_for(lambda found=started: not any(map(is_alive, found)), LONGEST)
            outcomes["all workers ended" if ended else "workers went on"] += 1
            assert ended
        states = {row.state for row in sweep_status(study(folder)).rows}
        assert states <= {"complete", "waiting"}
    count_outcomes("kills of the parent of two workers", outcomes)
