"""Every file that a sweep leaves behind, damaged: it is named, or the damage has no effect."""

import os
import random
import re
import shutil
import warnings
from collections import Counter

import pytest
import torch
from damage import faults
from typer.testing import CliRunner

pytest.importorskip("optuna")

from rbn.cli.app import app
from rbn.experiments.search import storage, sweep_file
from rbn.experiments.search.sampling import need_optuna
from rbn.experiments.search.status import sweep_status
from rbn.experiments.search.worker import Job, Worker

SWEEP = """
config: digits
set: {hidden_size: 2, epochs: 1, evaluate_every: 1, batch_size: 400, population_batch: 600}
sampler: random
pruner: {name: halving, min_resource: 1, min_early_stopping_rate: 2}
trials: 3
space:
  model: [lstm, bn-lstm]
  optimizer.lr: {low: 1e-3, high: 1e-1, log: true}
"""
thorough = pytest.mark.skipif(
    os.environ.get("RBN_FAULTS") != "all", reason="only with RBN_FAULTS=all"
)
KINDS = {"sqlite": "sweep.db", "journal": "sweep.log"}


def write_sweep(folder):
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(SWEEP)


def invoke(folder, name, *words):
    """The outcome of ``rbn sweep`` with the storage and the runs of a folder."""
    where = ["--out", folder / "runs", "--storage", folder / "runs" / name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = CliRunner().invoke(app, ["sweep", *map(str, (*words, *where))])
    shown = " ".join([done.output, *(str(warning.message) for warning in caught)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        shown += f" Traceback: {done.exception!r}"
    return done.exit_code, shown.replace(str(folder), "FOLDER")


def resumed(folder, name):
    code, shown = invoke(folder, name, folder / "mine.yaml", "--device", "cpu")
    if code != 0:
        return code, shown, None
    now = sweep_status(storage.load_study("mine", str(folder / "runs" / name)))
    rows = [(r.number, r.state, r.remark, r.parameters, r.best, r.curve, r.steps) for r in now.rows]
    return code, shown, (rows, now.total, now.best.number)


def displayed(folder, name):
    code, shown = invoke(folder, name, "status", folder / "mine.yaml")
    return code, shown, re.sub(r"silent for \d+ min", "silent", shown) if code == 0 else None


USES = {"resume": resumed, "status": displayed}


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Folders of sweeps by kind of storage and state, created on demand."""
    need_optuna()
    made = {}

    def sweep(kind, state):
        if (kind, state) in made:
            return made[kind, state]
        folder = made[kind, state] = tmp_path_factory.mktemp(f"{kind}-{state}") / "sweep"
        if state == "finished":
            shutil.copytree(sweep(kind, "stopped"), folder)
            assert resumed(folder, KINDS[kind])[0] == 0
            return folder
        write_sweep(folder)
        # Out of time in the second trial, after a step and an evaluation.
        job = Job(
            sweep_file.read(str(folder / "mine.yaml")),
            str(folder / "runs" / KINDS[kind]),
            folder / "runs",
            torch.device("cpu"),
            until=0.0,
        )
        worker = Worker(job, lambda line: None)
        times = iter([60.0, 60.0, 60.0, 1e-9, 0.0])
        worker._left = lambda: next(times)
        assert not worker.work()
        return folder

    return sweep


def outcome(use, folder, name, path, expected):
    """``named``, ``no effect``, or a description of the mistake."""
    code, shown, found = USES[use](folder, name)
    if "Traceback" in shown:
        return f"traceback: {shown}"
    if code != 0:
        return "named" if path.name in shown else f"unnamed: {shown}"
    if found != expected:
        return f"silent: {found}"
    return "named, and the copy before it used" if f"{path.name} " in shown else "no effect"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("sqlite", "stopped"),
        ("journal", "finished"),
        pytest.param("sqlite", "finished", marks=thorough),
        pytest.param("journal", "stopped", marks=thorough),
    ],
)
def test_damage_in_any_file_of_a_sweep(
    kind, state, sweeps, tmp_path, tries, count_outcomes, monkeypatch
):
    monkeypatch.setattr("rbn.experiments.search.storage.time.sleep", lambda _: None)
    source, name = sweeps(kind, state), KINDS[kind]
    draw = random.Random(os.environ["RBN_TEST_SEED"])
    expected, outcomes, failures = {}, Counter(), []
    for use in USES:
        shutil.copytree(source, tmp_path / use / "sweep")
        code, shown, expected[use] = USES[use](tmp_path / use / "sweep", name)
        assert code == 0, shown
    runs = [path for path in sorted((source / "runs").rglob("*")) if path.is_file()]
    # Files of runs have tests of their own; here those of the stopped run matter most.
    others = [path for path in runs if path.name != name and "trial-0001" in path.parts]
    for path in [source / "runs" / name, *tries([], others)]:
        for what, content in faults(
            path.read_bytes(), draw, tries(1, 12 if path.name == name else 1)
        ):
            for use in USES:
                if use == "status" and path.suffix == ".log" and what.startswith("truncated"):
                    continue  # a truncated journal is an earlier state of the sweep
                folder = tmp_path / "damaged" / "sweep"
                shutil.copytree(source, folder)
                (folder / path.relative_to(source)).write_bytes(content)
                found = outcome(use, folder, name, path, expected[use])
                shutil.rmtree(folder)
                outcomes[found.partition(":")[0]] += 1
                if found.startswith(("silent", "unnamed", "traceback")):
                    failures.append((path.name, what, use, found, expected[use]))
    count_outcomes(f"faults in the files of a {state} sweep, {kind}", outcomes)
    assert not failures, failures[:5]


@pytest.mark.slow
def test_what_optuna_would_ignore_in_a_journal(sweeps, tmp_path):
    whole = (sweeps("journal", "finished") / "runs" / KINDS["journal"]).read_bytes()
    path = tmp_path / "sweep.log"
    for old, new in (
        (rb'("study_id":)0(,"datetime_start")', rb"\g<1>9\2"),  # a trial of another study
        (rb'("trial_id":)0(,"state":1)', rb"\g<1>9\2"),  # the state of another trial
        (rb'("directions":)\[2\]', rb"\1[1]"),  # the worst trial would be the best
        (rb"}\n\Z", b"}?"),  # as if half of the last line was written
    ):
        damaged, count = re.subn(old, new, whole, count=1)
        assert count == 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"sweep\.log is damaged: "):
            storage.load_study("mine", str(path))
    # A kill between two writes has the same effect as this damage; the displayed state says so.
    path.write_bytes(re.sub(rb'("trial_id":)1(,"state":1)', rb"\g<1>0\2", whole))
    remarks = [row.remark for row in sweep_status(storage.load_study("mine", str(path))).rows]
    assert [bool(remark) for remark in remarks] == [False, True, False]
