"""Ctrl-C and SIGTERM while the command imports torch and the rest of the package."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no signals between processes")

PROGRAM = "import rbn_script; print('ready', flush=True); rbn_script.main()"


def test_signals_during_the_imports(tmp_path, tries, count_outcomes):
    """Prints one line and exits with the signal's code, or finished before the signal."""
    draw = random.Random(os.environ["RBN_TEST_SEED"])
    outcomes = Counter()
    for attempt in range(tries(2, 100)):
        process = subprocess.Popen(
            # Importing everything takes seconds; then it reports at once that there is no run.
            [sys.executable, "-c", PROGRAM, "runs", "nothing"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        moment = draw.uniform(0, tries(1, 4))
        time.sleep(moment)
        number = signal.SIGTERM if attempt % 4 == 1 else signal.SIGINT
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        context = attempt, moment, process.returncode, errors
        assert process.returncode in (128 + number, 2), context
        assert errors.startswith("rbn: "), context
        assert errors.count("\n") == 1, context
        outcomes["stopped" if process.returncode > 128 else "had ended"] += 1
    assert outcomes["stopped"]
    count_outcomes("signals while the command starts", outcomes)
