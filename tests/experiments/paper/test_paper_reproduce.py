"""``rbn reproduce``: from embedded data to tables and figures, in parts and repeatedly."""

import json
import os
import re

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from made_up import publish

from rbn.cli.app import app
from rbn.data import Splits, digits
from rbn.data.errors import DataNotFound
from rbn.experiments import build, task_kinds
from rbn.experiments.base_task import has_statistics
from rbn.experiments.paper import findings, initial_states, plan, tables
from rbn.experiments.paper.figures import figure
from rbn.experiments.paper.finding import read_findings
from rbn.experiments.paper.lines import read_csv
from rbn.experiments.paper.numbers import TABLES
from rbn.experiments.paper.published import read_results
from rbn.experiments.paper.reproduce import Reproduction
from rbn.experiments.paper.result_set import ResultSet
from rbn.experiments.paper.trained_runs import measure_lengths, read_lengths, save_statistics
from rbn.experiments.tasks import Classification
from rbn.training import CheckpointError, atomic_files

CPU = torch.device("cpu")
TEXT = ("epochs=1", "hidden_size=6", "length=40", "batch_size=200")
READER = ("tag=quick", "epochs=1", "hidden_size=4", "data.sizes=[128,64,64]")
TINY = {
    "mnist": ("digits", "digits", ("tag=quick", "epochs=1", "hidden_size=6")),
    "pmnist": ("digits", "digits", ("tag=quick-permuted", "epochs=1", "hidden_size=6")),
    "ptb": ("pydoc", "pydoc", ("tag=quick", *TEXT)),
    "text8": ("pydoc", "pydoc", ("tag=quick-large", *TEXT)),
    "cnn": ("cloze", "cloze", READER),
    "cnn-full": ("cloze", "cloze", READER),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(plan, "_QUICK", TINY)
    monkeypatch.setattr(plan, "SWEEP", (0.1, 1.0))
    monkeypatch.setattr(plan, "_QUICK_SWEEP", {"pmnist": (), "ptb": ()})
    steps = dict.fromkeys(findings.QUICK_STEPS, 2)
    monkeypatch.setattr(findings, "QUICK_STEPS", steps)
    read = build.load

    def shorter(config, *rest):
        text = read(config, *rest)
        if config.kind is task_kinds.TEXT:  # the full test sequence is read step by step
            short = {"train": text.train[:40_000], "test": text.test[:3000]}
            return type(text)(valid=text.valid[:3000], symbols=text.symbols, **short)
        return text if config.kind is task_kinds.QUESTIONS else few(text)

    monkeypatch.setattr(build, "load", shorter)
    monkeypatch.setattr(initial_states, "digits", lambda: few(digits()))
    settings = findings.on_digits
    for module in (findings, initial_states):
        monkeypatch.setattr(module, "on_digits", lambda *more: settings("hidden_size=8", *more))


def few(splits):
    return Splits(splits.train.first(200), splits.valid.first(100), splits.test.first(100))


def invoke(folder, *arguments):
    places = ["--results", folder / "results", "--runs", folder / "runs", "--out", folder / "out"]
    command = ["reproduce", *arguments, *places, "--device", "cpu"]
    return CliRunner().invoke(app, list(map(str, command)))


@pytest.mark.slow
def test_from_nothing_to_figures_and_again(tmp_path):
    done = invoke(tmp_path, "fig3b", "--quick", "--max-minutes", "1e-9")
    assert done.exit_code == 3, done.output
    assert "out of time" in done.output
    assert not list(tmp_path.rglob("result.json"))
    done = invoke(tmp_path, "fig3b", "--quick")
    assert done.exit_code == 0, done.output
    assert "[1 of 2] pydoc, lstm-quick, seed 1: about" in done.output
    for kind in ("svg", "png", "csv"):
        assert (tmp_path / "out" / f"fig3b.{kind}").stat().st_size > 500
    path = tmp_path / "results" / "pydoc" / "lengths-bn-lstm-quick-seed1.csv"
    lines, whole = read_lengths(path, "bn-lstm")
    assert [line.series for line in lines] == [
        "BN-LSTM population statistics",
        "BN-LSTM batch statistics",
    ]
    assert lines[0].x == tuple(range(100, 1001, 100))
    run = json.loads((tmp_path / "runs" / "pydoc" / "bn-lstm-quick-seed1/result.json").read_text())
    assert whole == pytest.approx(run["test"], abs=1e-5)

    done = invoke(tmp_path, "fig3b", "--quick", "--dry-run")
    assert "0 of 2 to do" in done.output
    done = invoke(tmp_path, "fig5", "--quick")  # the model exists: nothing is trained
    assert done.exit_code == 0, done.output
    assert "[1 of" not in done.output
    statistics = figure("fig5", ResultSet.read(tmp_path / "results", True))
    assert [len(panel.lines) for panel in statistics.panels] == [24, 6, 24, 6]
    assert len(statistics.panels[0].lines[0].x) == 39
    done = invoke(tmp_path, "table2", "--quick")
    assert done.exit_code == 0, done.output
    assert "bits" not in done.output.split("table2")[0]
    assert "table2: Penn Treebank, whole test sequence" in done.output


def made(targets, device, folder, seeds=3):
    places = (folder / "results", folder / "runs")
    return Reproduction(targets, "short", seeds, *places, torch.device(device))


def test_small_layers_of_a_task_are_trained_at_once_on_a_gpu(tmp_path):
    work = made(("table1", "fig6", "table2"), "cuda", tmp_path)
    groups = work._groups(work.to_train())
    sizes = [(group[0].config.task, len(group)) for group in groups]
    permuted = [("pmnist", 6), ("pmnist", 2)]  # of the table and of the figure
    assert sizes == [("mnist", 6), *permuted, *[("ptb", 1)] * 8]
    assert all(len({run.config.task for run in group}) == 1 for group in groups)
    alone = made(("table1",), "cpu", tmp_path)
    assert [len(group) for group in alone._groups(alone.to_train())] == [1] * 12
    assert work.listing()[1] < sum(work._seconds([run], []) for run in work.to_train())


def test_runs_at_once_are_those_one_by_one(tmp_path, monkeypatch):
    for name in ("alone", "at_once"):
        if name == "at_once":
            monkeypatch.setattr(Reproduction, "_groups", lambda self, todo: [todo])
        done = invoke(tmp_path / name, "table1", "--quick")
        assert done.exit_code == 0, done.output
    assert "[1 of 1] digits, lstm-quick, seed 1; digits, bn-lstm-quick, seed 1;" in done.output
    names = sorted(path.name for path in (tmp_path / "alone/results/digits").glob("*.json"))
    assert len(names) == 4
    for name in names:
        alone, at_once = (
            json.loads((tmp_path / way / "results/digits" / name).read_text())
            for way in ("alone", "at_once")
        )
        assert [alone[key] for key in ("together", "test", "command")] == [
            1,
            at_once["test"],
            at_once["command"],
        ]
        assert at_once["together"] == 4


def test_one_of_several_diverges(tmp_path, monkeypatch):
    """The others are trained to the end, and the failure is reported."""
    loss = Classification.loss

    def spoilt(task, *batch):
        return loss(task, *batch) * (1 if has_statistics(task.model) else torch.nan)

    monkeypatch.setattr(Classification, "loss", spoilt)
    monkeypatch.setattr(Reproduction, "_groups", lambda self, todo: [todo])
    done = invoke(tmp_path, "table1", "--quick")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "digits, lstm-quick, seed 1: training diverged at step" in said
    assert "bn-lstm-quick, seed 1: training diverged" not in said
    assert (tmp_path / "runs/digits/lstm-quick-seed1/diverged.safetensors").exists()
    assert (tmp_path / "results/digits/bn-lstm-quick-seed1.json").exists()


@pytest.mark.slow
def test_the_sweep_and_the_images(tmp_path):
    for target in ("table1", "fig2", "fig6"):
        done = invoke(tmp_path, target, "--quick")
        assert done.exit_code == 0, done.output
    result_set = ResultSet.read(tmp_path / "results", True)
    rows = tables.rows(TABLES["table1"], result_set.tasks, result_set.runs)
    assert [row.cells[0] for row in rows[1:3]] == ["digits in order", "digits, permuted"]
    assert not figure("fig2", result_set).missing
    panels = figure("fig6", result_set).panels
    assert [len(panel.lines) for panel in panels] == [2, 2, 2, 2]
    table = read_csv(tmp_path / "out" / "fig6.csv")
    title = "digits, permuted, validation"
    assert [line.series for line in table[title]] == ["gamma=0.10", "gamma=1.00"]
    for line in table[title]:  # of ten classes; chance is ln 10
        assert all(1 < y < 4 for y in line.y)
    command = "rbn train digits --model lstm --set tag=quick --set epochs=1 --set hidden_size=6"
    result = json.loads((tmp_path / "results/digits/lstm-quick-seed1.json").read_text())
    assert result["command"] == f"{command} --seed 1"


@pytest.mark.slow
def test_what_needs_no_training(tmp_path):
    for target in ("fig1a", "fig1b", *findings.EXPERIMENTS):
        done = invoke(tmp_path, target, "--quick")
        assert done.exit_code == 0, done.output
    found = {finding.name: finding for finding in read_findings(tmp_path / "results")}
    assert set(found) == set(findings.EXPERIMENTS)
    rows = found["no-noise"].rows
    assert (rows[1][0], rows[1][1], rows[1][3]) == ("0", "nan", "0")  # explodes as written
    assert "explodes" in found["no-noise"].outcome
    assert "chance" in found["data-start"].outcome
    result_set = ResultSet.read(tmp_path / "results", True)
    assert len(figure("fig1a", result_set).panels) == 3
    assert not figure("fig1b", result_set).missing


@pytest.mark.slow
def test_readers(tmp_path):
    for target in ("fig4a", "table4"):
        done = invoke(tmp_path, target, "--quick")
        assert done.exit_code == 0, done.output
    result_set = ResultSet.read(tmp_path / "results", True)
    found = figure("fig4a", result_set)
    assert not found.missing
    assert {line.series for line in found.panels[0].lines} == {
        *("LSTM", "BN-LSTM", "BN-everywhere", "BN-e*", "BN-e**")
    }


@pytest.mark.slow
def test_data_that_are_missing_are_named_and_the_rest_is_done(tmp_path, monkeypatch):
    read = build.load

    def missing(config, *rest):
        if config.task == "digits":
            raise DataNotFound("the digits are not there")
        return read(config, *rest)

    monkeypatch.setattr(build, "load", missing)
    done = invoke(tmp_path, "fig6", "--quick")
    assert done.exit_code == 1, done.output
    assert re.search("digits was skipped.*the digits are not there", done.output)
    assert re.search("rbn: .*skipped", done.output)
    assert len(list((tmp_path / "results").rglob("*.json"))) == 2


def test_a_figure_without_its_data_is_made_when_they_are_there(tmp_path):
    none = tmp_path / "none"
    done = invoke(tmp_path, "fig1a", "--seeds", "1", "--data-dir", none)
    assert done.exit_code == 1, done.output
    assert "fig1a was skipped" in done.output
    done = invoke(tmp_path, "fig1a", "--seeds", "1", "--data-dir", none, "--dry-run")
    assert "1 of 1 to do" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("written", [0, 1])
def test_killed_while_a_result_is_published(written, tmp_path, monkeypatch):
    """It does not count as published before its learning curve exists, too."""
    replace, files = os.replace, []

    def killed(part, path):
        if str(path).startswith(str(tmp_path / "results")):
            if len(files) == written:
                raise KeyboardInterrupt
            files.append(path)
        replace(part, path)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files.os, "replace", killed)
        assert invoke(tmp_path, "fig5", "--quick").exit_code == 130
    assert len(files) == written
    done = invoke(tmp_path, "fig5", "--quick")
    assert done.exit_code == 0, done.output
    (result,) = read_results(tmp_path / "results")
    assert result.curve


