"""Storages for tests of sweeps: two kinds of file, and our own PostgreSQL server."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from rbn.experiments.search import sweep_file
from rbn.experiments.search.sampling import need_optuna
from rbn.experiments.search.storage import open_study
from rbn.experiments.search.trials import Trials

PLACES = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")))


def unprivileged():
    """How to start a process as a user who may run a server, which root may not."""
    if os.geteuid() != 0:
        return {}, None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}, user
    pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")


@pytest.fixture(scope="session")
def postgres():
    """The URL of a server for these tests only, on a socket in its own folder."""
    pytest.importorskip("psycopg", reason="no driver for PostgreSQL: psycopg is not installed")
    path = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    programs = [shutil.which(name, path=path) for name in ("initdb", "postgres")]
    if None in programs:
        pytest.skip("no PostgreSQL server: no initdb in PATH nor in /usr/lib/postgresql/*/bin")
    initdb, server = programs
    who, user = unprivileged()
    # Not pytest's folder, which other users cannot access; a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="rbn-pg-"))
    process = None
    try:
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
        data = folder / "data"
        options = ["-D", str(data), "-U", "rbn", "-A", "trust", "-E", "UTF8", "--no-sync"]
        made = subprocess.run([initdb, *options], **who, cwd=folder, capture_output=True, text=True)
        if made.returncode != 0:
            pytest.skip(f"initdb does not work here: {made.stderr.strip().splitlines()[-1]}")
        settings = ["listen_addresses=", f"unix_socket_directories={folder}", "fsync=off"]
        command = [server, "-D", str(data), *(word for s in settings for word in ("-c", s))]
        log = (folder / "log").open("w")
        process = subprocess.Popen(command, **who, cwd=folder, stdout=log, stderr=log)
        log.close()
        url = f"postgresql+psycopg://rbn@/postgres?host={folder}"
        _wait_for(f"host={folder} user=rbn dbname=postgres", process, folder / "log")
        yield url
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)  # does not wait for connected clients
            process.wait(timeout=60)
        shutil.rmtree(folder)


def _wait_for(place, process, log):
    import psycopg

    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(place).close()
            return
        except psycopg.OperationalError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)


@pytest.fixture(params=["sqlite", "journal", "postgres"])
def where(request, tmp_path):
    """A storage of each kind."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres")
    return str(tmp_path / {"sqlite": "sweep.db", "journal": "sweep.log"}[request.param])


@pytest.fixture
def make(tmp_path):
    """Write the file of a small sweep on digits, and read it."""
    import yaml

    need_optuna()

    def make(name=None, settings=(), **content):
        small = {"hidden_size": 4, "epochs": 1, "evaluate_every": 4, "batch_size": 200}
        found = {
            "config": "digits",
            "model": "lstm",  # fast to evaluate, because it has no statistics
            "set": small,
            "sampler": "grid",
            "space": {"optimizer.lr": [0.01, 0.001]},
        } | content
        path = tmp_path / f"{name or tmp_path.name}.yaml"  # a unique name on a shared server
        path.write_text(yaml.safe_dump(found, sort_keys=False))
        return sweep_file.read(str(path), settings)

    return make


@pytest.fixture
def worker():
    """Make a worker's view of a sweep's trials in a storage."""
    return lambda sweep, where: Trials(sweep, *open_study(sweep, where))
