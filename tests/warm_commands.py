"""Starts `rbn` commands without their imports, in forks of a warm process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class WarmProcess:
    """A process that has imported everything; see warm_process.py."""

    def __init__(self):
        self._process = None

    def ask(self, *request):
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("warm_process.py"))],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdout.readline() == "ready\n"
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


class Command:
    """A running `rbn` command, in its own session like in a terminal.

    Args:
        warm: the process to fork.
        words: the command line after `rbn`, or a Python file and its arguments.
        folder: the working folder.
        output: an empty folder for ``stdout.txt`` and ``stderr.txt``.
    """

    def __init__(self, warm, words, folder, output):
        self._warm, self.returncode = warm, None
        self._files = [Path(output) / name for name in ("stdout.txt", "stderr.txt")]
        self.pid = warm.ask("run", str(folder), list(map(str, words)), *map(str, self._files))

    @property
    def output(self):
        return self._read(0)

    @property
    def errors(self):
        return self._read(1)

    def _read(self, which):
        path = self._files[which]
        return path.read_text() if path.exists() else ""

    def poll(self):
        if self.returncode is None:
            self.returncode = self._warm.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rbn", timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)
