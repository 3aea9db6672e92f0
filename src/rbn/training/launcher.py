"""Several processes for one run: started, watched and ended together."""

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

_TICK = 0.1  # seconds between looks at what was interrupted
_GRACE = 2.0  # seconds in which the others may say what they know of a failure
_LAST = 10.0  # and in which they may end when asked to
# What gloo and NCCL say when another process is gone or silent.
_LOST = ("closed by peer", "reset by peer", "broken pipe", "timed out", "timeout", "nccl", "gloo")


class RankLost(RuntimeError):
    """One of the processes of a run died, or the others cannot reach it."""


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process cannot be reached."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, (RankLost, dist.DistError)) or any(
        s in str(error).lower() for s in _LOST
    )


@contextlib.contextmanager
def in_touch(world: World | None) -> Iterator[None]:
    """A block in which several processes work together; alone, it does nothing.

    Raises:
        RankLost: when one of the others cannot be reached, or this one is asked to end: torchrun
            does that where another failed.
    """
    if world is None:
        yield
        return

    def told_to_end(number: int, frame: Any) -> None:
        raise RankLost(f"rank {world.rank} of {world.count} was told to end: another one failed")

    before = signal.signal(signal.SIGTERM, told_to_end)
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise RankLost(
            f"rank {world.rank} of {world.count} cannot reach another one, which has ended or "
            f"hangs ({_short(error)})"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    if dist.is_initialized():
        dist.destroy_process_group()


def _short(error: BaseException) -> str:
    """The part of a backend's message that says what happened."""
    return re.sub(r"^\[[^]]*\]\s*", "", str(error)).partition(". ")[0].splitlines()[0]


def launch(work: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Call ``work(*arguments)`` in several processes of this machine, as torchrun would start them.

    If one fails, all are ended. Ctrl-C is passed on to them once.

    Args:
        work: a function at the top of a module.
        arguments: what can be pickled.
        count: of the processes.

    Raises:
        RankLost: one was killed, or ended without a word; says which.
        Exception: what `work` raised, in the lowest-numbered process that knows.
    """
    context = get_context("spawn")
    port = _free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(
            target=_work_as, args=(World(k, count, k, count), port, pipes[k][1], work, arguments)
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
    _judge([process.exitcode for process in processes], reports)


def _wait(
    processes: list[Any], receivers: list[Any], interrupts: interrupt.Interrupts
) -> list[BaseException | None]:
    """Until all have ended well, or a moment after one has not. Gives what they said by then.

    They are listened to all the time: who has much to say waits until it is heard. Each signal of
    `interrupts` is passed on to them.
    """
    reports: list[BaseException | None] = [None] * len(processes)
    unheard = dict(enumerate(receivers))
    deadline: float | None = None
    passed_on = 0
    while True:
        codes = [process.exitcode for process in processes]
        if deadline is None and any(codes):
            deadline = time.monotonic() + _GRACE
        limit = None if deadline is None else deadline - time.monotonic()
        if None not in codes or (limit is not None and limit <= 0):
            return [_report(unheard[k]) if k in unheard else told for k, told in enumerate(reports)]
        alive = [p for p, code in zip(processes, codes, strict=True) if code is None]
        if interrupts.count > passed_on:
            passed_on = interrupts.count
            for process in alive:
                os.kill(process.pid, signal.SIGINT)
        limit = _TICK if limit is None else min(_TICK, limit)
        ready = connection.wait([p.sentinel for p in alive] + list(unheard.values()), limit)
        for k, receiver in list(unheard.items()):
            if receiver in ready:
                reports[k] = _report(receiver)
                del unheard[k]


def _report(receiver: Any) -> BaseException | None:
    """What a process said before it ended."""
    with contextlib.suppress(EOFError, OSError):
        if receiver.poll():
            found: BaseException = pickle.loads(receiver.recv_bytes())
            return found
    return None


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _LAST
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _judge(codes: list[int | None], reports: list[BaseException | None]) -> None:
    """Raise what is the cause of a failure, and not what follows from it."""
    told = [error for error in reports if error is not None]
    for error in told:
        if not is_lost(error):
            raise error
    for rank, (code, report) in enumerate(zip(codes, reports, strict=True)):
        if report is None and code and code != -signal.SIGTERM:
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            )
            raise RankLost(f"rank {rank} of {len(codes)} {how}; the others were ended")
    if told:
        raise told[0]
    if any(codes):
        raise RankLost("the processes were ended from outside")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _work_as(
    world: World, port: int, sender: Any, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """One of the processes, from its first moment to its last."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C comes from the one that watches, and from it alone
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(world.environment(port))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.local_count))
    try:
        interrupt.started(forget=False)
        work(*arguments)
        end_at_once(0)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and not is_lost(error):
            error.__notes__ = [f"in rank {world.rank}:\n{traceback.format_exc()}"]
        try:
            content = pickle.dumps(error)
        except Exception:
            content = pickle.dumps(RuntimeError(traceback.format_exc()))
        sender.send_bytes(content)
        end_at_once(1)  # without a last meeting of the processes, which may not come about


def end_at_once(code: int) -> None:
    """End a process that worked with others, without taking the interpreter down.

    A thread of gloo may still be about to let go of the tensors it exchanged last. For that it
    needs the interpreter's lock, and in an interpreter that is being taken down it gets none but
    is ended, which aborts the process after all its work is done.
    """
    if code == 0:  # else they might wait for the others, who may not come
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _end_with_parent() -> None:
    """Wait until the process that watches is gone, however it ended."""
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
