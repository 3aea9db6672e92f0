"""A sweep, killed at every change that it makes to a file, resumes to the same numbers."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("optuna")

HERE = Path(__file__).parent
thorough = pytest.mark.skipif(
    os.environ.get("RBN_FAULTS") != "all", reason="only with RBN_FAULTS=all"
)
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD and /proc are Linux's")
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    "moment", ["before a change", pytest.param("within a write", marks=thorough)]
)
def test_a_kill_at_every_file_operation(moment, tmp_path, tries, count_outcomes):
    """Python's operations and those of SQLite and safetensors: all go through the C library."""
    torn = moment == "within a write"
    count = tries(4, 0)
    library = tmp_path / "kill.so"
    source = HERE / "kill_at_operation.c"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    arguments = [library, tmp_path, count, int(torn)]
    process = subprocess.run(
        [sys.executable, HERE / "killed_sweeps.py", *map(str, arguments)],
        env=os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    errors = tmp_path / "errors.txt"
    assert process.returncode == 0, errors.read_text() if errors.exists() else process
    changes, *lines = process.stdout.splitlines()
    assert len(lines) == (count or int(changes))
    outcomes, failures = Counter(), []
    for line in lines:
        _, code, outcome = line.split(maxsplit=2)
        if code != "-9" or outcome != "same":
            failures.append(line)
        outcomes[outcome.partition(" ")[0]] += 1
    count_outcomes(f"kills of a sweep {moment}, of {changes} changes", outcomes)
    assert not failures, (failures, errors.read_text())
