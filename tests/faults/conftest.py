"""Injected faults: how many of each kind the tests try."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

# Thousands of faults and hundreds of kills, as counted in docs/results/what-it-survives.md, take
# hours.
THOROUGH = os.environ.get("RBN_FAULTS") == "all"


@pytest.fixture(scope="session")
def tries():
    """How often to try: a few times, or with RBN_FAULTS=all as often as the page says."""
    return lambda few, all_: all_ if THOROUGH else few


@pytest.fixture(scope="session")
def count_outcomes():
    """Print the outcomes of the faults, for the page; shown by ``pytest -s``."""

    def show(what, outcomes):
        print(f"\n{what}: " + ", ".join(f"{n} {how}" for how, n in sorted(outcomes.items())))

    return show


@pytest.fixture
def kill_at_changes(tmp_path, count_outcomes):
    """Run a script that kills its forks at their changes to files. Every kill must be survived.

    All changes count, by Python, SQLite or safetensors, because all go through the C library.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD and /proc are Linux's")
    if compiler is None:
        pytest.skip("needs a C compiler")
    here, library = Path(__file__).parent, tmp_path / "kill.so"
    source = here / "kill_at_operation.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)

    def run(script, what, count, torn):
        arguments = [library, tmp_path, count, int(torn)]
        errors = tmp_path / "errors.txt"
        with errors.open("a") as file:
            process = subprocess.run(
                [sys.executable, here / script, *map(str, arguments)],
                env=os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        assert process.returncode == 0, errors.read_text()
        changes, *lines = process.stdout.splitlines()
        assert len(lines) == (count or int(changes)) > 0
        outcomes = Counter(line.split(maxsplit=2)[2].partition(" ")[0] for line in lines)
        count_outcomes(f"kills of {what}, of {changes} changes", outcomes)
        failures = [line for line in lines if line.split(maxsplit=1)[1] != "-9 same"]
        assert not failures, (failures, errors.read_text())

    return run
