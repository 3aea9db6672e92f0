"""``rbn sweep`` and ``rbn sweep status``."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner
from warm_commands import Command

pytest.importorskip("optuna")

from rbn.cli.app import app
from rbn.cli.sweep import _jobs
from rbn.experiments import run_folder
from rbn.experiments.search import status, storage
from rbn.experiments.search.status import sweep_status
from rbn.experiments.search.storage import load_study
from rbn.experiments.search.worker import Job
from rbn.experiments.training_session import TrainingSession

SWEEP = """
config: digits
set: {hidden_size: 8, epochs: %d, evaluate_every: 6, batch_size: 200}
sampler: grid
space:
  model: [lstm, bn-lstm]
  optimizer.lr: [2e-2, 1e-2]
heartbeat: 1
"""
LONG = (SWEEP % 40).replace("[lstm, bn-lstm]", "[lstm]")  # long enough to be caught at work


def invoke(*arguments):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def said(done):
    return " ".join(done.output.split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a sweep of four short trials."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "mine.yaml").write_text(SWEEP % 1)
    return tmp_path


def running(path):
    """The trials that are being trained and have been evaluated: their numbers and workers."""
    if len(list(path.glob("*/metrics.jsonl"))) < 2:
        return {}
    return {
        trial.number: int(trial.user_attrs["beat"]["worker"].split(":")[1])
        for trial in load_study("mine", str(path / "sweep.db")).get_trials()
        if trial.state.name == "RUNNING" and trial.intermediate_values
    }


class Meanwhile(threading.Thread):
    """Does something to the workers as soon as two of them are at work."""

    def __init__(self, do):
        super().__init__()
        self.do, self.found, self.over = do, {}, threading.Event()

    def run(self):
        deadline = time.monotonic() + 240
        while len(self.found) < 2 and time.monotonic() < deadline and not self.over.wait(0.02):
            self.found = running(Path("runs/mine"))
        if len(self.found) == 2:
            self.do(self.found)

    def join(self, timeout=None):
        self.over.set()
        super().join(timeout)


def history(path):
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "seconds"} for record in found]


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_two_processes_on_one_file_and_one_is_killed(folder, warm_process):
    (folder / "mine.yaml").write_text(LONG)
    words = ["sweep", "mine.yaml", "--workers", "2", "--device", "cpu"]
    command = Command(warm_process, words, folder, folder)
    killer = Meanwhile(lambda found: os.kill(min(found.items())[1], signal.SIGKILL))
    killer.run()
    assert len(set(killer.found.values())) == 2, "each process has a trial at the same time"
    assert command.wait(240) == 0, command.errors
    said = " ".join(f"{command.output} {command.errors}".split())
    assert "killed by SIGKILL" in said
    number = min(killer.found)
    now = sweep_status(load_study("mine", "runs/mine/sweep.db"))
    assert [row.state for row in now.rows] == ["complete"] * 2
    # The killed worker's trial has the same results as an undisturbed run.
    run = folder / f"runs/mine/trial-{number:04d}"
    undisturbed = TrainingSession(
        [(folder / "again", *run_folder.read_config(run))], torch.device("cpu")
    )
    undisturbed.train()
    assert history(run) == history(folder / "again")
    curve = [record["valid_population"] for record in history(run)]
    assert list(now.rows[number].curve) == curve


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_control_c_and_the_same_command_again(folder, warm_process):
    (folder / "mine.yaml").write_text(LONG)
    words = ["sweep", "mine.yaml", "--workers", "2", "--device", "cpu"]
    command = Command(warm_process, words, folder, folder)
    presser = Meanwhile(lambda found: command.send_signal(signal.SIGINT))
    presser.run()
    assert command.wait(240) == 130, command.errors
    assert "rbn: stopped" in command.errors
    now = sweep_status(load_study("mine", "runs/mine/sweep.db"))
    assert [row.remark for row in now.rows] == ["to be resumed"] * 2
    done = invoke("mine.yaml", "--device", "cpu")
    assert done.exit_code == 0, done.output
    for number in (0, 1):
        (step,) = (
            int(line.split()[-1])
            for line in done.output.splitlines()
            if line.startswith(f"trial {number}: resumes at step")
        )
        assert step >= now.rows[number].steps
    assert "mine: 2 of 2 trials finished (2 complete)" in done.output


@pytest.mark.slow
def test_a_sweep_its_table_and_its_picture(folder):
    done = invoke("status", "mine.yaml")
    assert done.exit_code == 2
    assert "no sweep mine" in done.output
    # The only test whose two workers start from scratch.
    done = invoke("mine.yaml", "--device", "cpu", "--trials", "2", "--workers", "2")
    assert done.exit_code == 0, done.output
    assert "mine: 2 of 2 trials finished (2 complete)" in done.output
    best = sweep_status(load_study("mine", "runs/mine/sweep.db")).best
    assert f"trial {best.number}, validation accuracy {best.best:.4f}, model=lstm" in done.output
    assert f"in runs/mine/trial-{best.number:04d}" in done.output
    for name, begins in (("a.svg", b"<?xml"), ("b.png", b"\x89PNG"), ("c.pdf", b"%PDF")):
        done = invoke("status", "mine.yaml", "--plot", name)
        assert done.exit_code == 0, done.output
        assert (folder / name).read_bytes().startswith(begins)
    assert f"{best.best:.4f}" in done.output
    assert "complete" in done.output
    drawn = (folder / "a.svg").read_text()
    assert drawn.count('id="trial-') == 2  # one curve per trial
    invoke("status", "mine.yaml", "--plot", "again.svg")
    assert (folder / "again.svg").read_text() == drawn
    done = CliRunner().invoke(app, ["runs", "runs"])
    assert "mine/trial-0001" in done.output


@pytest.mark.slow
def test_out_of_time(folder):
    options = ("mine.yaml", "--device", "cpu", "--trials", "1")
    done = invoke(*options, "--max-minutes", "1e-9")
    assert done.exit_code == 3
    assert "out of time" in done.output
    assert "mine: 0 of 1 trials finished (1 waiting)" in done.output
    assert invoke(*options).exit_code == 0


@pytest.mark.slow
def test_other_settings_need_another_place(folder):
    options = ("mine.yaml", "--device", "cpu", "--trials", "1")
    assert invoke(*options).exit_code == 0
    done = invoke(*options, "--set", "epochs=2")
    assert done.exit_code == 2
    assert "another config" in said(done)
    done = invoke(*options, "--set", "epochs=2", "--storage", "other.log", "--out", "elsewhere")
    assert done.exit_code == 0, done.output
    assert run_folder.read_config(folder / "elsewhere" / "trial-0000")[0].epochs == 2
    done = invoke("status", "mine.yaml", "--storage", "other.log")
    assert "1 of 1 trials finished" in done.output


@pytest.mark.slow
def test_failures_are_shown(folder):
    text = (SWEEP % 1).replace(", batch_size: 200", "").replace("optimizer.lr", "batch_size")
    (folder / "mine.yaml").write_text(text.replace("2e-2, 1e-2", "5000, 6000"))
    done = invoke("mine.yaml", "--device", "cpu")
    assert done.exit_code == 1
    assert "3 trials" in said(done)
    done = invoke("status", "mine.yaml", "--plot", "none.png")
    assert done.exit_code == 0
    assert "trial 2, failed: ValueError: " in said(done)
    assert "best:" not in done.output
    done = invoke("mine.yaml", "--device", "cpu", "--trials", "3")
    assert done.exit_code == 1
    assert "rbn: no trial finished" in done.output
    assert (folder / "none.png").exists()


def test_status_prints_no_terminal_codes_and_no_markup(folder, monkeypatch):
    row = status.Row(
        0, "complete", "lost\x1b[2J", {"tag\x1b]0;x\x07": "[red]\x9b1m"}, 0.5, (), 1, 60
    )
    found = status.SweepStatus("mine\x1b[31m", "accuracy", True, (row,), 1)
    monkeypatch.setattr(storage, "load_study", lambda name, where: None)
    monkeypatch.setattr(status, "sweep_status", lambda study: found)
    done = invoke("status", "mine.yaml")
    assert done.exit_code == 0, done.output
    assert all(c.isprintable() or c == "\n" for c in done.output)
    for word in ("lost\N{REPLACEMENT CHARACTER}[2J", "[red]\N{REPLACEMENT CHARACTER}1m"):
        assert word in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing.* digits,"),
        (["mine.yaml", "--workers", "0"], "workers .*1, got 0"),
        (["mine.yaml", "--max-minutes", "0"], "max-minutes .*positive, got 0"),
        (["mine.yaml", "--trials", "9"], "trials .*4, got 9"),
        (["mine.yaml", "--set", "depth=2"], "setting 'depth'"),
        (["mine.yaml", "--storage", "trials.txt"], r"storage .*URL .*\.db"),
        (["mine.yaml", "--out", "mine.yaml"], r"mine\.yaml is a file"),
        (["mine.yaml", "--device", "tpu9"], "device .*auto, cpu, cuda or cuda:N"),
        (["status", "nothing"], "no file nothing"),
        (["status", "mine.yaml", "--plot", "x.jpg"], r"plot .*\.svg"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, folder):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert re.search(message, said(done))
    assert "Traceback" not in done.output
    assert not (folder / "runs").exists()


def test_missing_data_are_named_before_workers_start(folder):
    (folder / "mine.yaml").write_text("config: mnist\nsampler: grid\nspace: {clip: [1.0]}\n")
    done = invoke("mine.yaml", "--workers", "2", "--device", "cpu", "--data-dir", folder)
    assert done.exit_code == 2
    assert "rbn data get mnist" in said(done)


def test_without_optuna_one_sentence(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for arguments in (["mine.yaml"], ["status", "mine.yaml"]):
        done = invoke(*arguments)
        assert done.exit_code == 2
        assert re.search(r"Optuna.*'recurrent-batchnorm\[sweep\]'", said(done))


def test_gpus_are_dealt_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    job = Job(None, "sweep.db", Path("runs"), torch.device("cuda"))
    found = _jobs(job, 3, dealt=True)
    assert [str(each.device) for each in found] == ["cuda:0", "cuda:1", "cuda:0"]
    found = _jobs(job, 2, dealt=False)
    assert [str(each.device) for each in found] == ["cuda", "cuda"]
    assert all(each.threads >= 1 for each in found)
    assert _jobs(job, 1, dealt=False)[0].threads is None


def test_help():
    done = invoke("--help")
    assert done.exit_code == 0
    for word in ("--workers", "--storage", "--max-minutes", "rbn sweep status FILE"):
        assert word in done.output
    assert "sweep run" not in done.output
    done = invoke("status", "--help")
    assert "--plot" in done.output
    assert "--workers" not in done.output
    assert invoke().exit_code == 2
