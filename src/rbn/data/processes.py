"""Processes that help and end with the one they help."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

_AHEAD = 3  # jobs for each process that are taken before the first of them is done


class HelperLost(RuntimeError):
    """A helping process was killed or ended by itself."""


class Helpers:
    """Some fresh processes, as a context manager; on leaving it all of them are gone.

    A process that is killed raises `HelperLost` here at once: each has pipes of its own, so none
    waits for a lock that a dead one holds. Ctrl-C is for the one who is helped alone.

    Args:
        count: how many.
        start: called once in each of them, with what is `shared`.
        shared: anything that can be pickled.
    """

    def __init__(self, count: int, start: Callable[..., None] | None = None, *shared: Any) -> None:
        self._count, self._start = count, (start, shared)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Helpers:
        context = get_context("spawn")
        pairs = [context.Pipe() for _ in range(self._count)]
        self._processes = [
            context.Process(target=_help, args=(theirs, *self._start), daemon=True)
            for _, theirs in pairs
        ]
        self._pipes = [ours for ours, _ in pairs]
        try:
            with _signals_wait():
                for process in self._processes:
                    process.start()
            for _, theirs in pairs:
                theirs.close()  # else nobody would notice that the other end is gone
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
        """``work(job)`` of each job, in their order; a few of them are in memory at a time.

        Raises:
            HelperLost: a process ended before its job was done.
            Exception: what `work` raised.
        """
        left = enumerate(jobs)
        idle, busy = list(self._pipes), dict[Connection, int]()
        done: dict[int, Any] = {}
        following, more = 0, True
        while True:
            while more and idle and len(busy) + len(done) < _AHEAD * self._count:
                number, job = next(left, (-1, None))
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
                    right, found = pipe.recv()
                if not right:
                    raise found
                done[busy.pop(pipe)] = found
                idle.append(pipe)
            while following in done:
                yield done.pop(following)
                following += 1

    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        try:
            yield
        except (BrokenPipeError, ConnectionResetError, EOFError) as error:
            raise HelperLost(f"a helping process {self._how()}") from error

    def _how(self) -> str:
        """How the first process that is gone ended."""
        gone = wait([process.sentinel for process in self._processes], timeout=10)
        codes = [p.exitcode for p in self._processes if p.sentinel in gone]
        code = next((code for code in codes if code is not None), None)
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            short = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            return f"was killed by {name}{short}"
        return f"ended with {code}"


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals wait until all processes are started, in them and in this one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it lifts the block when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _help(pipe: Connection, start: Callable[..., None] | None, shared: tuple[Any, ...]) -> None:
    """One of the processes."""
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
    """Wait until the process that is helped is gone, however it ended."""
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
