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
# than can be trained before a test gives up.
SWEEP = """
config: digits
set: {hidden_size: 4, epochs: 2, evaluate_every: 3, batch_size: 200}
sampler: random
trials: 100000
space:
  model: [lstm, bn-lstm]
  optimizer.lr: {low: 1e-3, high: 1e-1, log: true}
heartbeat: 1
"""
LONGEST = 60  # seconds from a signal to the end of the command on a busy machine


def children(pid):
    """The processes that a process started and that have not ended."""
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


@contextlib.contextmanager
def sweeping(folder):
    """A sweep at work, in a session of its own as in a terminal."""
    folder.mkdir()
    (folder / "mine.yaml").write_text(SWEEP)
    # Before "ready" Python is importing torch, and a signal ends it as it ends any program.
    program = "from rbn.cli import main; print('ready', flush=True); main()"
    command = [sys.executable, "-c", program, "sweep", "mine.yaml", "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--device", "cpu"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    started = []
    try:
        assert process.stdout.readline() == "ready\n"
        yield process, started
    finally:
        process.kill()
        process.communicate()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def at_work(folder):
    return list(folder.glob("runs/mine/trial-*/result.json"))


def finished(folder):
    return sum(row.state == "complete" for row in sweep_status(study(folder)).rows)


def study(folder):
    return load_study("mine", str(folder / "runs/mine/sweep.db"))


def interrupt(folder, number, wait, moment, to_group):
    """Start a sweep, send it a signal, and return its exit code and what it said."""
    with sweeping(folder) as (process, started):
        if wait:
            assert wait_for(lambda: at_work(folder) or process.poll() is not None, 240)
            assert process.poll() is None, process.communicate()
        time.sleep(moment)
        started += children(process.pid)
        send = os.killpg if to_group else os.kill
        send(process.pid, number)
        try:
            said, _ = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            return "hung", ""
        left = wait_for(lambda: not any(map(is_alive, started)), 10)
        return (process.returncode if left else "left workers"), said


def test_interrupts_at_random_moments(tmp_path, tries, count_outcomes):
    moments = random.Random(os.environ["RBN_TEST_SEED"])
    outcomes = Counter()
    for attempt in range(tries(2, 100)):
        folder = tmp_path / str(attempt)
        # One in four comes while the command and its workers are starting.
        wait = attempt % 4 != 3
        number = signal.SIGTERM if wait and attempt % 5 == 1 else signal.SIGINT
        moment = moments.uniform(0, 3 if wait else 12)
        code, said = interrupt(folder, number, wait, moment, to_group=attempt % 2 == 0)
        outcomes["stopped at once" if code == 128 + number else f"ended with {code}"] += 1
        assert code == 128 + number, (attempt, moment, said)
        assert "Traceback" not in said, (attempt, moment, said)
        if wait:
            states = {row.state for row in sweep_status(study(folder)).rows}
            assert states <= {"complete", "waiting"}, (attempt, moment, said)  # all are released
    count_outcomes("signals to a sweep with two workers", outcomes)


def test_workers_stop_when_their_parent_is_killed(tmp_path, tries, count_outcomes):
    moments = random.Random(os.environ["RBN_TEST_SEED"])
    outcomes = Counter()
    for attempt in range(tries(1, 20)):
        folder = tmp_path / str(attempt)
        with sweeping(folder) as (process, started):
            assert wait_for(lambda folder=folder: at_work(folder), 240)
            time.sleep(moments.uniform(0, 3))
            started += children(process.pid)
            process.kill()
            ended = wait_for(lambda found=started: not any(map(is_alive, found)), LONGEST)
            outcomes["all workers ended" if ended else "workers went on"] += 1
            assert ended
        states = {row.state for row in sweep_status(study(folder)).rows}
        assert states <= {"complete", "waiting"}
    count_outcomes("kills of the parent of two workers", outcomes)
