"""Signals that are remembered, sent again, or raised at once."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rbn.training import interrupt

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no signals between processes")


def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def test_the_first_is_remembered_and_the_second_raises():
    handler = signal.getsignal(signal.SIGINT)
    with interrupt.remembered() as interrupts:
        assert not interrupt.pending()
        press()
        assert interrupts.seen == signal.SIGINT
        assert interrupt.pending()
        with interrupt.remembered() as inner:  # shares the outer block's signals
            assert inner.seen
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert signal.getsignal(signal.SIGINT) is handler
    assert not interrupt.pending()


def test_no_second_raises_where_the_caller_counts_them():
    with interrupt.remembered(raise_second=False) as interrupts:
        press()
        press()
        assert interrupts.count == 2


def test_waiting_ends_with_a_signal():
    with interrupt.remembered() as interrupts:
        threading.Timer(0.1, interrupt.send_to_main).start()
        began = time.monotonic()
        interrupts.wait(60)
        assert interrupts.seen
        assert time.monotonic() - began < 50


def test_breakable_work_is_broken_off_even_if_the_interrupt_was_swallowed():
    done = []

    def work(interrupts, press):
        with interrupts.breakable():
            press()
            done.append(1)

    def swallowed():
        with contextlib.suppress(KeyboardInterrupt):
            press()

    with interrupt.remembered() as interrupts:
        for _ in range(2):  # the second does not even start
            with pytest.raises(KeyboardInterrupt):
                work(interrupts, press)
        assert interrupts.count == 1
    assert not done
    with interrupt.remembered() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            work(interrupts, swallowed)
        assert interrupts.count == 1
    assert done


def test_sigterm_is_remembered_only_where_it_means_to_stop():
    with interrupt.remembered():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


PROGRAM = """
import os, signal, sys, time, weakref
from rbn.training import interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt.handle_signals()
class Thing: pass
number = signal.Signals[sys.argv[1]]
thing = Thing()
found = weakref.ref(thing, lambda _: os.kill(os.getpid(), number))
try:
    del thing  # Python drops what is raised in the callback
    print("dropped", flush=True)
    time.sleep(60)
except KeyboardInterrupt as error:
    print("interrupted by", interrupt.exit_signal(error), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_what_python_drops_comes_again(name):
    command = [sys.executable, "-c", PROGRAM, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.split("\n")[-2] == f"interrupted by {signal.Signals[name].value}", done
    assert "Traceback" not in done.stderr
