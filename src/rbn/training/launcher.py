"""Starts the processes of one run, watches them, and ends all of them if one fails."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection, get_context, parent_process
from typing import Any

import torch
import torch.distributed as dist

from rbn.training import interrupt
from rbn.training.world import World

_TICK = 0.1  # seconds between checks for Ctrl-C
_GRACE = 2.0  # seconds for the other processes to report after one has failed
_EXIT_TIMEOUT = 10.0  # seconds for a process to exit after SIGTERM
# Parts of the messages of gloo and NCCL when another process is gone or does not respond.
_LOST_MESSAGES = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "timed out",
    "timeout",
    "nccl",
    "gloo",
)


class RankLost(RuntimeError):
    """A process of the run died or cannot be reached."""


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process cannot be reached."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, (RankLost, dist.DistError)) or any(
        s in str(error).lower() for s in _LOST_MESSAGES
    )


@contextlib.contextmanager
def process_group(world: World | None) -> Iterator[None]:
    """Inside the ``with`` block, several processes work together. No effect for a single one.

    Raises:
        RankLost: another process cannot be reached, or this one got SIGTERM, which torchrun sends
            after another process failed.
    """
    if world is None:
        yield
        return

    def terminated(number: int, frame: Any) -> None:
        raise RankLost(f"rank {world.rank} of {world.count} got SIGTERM: another rank failed")

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise RankLost(
            f"rank {world.rank} of {world.count} cannot reach another rank, which has ended or "
            f"hangs ({_short(error)})"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    if dist.is_initialized():
        dist.destroy_process_group()


def _short(error: BaseException) -> str:
    """The informative part of a backend's error message."""
    return re.sub(r"^\[[^]]*\]\s*", "", str(error)).partition(". ")[0].splitlines()[0]


def launch(work: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Call ``work(*arguments)`` in several processes on this machine, like torchrun.

    If one of them fails, all are ended. Ctrl-C is passed on to them once.

    Args:
        work: a module-level function.
        arguments: picklable.
        count: number of processes.

    Raises:
        RankLost: a process was killed or exited without an error message; says which.
        Exception: the error that `work` raised, from the lowest rank that reported one.
    """
    context = get_context("spawn")
    port = _free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(
            target=_run_rank, args=(World(k, count, k, count), port, pipes[k][1], work, arguments)
        )
        for k in range(count)
    ]
    with interrupt.remembered(raise_second=False) as interrupts:
        try:
            with interrupt.starting():
                for process in processes:
                    process.start()
            for _, sender in pipes:
                sender.close()
            reports = _wait(processes, [receiver for receiver, _ in pipes], interrupts)
        finally:
            _end([process for process in processes if process.pid is not None])
    _raise_cause([process.exitcode for process in processes], reports)


def _wait(
    processes: list[Any], receivers: list[Any], interrupts: interrupt.Interrupts
) -> list[BaseException | None]:
    """Wait until all processes have exited, or until shortly after one failed.

    Keeps reading their reports, because a process with a long report blocks until it is read.
    Passes each signal of `interrupts` on to them.

    Returns:
        The error that each process reported, or None.
    """
    reports: list[BaseException | None] = [None] * len(processes)
    unread = dict(enumerate(receivers))
    deadline: float | None = None
    passed_on = 0
    while True:
        codes = [process.exitcode for process in processes]
        if deadline is None and any(codes):
            deadline = time.monotonic() + _GRACE
        limit = None if deadline is None else deadline - time.monotonic()
        if None not in codes or (limit is not None and limit <= 0):
            return [_report(unread[k]) if k in unread else seen for k, seen in enumerate(reports)]
        alive = [p for p, code in zip(processes, codes, strict=True) if code is None]
        if interrupts.count > passed_on:
            passed_on = interrupts.count
            for process in alive:
                os.kill(process.pid, signal.SIGINT)
        limit = _TICK if limit is None else min(_TICK, limit)
        ready = connection.wait([p.sentinel for p in alive] + list(unread.values()), limit)
        for k, receiver in list(unread.items()):
            if receiver in ready:
                reports[k] = _report(receiver)
                del unread[k]


def _report(receiver: Any) -> BaseException | None:
    """The error that a process reported, or None."""
    with contextlib.suppress(EOFError, OSError):
        if receiver.poll():
            error: BaseException = pickle.loads(receiver.recv_bytes())
            return error
    return None


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _EXIT_TIMEOUT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _raise_cause(codes: list[int | None], reports: list[BaseException | None]) -> None:
    """Raise the error that caused a failure, rather than one that resulted from it."""
    errors = [error for error in reports if error is not None]
    for error in errors:
        if not is_lost(error):
            raise error
    for rank, (code, report) in enumerate(zip(codes, reports, strict=True)):
        if report is None and code and code != -signal.SIGTERM:
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            )
            raise RankLost(f"rank {rank} of {len(codes)} {how}; the others were ended")
    if errors:
        raise errors[0]
    if any(codes):
        raise RankLost("the processes were terminated from outside")


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def _run_rank(
    world: World, port: int, sender: Any, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """The main function of one process."""
    if hasattr(os, "setsid"):
        os.setsid()  # only the parent gets a terminal's Ctrl-C, and passes it on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(world.environment(port))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_count))
    try:
        interrupt.started(forget=False)
        work(*arguments)
        exit_at_once(0)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and not is_lost(error):
            error.__notes__ = [f"in rank {world.rank}:\n{traceback.format_exc()}"]
        try:
            content = pickle.dumps(error)
        except Exception:
            content = pickle.dumps(RuntimeError(traceback.format_exc()))
        sender.send_bytes(content)
        exit_at_once(1)  # skips the barrier of the process group, which may never complete


def exit_at_once(code: int) -> None:
    """Exit a process of a group without finalizing the interpreter.

    A gloo thread may still have to release the last tensors it exchanged, for which it needs the
    GIL. Requesting the GIL during finalization ends that thread, which aborts the process after all
    its work is done.
    """
    if code == 0:  # otherwise exit functions might wait for processes that are gone
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _end_with_parent() -> None:
    """Exit when the parent process is gone, however it ended."""
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