def test_a_model_that_is_not_here_is_trained_for_its_figure(results, tmp_path):
    asked = Reproduction(("fig5",), "short", 3, results, tmp_path / "runs", CPU)
    rows, seconds = asked.listing()
    assert rows[0][:2] == ("ptb, bn-lstm-short, seed 1", "to train again, for its model")
    assert seconds > 0
    (run,) = asked.to_train()
    (run.folder).mkdir(parents=True)
    (run.folder / "final.safetensors").touch()
    assert asked.to_train() == []
    assert asked.listing()[0] == [
        ("ptb, bn-lstm-short, seed 1", "done", ""),
        ("ptb, bn-lstm-short, seed 1, for fig5", "to measure", ""),
    ]


def test_dry_run_changes_nothing(tmp_path):
    publish(tmp_path / "results")
    done = invoke(tmp_path, "all", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "to do, about" in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["results"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table9"], "target .*table1"),
        (["table1", "--seeds", "0"], "seeds .*1, got 0"),
        (["table1", "--recipe", "long"], "recipe .*short or paper, got 'long'"),
        (
            ["table4", "--questions", "squad"],
            "questions .*cnn-built, cnn, got 'squad'",
        ),
        (["table1", "--max-minutes", "0"], "max-minutes .*positive, got 0"),
    ],
)
def test_mistakes_are_one_sentence(arguments, said, tmp_path):
    done = invoke(tmp_path, *arguments)
    assert done.exit_code == 2
    assert re.search(said, " ".join(done.output.split()))
    assert not list(tmp_path.iterdir())


def test_a_finished_run_with_other_settings_is_no_result(tmp_path):
    """The folder is taken by a run of the user with the same task, model and seed."""
    arguments = ["--quick", "--seeds", "1"]
    assert invoke(tmp_path, "table2", *arguments).exit_code == 0
    (folder,) = (tmp_path / "runs/pydoc").glob("lstm-*")
    config = atomic_files.read_checked(folder / "config.json")
    config["config"]["clip"] = 5.0
    atomic_files.write_checked(folder / "config.json", config)
    for path in (tmp_path / "results/pydoc").glob("lstm-*"):
        path.unlink()
    done = invoke(tmp_path, "table2", *arguments)
    assert done.exit_code == 2
    assert "(clip 5.0 there, 1.0 here)" in " ".join(done.output.split())
    assert not list((tmp_path / "results/pydoc").glob("lstm-*"))


def test_runs_that_cannot_be_measured(tmp_path):
    with pytest.raises(CheckpointError, match=r"final\.safetensors"):
        measure_lengths(tmp_path, tmp_path, CPU)
    with pytest.raises(CheckpointError, match="is not finished"):
        save_statistics(tmp_path, tmp_path)
