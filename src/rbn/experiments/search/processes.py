"""Several workers at once, each a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from rbn.experiments.search.worker import Job, TooManyFailed, Worker
from rbn.training import CheckpointError
from rbn.training.interrupt import wait_for_extensions

INTERRUPTED, OUT_OF_TIME = 130, 3


def run(jobs: Sequence[Job], say: Callable[[str], None]) -> list[int]:
    """Start a worker for each job, and return their exit codes when all have ended.

    Ctrl-C lets them save; a second one does not wait for that.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    stop = context.Event()
    processes = [
        context.Process(target=_main, args=(job, number, stop), name=f"worker {number}")
        for number, job in enumerate(jobs)
    ]
    # Ctrl-C while they are starting is for the parent alone, which tells them later.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for process in processes:
        process.start()
    signal.signal(signal.SIGINT, before)
    running = list(processes)
    while running:
        try:
            wait([process.sentinel for process in running], timeout=1)
        except KeyboardInterrupt:
            if stop.is_set():
                for process in running:
                    process.terminate()
            stop.set()
        for process in [p for p in running if not p.is_alive()]:
            running.remove(process)
            code = process.exitcode or 0
            if code < 0 and not stop.is_set():
                name = signal.Signals(-code).name
                say(f"{process.name} was killed by {name}; its trial will be taken up again")
    return [process.exitcode or 0 for process in processes]


def _main(job: Job, number: int, stop: Any) -> None:
    """A worker's process."""
    from optuna.exceptions import OptunaError

    from rbn.experiments.search.sampling import need_optuna

    if hasattr(os, "setsid"):
        os.setsid()  # a terminal's Ctrl-C reaches the parent alone, which tells us once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wait_for_extensions()
    need_optuna()

    def say(line: str) -> None:
        print(f"worker {number}, {line}", flush=True)

    try:
        finished = Worker(job, say, stop=stop).work()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (CheckpointError, ImportError, OptunaError, OSError, TooManyFailed, ValueError) as error:
        print(f"rbn: worker {number} ended: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    sys.exit(0 if finished else OUT_OF_TIME)
