"""The published results are consistent, and their commands have the settings they record."""

import csv
import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rbn.cli import train
from rbn.cli.app import app

RESULTS = Path(__file__).parents[2] / "results"
PATHS = sorted(RESULTS.glob("*/*-seed*.json"))
KEYS = "task model tag seed metric valid test stats steps seconds params config versions gpu commit"
CURVE = ["step", "seconds", "train", "valid_batch", "valid_population"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_its_command_means_its_settings(path, monkeypatch):
    result = json.loads(path.read_text())
    assert {*KEYS.split(), "command"} <= result.keys()
    plans = []
    monkeypatch.setattr(train, "_run", lambda plan, devices: plans.append(plan))
    program, *arguments = shlex.split(result["command"])
    assert program == "rbn"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    ((_, config, seed),) = plans[0].runs
    assert json.loads(json.dumps(asdict(config))) == result["config"]
    assert (config.task, config.model, config.tag) == tuple(result[k] for k in KEYS.split()[:3])
    assert path == RESULTS / config.task / f"{config.name}-seed{seed}.json"
    assert seed == result["seed"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_its_curve_ends_where_it_does(path):
    result = json.loads(path.read_text())
    with path.with_suffix(".csv").open() as file:
        columns, *rows = csv.reader(file)
    assert columns[:5] == CURVE
    steps = [int(row[0]) for row in rows]
    assert steps == sorted(set(steps))
    assert result["best_step"] in steps
    if result["diverged_at"] is None:
        assert steps[-1] == result["steps"]
    else:
        assert steps[-1] <= result["steps"]
