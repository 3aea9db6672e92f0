"""A pool of worker processes that notices when one is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

_AHEAD = 3  # jobs per process that may be waiting or unordered


class WorkerLost(RuntimeError):
    """A worker process was killed or exited."""


class ProcessPool:
    """Worker processes in a context manager that ends all of them.

    `multiprocessing.Pool` hangs if a worker is killed; this pool raises `WorkerLost` at once. Each
    worker has its own pipe, so none waits for a lock held by a dead one. Workers ignore Ctrl-C and
    exit when their parent is gone.

    Args:
        count: number of processes.
        start: called once in each process, with `shared`.
        shared: picklable arguments.
    """

    def __init__(self, count: int, start: Callable[..., None] | None = None, *shared: Any) -> None:
        self._count, self._initializer = count, (start, shared)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> ProcessPool:
        context = get_context("spawn")
        pairs = [context.Pipe() for _ in range(self._count)]
        self._processes = [
            context.Process(target=_run_worker, args=(theirs, *self._initializer), daemon=True)
            for _, theirs in pairs
        ]
        self._pipes = [ours for ours, _ in pairs]
        try:
            with _signals_wait():
                for process in self._processes:
                    process.start()
            for _, theirs in pairs:
                theirs.close()  # so that a dead worker closes the pipe
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            if process.pid is not None:
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()

    def map(self, work: Callable[..., Any], jobs: Iterable[object]) -> Iterator[Any]:
        """Yield ``work(job)`` for each job, in order, holding only a few jobs in memory.

        Raises:
            WorkerLost: a process ended before its job was done.
            Exception: what `work` raised.
        """
        remaining = enumerate(jobs)
        idle, busy = list(self._pipes), dict[Connection, int]()
        done: dict[int, Any] = {}
        following, more = 0, True
        while True:
            while more and idle and len(busy) + len(done) < _AHEAD * self._count:
                number, job = next(remaining, (-1, None))
                more = number >= 0
                if more:
                    pipe = idle.pop()
                    with self._losses():
                        pipe.send((work, job))
                    busy[pipe] = number
            if not busy:
                return
            ready = wait(list(busy))
            for pipe in [each for each in busy if each in ready]:
                with self._losses():
                    succeeded, result = pipe.recv()
                if not succeeded:
                    raise result
                done[busy.pop(pipe)] = result
                idle.append(pipe)
            while following in done:
                yield done.pop(following)
                following += 1

    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        try:
            yield
        except (BrokenPipeError, ConnectionResetError, EOFError) as error:
            raise WorkerLost(f"a worker process {self._cause()}") from error

    def _cause(self) -> str:
        """How the first dead process ended."""
        gone = wait([process.sentinel for process in self._processes], timeout=10)
        ended = [process for process in self._processes if process.sentinel in gone]
        for process in ended:
            process.join(timeout=10)  # the sentinel closes shortly before the exit code is set
        code = next((p.exitcode for p in ended if p.exitcode is not None), None)
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = ", possibly because it ran out of memory" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint}"
        return f"exited with code {code}"


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Inside the ``with`` block, hold back signals, so that all processes start."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_worker(
    pipe: Connection, start: Callable[..., None] | None, shared: tuple[Any, ...]
) -> None:
    """The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(*shared)
    while True:
        try:
            work, job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, work(job)))
        except Exception as error:
            pipe.send((False, error))


def _end_with_parent() -> None:
    """Exit when the parent process is gone, however it ended."""
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
