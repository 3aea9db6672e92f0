"""Several workers of a sweep, each in its own process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from rbn.experiments.search.worker import Job, TooManyFailed, Worker
from rbn.training import CheckpointError, interrupt

INTERRUPTED, OUT_OF_TIME = 130, 3
_TICK = 0.1  # seconds between checks for interrupts


def run(jobs: Sequence[Job], say: Callable[[str], None]) -> list[int]:
    """Start a worker for each job. Returns their exit codes when all have ended.

    After Ctrl-C or SIGTERM the workers save, and their exit code is 128 plus the signal's number. A
    second signal does not wait for that.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    # A worker stops when its end of the pipe is closed, which the system does if we are killed.
    pipes = [context.Pipe(duplex=False) for _ in jobs]
    processes = [
        context.Process(target=_main, args=(job, number, reader), name=f"worker {number}")
        for number, (job, (reader, _)) in enumerate(zip(jobs, pipes, strict=True))
    ]
    told = 0
    with interrupt.remembered(raise_second=False) as interrupts:
        try:
            with interrupt.starting():
                for process in processes:
                    process.start()
            running = list(processes)
            while running:
                wait([process.sentinel for process in running], timeout=_TICK)
                if told == 0 and interrupts.count > 0:
                    _tell(pipes)
                if told <= 1 < interrupts.count:
                    for process in running:
                        process.kill()
                told = interrupts.count
                for process in [p for p in running if not p.is_alive()]:
                    running.remove(process)
                    code = process.exitcode or 0
                    if code < 0 and not told:
                        name = signal.Signals(-code).name
                        say(
                            f"{process.name} was killed by {name}; its trial will be taken up again"
                        )
        finally:
            _tell(pipes)
            for process in processes:
                if process.pid is not None:
                    process.join()
        interrupted = 128 + (interrupts.seen or signal.SIGINT)
    codes = [process.exitcode or 0 for process in processes]
    return [interrupted if code == INTERRUPTED else code for code in codes]


def _tell(pipes: Sequence[tuple[Any, Any]]) -> None:
    """Tell the workers to save and stop."""
    for _, writer in pipes:
        writer.close()


def _main(job: Job, number: int, told: Any) -> None:
    """The main function of a worker process."""
    if hasattr(os, "setsid"):
        os.setsid()  # only the parent gets a terminal's Ctrl-C, and tells us once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.started(forget=True)
    interrupt.handle_signals()
    with interrupt.remembered(raise_second=False):
        threading.Thread(target=_wait_until, args=(told,), name="told", daemon=True).start()
        sys.exit(_work(job, number))


def _wait_until(told: Any) -> None:
    """Interrupt this process, like Ctrl-C, when told to or when the parent is gone."""
    with contextlib.suppress(OSError):  # raised on Windows
        told.poll(None)
    interrupt.send_to_main()


def _work(job: Job, number: int) -> int:
    """Run a worker. Returns its exit code."""
    from optuna.exceptions import OptunaError

    from rbn.experiments.search.sampling import need_optuna

    need_optuna()

    def say(line: str) -> None:
        print(f"worker {number}, {line}", flush=True)

    try:
        return 0 if Worker(job, say).work() else OUT_OF_TIME
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CheckpointError, ImportError, OptunaError, OSError, TooManyFailed, ValueError) as error:
        print(f"rbn: worker {number} ended: {error}", file=sys.stderr, flush=True)
        return 1
