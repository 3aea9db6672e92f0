"""``rbn data build-cloze``: killed or interrupted at any moment, or with one process killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rbn.cli.app import app  # noqa: F401  (the command that the tests start can be imported)
from rbn.data.articles import build, run
from rbn.data.process_pool import ProcessPool, WorkerLost

ARTICLES = 40
thorough = pytest.mark.skipif(
    os.environ.get("RBN_FAULTS") != "all", reason="only with RBN_FAULTS=all"
)


@pytest.fixture
def articles(tmp_path):
    path = tmp_path / "articles.jsonl"
    with path.open("w") as file:
        for k in range(ARTICLES):
            text = (
                f"Anna Berg met Carl Dorn in Oslo on day {k} . Later Carl Dorn left Oslo for Rome ."
            )
            record = {
                "id": str(k),
                "source": "dailymail",
                "part": ("training", "validation", "test")[k % 3],
                "article": text,
                "highlights": [f"Anna Berg met Carl Dorn on day {k}"],
            }
            file.write(json.dumps(record) + "\n")
    return path


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(run, "_CHUNK", 5)


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", ["within a write", pytest.param("before a change", marks=thorough)]
)
def test_a_kill_at_every_file_operation(moment, articles, tries, kill_at_changes):
    """The next build resumes it, and writes the same files as an undisturbed build."""
    torn = moment == "within a write"
    kill_at_changes("killed_builds.py", f"build-cloze {moment}", tries(30, 0), torn)


def test_a_damaged_journal_is_named_or_done_again(articles, tmp_path, monkeypatch):
    build(articles, tmp_path / "whole", processes=1)
    expected = content(tmp_path / "whole")
    out, seen = tmp_path / "out", []

    def stops(what, done):
        seen.append(what)
        if seen.count("writing") == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(articles, out, processes=1, progress=stops)
    journal = out / "build.journal"
    whole = journal.read_bytes()
    middle = whole.index(b"\n") + 30
    journal.write_bytes(whole[:middle] + b"?" + whole[middle + 1 :])
    build(articles, out, processes=1)
    assert content(out) == expected
    (out / "build.json").unlink()
    journal.write_bytes(b"x" + whole[1:])
    with pytest.raises(FileExistsError, match="another folder"):
        build(articles, out, processes=1)


def identity(job):
    return job


def ends(job):
    os.kill(os.getpid(), signal.SIGKILL)


def fails(job):
    raise ValueError(f"bad {job}")


@pytest.mark.slow
def test_helpers_give_results_in_order_and_say_how_they_were_lost():
    with ProcessPool(2) as pool:
        # Jobs larger than a pipe's buffer.
        jobs = [bytes([k % 256]) * 100_000 for k in range(20)]
        assert list(pool.map(identity, jobs)) == jobs
        with pytest.raises(ValueError, match="bad 3"):
            list(pool.map(fails, [3]))
        with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
            list(pool.map(ends, jobs))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find processes")
def test_signals_at_random_moments(articles, tmp_path, tries, count_outcomes):
    """To the command, to its group like from a terminal, and SIGKILL to one of its helpers."""
    build(articles, tmp_path / "whole", processes=1)
    expected, outcomes = content(tmp_path / "whole"), Counter()
    draw = random.Random(os.environ["RBN_TEST_SEED"])
    program = (
        "import sys; from rbn.data.articles import run; run._CHUNK = 5\n"
        "from rbn.cli import main; sys.argv[0] = 'rbn'; print('ready', flush=True); main()"
    )
    for attempt in range(tries(2, 40)):
        out = tmp_path / str(attempt)
        command = ["data", "build-cloze", "--articles", articles, "--out", out, "--processes", "2"]
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0, 8))
        if attempt % 2:
            helpers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in helpers[-1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if attempt % 4 else os.kill)(process.pid, signal.SIGINT)
        said, errors = process.communicate(timeout=120)
        assert process.returncode in (0, 1, 130), (process.returncode, said, errors)
        assert "Traceback" not in errors
        outcomes[f"ended with {process.returncode}"] += 1
        if process.returncode:
            assert "rbn: " in errors, (attempt, process.returncode, said, errors)
            build(articles, out, processes=1)
        assert content(out) == expected
    count_outcomes("signals to build-cloze and its helpers", outcomes)
