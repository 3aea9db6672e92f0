"""Runs a sweep in forks of this process, each killed at one of its changes to files and resumed.

For the test of kills, which preloads kill_at_operation.c. Arguments: the compiled library, a folder
for the sweeps, how many kills (0: one at every change, in order), whether a kill comes in the
middle of a write, and optionally the first change to kill at. Prints the number of changes, then a
line for each kill.

The sampler is random and there is no pruner: decisions of TPE and pruners depend on the order in
which trials end, which a kill changes.
"""

import ctypes
import json
import os
import random
import shutil
import sys
import traceback
from pathlib import Path

import lightning.fabric  # noqa: F401  (so that a fork need not)
import torch

from rbn.experiments import build
from rbn.experiments.search import heartbeat, sweep_file
from rbn.experiments.search.sampling import need_optuna
from rbn.experiments.search.status import sweep_status
from rbn.experiments.search.storage import load_study
from rbn.experiments.search.worker import Job, Worker
from rbn.experiments.training_session import TrainingSession

SWEEP = """
config: digits
set: {hidden_size: 2, epochs: 1, evaluate_every: 2, batch_size: 500, population_batch: 600}
sampler: random
trials: 2
space:
  optimizer.lr: {low: 1e-3, high: 1e-1, log: true}
heartbeat: 0.05
"""
CPU = torch.device("cpu")


def result(folder):
    """The outcome of a sweep, without times."""
    now = sweep_status(load_study("mine", str(folder / "sweep.db")))
    trials = []
    for row in now.rows:
        content = json.loads((folder / f"trial-{row.number:04d}" / "result.json").read_text())
        numbers = [content[name] for name in ("valid", "test", "steps", "best_step", "config")]
        outcome = [row.state, row.parameters, row.best, row.curve, row.steps]
        trials.append([row.number, *outcome, *numbers])
    return json.dumps(trials)


def main(library, place, count, torn, first=0):
    killer = ctypes.CDLL(library)
    torch.set_num_threads(1)
    need_optuna()
    file = Path(place) / "mine.yaml"
    file.write_text(SWEEP)
    sweep = sweep_file.read(str(file))
    build._CHECKPOINT_SECONDS = 0.0  # one after every evaluation
    loaded = {}
    TrainingSession([], CPU, loaded=loaded).load(sweep.config({}))
    log = os.open(str(Path(place) / "errors.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run(folder, at=None):
        """Work on a sweep in a fork. Returns its exit code and its output to a pipe."""
        reader, writer = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(log, 2)
                if at is not None:
                    heartbeat._TICK = 1000.0  # no heartbeats: all sweeps make the same changes
                    killer.arm(str(folder).encode(), at, torn)
                worker = Worker(
                    Job(sweep, str(folder / "sweep.db"), folder, CPU), lambda line: None
                )
                worker._loaded = loaded
                assert worker.work()
                changes = killer.operations()
                found = result(folder)
                os.write(writer, json.dumps([changes, found]).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said

    code, said = run(Path(place) / "whole", at=-1)
    assert code == 0, (Path(place) / "errors.txt").read_text()
    changes, whole = json.loads(said)
    print(changes, flush=True)
    moments = range(first, changes)
    if count:
        moments = random.Random(os.environ["RBN_TEST_SEED"]).sample(moments, count)
    for at in moments:
        folder = Path(place) / f"killed-{at}"
        code, _ = run(folder, at)
        again, said = run(folder)
        same = again == 0 and json.loads(said)[1] == whole
        print(at, code, "same" if same else f"different ({again}): {said}", flush=True)
        if same:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
