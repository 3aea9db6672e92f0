"""Runs `rbn` commands in forks of a process that has imported everything.

A command with two workers imports torch and Lightning three times, which takes most of a minute on
a busy machine. Here the command is forked from a warm process, and so are the workers that it
spawns. Everything else is as usual: they have their own session, signal handlers and open files.

Reads requests from standard input, one JSON line each, and answers each with a number:
``["run", folder, words, stdout, stderr]`` starts ``rbn WORDS`` in the folder, or ``python WORDS``
if the first word is a file ``.py``, with its output in these files, and gives its process id;
``["poll", pid]`` gives its exit code, or null before it has ended.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
from multiprocessing import util

import rbn.cli
import rbn.cli.app
from rbn.experiments import training_session  # noqa: F401
from rbn.training import interrupt

# The imports of a command and its workers, as far as installed.
for name in (
    *("lightning.fabric", "sklearn.datasets", "optuna", "sqlalchemy.dialects.sqlite"),
    "rbn.experiments.search.worker_processes",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

spawn = util.spawnv_passfds


def usual_signals():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.unraisablehook = sys.__unraisablehook__


def fork_instead(executable, arguments, keep):
    """Replaces `multiprocessing.util.spawnv_passfds`."""
    programs = [word for word in map(os.fsdecode, arguments) if "spawn_main" in word]
    if not programs:  # the resource tracker, which imports little
        return spawn(executable, arguments, keep)
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
        (program,) = programs
        sys.argv = ["-c", "--multiprocessing-fork"]
        exec(program, {})
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def run(folder, words, stdout, stderr):
    """In the fork: become the command."""
    os.setsid()
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [os.open(f, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for f in (stdout, stderr)]
    for old, new in zip((nothing, *files), (0, 1, 2), strict=True):
        os.dup2(old, new)
    usual_signals()
    util.spawnv_passfds = fork_instead
    if not words[0].endswith(".py"):
        sys.argv = ["rbn", *words]
        rbn.cli.main()
        return
    sys.argv = words
    sys.path.insert(0, os.path.dirname(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def poll(pid):
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def main():
    print("ready", flush=True)
    for line in sys.stdin:
        what, *details = json.loads(line)
        if what == "poll":
            answer = poll(*details)
        else:
            answer = os.fork()
            if answer == 0:
                run(*details)
                return
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
