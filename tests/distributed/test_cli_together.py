"""``rbn train --devices`` and torchrun: started, stopped, killed and resumed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from misbehaving import misbehave
from typer.testing import CliRunner
from warm_commands import Command

from rbn.cli.app import app
from rbn.training import RankLost, World, checkpoint, launch

SMALL = ["--set", "hidden_size=8", "--set", "evaluate_every=4", "--set", "epochs=1"]
LONG = ["--set", "hidden_size=8", "--set", "evaluate_every=2", "--set", "epochs=500"]


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def started(warm_process, tmp_path):
    """Starts commands one after another, and ends those that are left."""
    commands = []

    def start(*words):
        output = tmp_path / f"output-{len(commands)}"
        output.mkdir()
        commands.append(Command(warm_process, words, tmp_path, output))
        return commands[-1]

    yield start
    for command in commands:
        command.kill()


@contextlib.contextmanager
def from_scratch(*arguments):
    with subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition, process):
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.errors
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks_of(process):
    """The processes that it started, in the order of their ranks.

    The kernel lists children in the order in which they were started. Their numbers can be in
    another order: after the largest number it goes on with the smallest free one.
    """
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    names = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
    return [pid for pid, name in names.items() if "resource_tracker" not in name]


def step_of(folder):
    return checkpoint.load(folder / "last.safetensors")[1]["progress"]["step"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find a process")
def test_stopped_then_a_rank_killed_then_gone_on_with_alone(started, tmp_path):
    folder = tmp_path / "run"
    options = ["--device", "cpu", "--devices", "2"]
    process = started("train", "digits", *LONG, *options, "--out", folder)
    wait_for((folder / "metrics.jsonl").exists, process)
    process.send_signal(signal.SIGINT)
    code, errors = process.wait(120), process.errors
    assert code == 130, errors
    assert f"rbn resume {folder} --devices 2" in errors
    assert "Traceback" not in errors
    stopped = step_of(folder)
    assert stopped > 0

    before = (folder / "metrics.jsonl").read_text()
    process = started("resume", folder, *options)
    wait_for(lambda: (folder / "metrics.jsonl").read_text() not in ("", before), process)
    first, second = ranks_of(process)
    os.kill(second, signal.SIGKILL)
    killed = time.monotonic()
    code, errors = process.wait(120), process.errors
    assert time.monotonic() - killed < 60  # immediately, not after the backend's timeout
    assert code == 1, errors
    (said,) = (line for line in errors.splitlines() if line.startswith("rbn: "))
    assert "rank 1 of 2 was killed by SIGKILL" in said
    assert said.endswith(f"rbn resume {folder} --devices 2")
    assert "Traceback" not in errors
    assert not Path(f"/proc/{first}").exists()
    assert step_of(folder) >= stopped

    text = json.loads((folder / "config.json").read_text())
    assert text["command"].endswith("--devices 2 --seed 1")
    done = invoke("resume", folder, "--device", "cpu", "--max-minutes", "1e-9")
    assert done.exit_code == 3, done.output
    assert step_of(folder) > stopped


@pytest.mark.slow
def test_torchrun(tmp_path):
    folder = tmp_path / "run"
    options = ["--device", "cpu", "--out", folder]
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    with from_scratch(*run, "-m", "rbn", "train", "digits", *SMALL, *options) as process:
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert output.count("digits, bn-lstm, seed 1: test accuracy ") == 1  # one rank prints
    result = json.loads((folder / "result.json").read_text())
    assert (result["devices"], result["steps"]) == (2, 12)
    # Some versions of filelock leave the lock file.
    assert {path.name for path in folder.iterdir()} - {"run.lock"} == {
        "best.safetensors",
        "config.json",
        "final.safetensors",
        "last.safetensors",
        "metrics.jsonl",
        "previous.safetensors",
        "result.json",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "devices .*1, got 0"),
        (["--devices", "51"], "batch_size .*2 .*51 devices, got 100"),
        (["--devices", "101", "--model", "lstm"], "batch_size .*1 .*101 devices, got 100"),
        (
            ["--devices", "101", "--set", "normalization.sync_stats=true"],
            "batch_size .*1 .*101 devices, got 100",
        ),
        (["--devices", "2", "--seeds", "1,2"], "2 runs"),
        (["--devices", "2", "--graph"], "graph .*device, got 2"),
    ],
)
def test_mistakes_are_one_sentence_before_any_work(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke("train", "digits", "--device", "cpu", *arguments)
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split()))
    assert not (tmp_path / "runs").exists()


def test_more_devices_than_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device, message in (
        ("cuda", "devices .*1 GPUs .*got 2"),
        ("cuda:0", "device .*cuda or cpu .*2 processes, got cuda:0"),
    ):
        done = invoke("train", "digits", "--device", device, "--devices", "2")
        assert done.exit_code == 2
        assert re.search(message, " ".join(done.output.split()))


def test_what_torchrun_started_is_not_started_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in World(1, 4, 1, 2).environment(1).items():
        monkeypatch.setenv(name, value)
    assert World.from_environment() == World(1, 4, 1, 2)
    done = invoke("train", "digits", "--device", "cpu", "--devices", "3")
    assert done.exit_code == 2
    assert re.search("devices .*2 .*torchrun.* got 3", " ".join(done.output.split()))
    monkeypatch.setenv("WORLD_SIZE", "5")
    done = invoke("train", "digits", "--device", "cpu")
    assert "got RANK=1, WORLD_SIZE=5" in done.output
    monkeypatch.setenv("RANK", "x")
    done = invoke("train", "digits", "--device", "cpu")
    assert "got RANK=x" in done.output


def test_devices_are_numbered_on_each_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    world = World(rank=6, count=8, local_rank=2, local_count=4)
    assert world.device(torch.device("cuda")) == torch.device("cuda", 2)
    assert world.device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("exit", RankLost, "rank 1 of 2 ended with 3"),
        ("much to say", ValueError, "x" * 10**6),  # more than a pipe holds
    ],
)
def test_if_one_fails_all_end(how, error, message):
    began = time.monotonic()
    with pytest.raises(error, match=message):
        launch(misbehave, (how,), 2)
    assert time.monotonic() - began < 300  # the other one did not finish its sleep
