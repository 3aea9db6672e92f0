"""Runs `rbn` commands in forks of a process that has imported everything.

A command with two workers imports torch and Lightning three times, which takes most of a minute on
a busy machine. Here the command is forked from a warm process, and so are the workers that it
spawns. All else is as usual: they have their own session, signal handlers and open files.

Reads lines from standard input: ``run FOLDER WORDS`` prints the process id of the command, whose
output goes to ``said.txt`` in the folder; ``wait PID`` prints its exit code.
"""

import contextlib
import os
import signal
import sys
from multiprocessing import util

# What a command and its workers import.
import lightning.fabric
import optuna  # noqa: F401
import sklearn.datasets  # noqa: F401
import sqlalchemy.dialects.sqlite  # noqa: F401

import rbn.cli
import rbn.cli.app
from rbn.experiments import training_session  # noqa: F401
from rbn.experiments.search import worker_processes  # noqa: F401
from rbn.training import interrupt


def usual_signals():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.unraisablehook = sys.__unraisablehook__


def fork_instead(executable, arguments, keep):
    """In place of `multiprocessing.util.spawnv_passfds`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        keep = {0, 1, 2, *keep}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in keep:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        usual_signals()
        interrupt._active = None
        (program,) = [
            word.decode() if isinstance(word, bytes) else word
            for word in arguments
            if b"spawn_main" in os.fsencode(word)
        ]
        sys.argv = ["-c", "--multiprocessing-fork"]
        exec(program, {})
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def run(folder, words):
    """In the fork: become the command."""
    os.setsid()
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for old, new in ((nothing, 0), (said, 1), (said, 2)):
        os.dup2(old, new)
    usual_signals()
    util.spawnv_passfds = fork_instead
    sys.argv = ["rbn", *words]
    rbn.cli.main()


def main():
    assert lightning.fabric.Fabric
    print("ready", flush=True)
    for line in sys.stdin:
        what, *words = line.split()
        if what == "wait":
            _, status = os.waitpid(int(words[0]), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            run(words[0], words[1:])
        print(pid, flush=True)


if __name__ == "__main__":
    main()
