"""The runs that a target needs, and their estimated time."""

from pathlib import Path

import pytest
import torch

from rbn.experiments import config as configs
from rbn.experiments.paper import estimate, plan
from rbn.experiments.paper.published import read_results

CPU, FOLDER = torch.device("cpu"), Path("runs")


def test_runs_are_named_once():
    found = plan.needed(["table2", "fig3a", "fig3b", "fig5"], "short", 2, FOLDER)
    assert [run.title for run in found] == [
        "ptb, lstm-short, seed 1",
        "ptb, lstm-short, seed 2",
        "ptb, bn-lstm-short, seed 1",
        "ptb, bn-lstm-short, seed 2",
    ]
    assert found[0].folder == FOLDER / "ptb" / "lstm-short-seed1"
    assert found[0].job.command == "rbn train ptb --model lstm --config ptb-short"


@pytest.mark.parametrize("recipe", plan.RECIPES)
@pytest.mark.parametrize("target", plan.TARGETS)
def test_every_target_has_valid_settings_in_folders_of_their_own(target, recipe):
    found = plan.needed([target], recipe, 2, FOLDER)
    assert len({run.folder for run in found}) == len(found)
    if recipe == "quick":
        assert {run.config.task for run in found} <= {"digits", "pydoc", "cloze"}


def test_a_task_without_a_short_recipe(monkeypatch):
    monkeypatch.setattr(configs, "names", lambda: ["text8"])
    (run, _) = plan.needed(["table3"], "short", 1, FOLDER)
    assert run.config.tag == ""


def test_recipes():
    (run, *_) = plan.needed(["table1"], "paper", 1, FOLDER)
    assert run.config == configs.from_mapping(configs.for_model(configs.published("mnist"), "lstm"))
    (run, *_) = plan.needed(["table2"], "short", 1, FOLDER, "bf16-mixed")
    assert run.config.precision == "bf16-mixed"
    assert run.job.command.endswith("--set precision=bf16-mixed")
    sweep = plan.needed(["fig6"], "short", 3, FOLDER)
    assert [run.config.name for run in sweep[:5]] == [
        f"bn-lstm-gamma-{g}" for g in ("0.1", "0.3", "0.5", "0.7", "1")
    ]
    assert [run.config.normalization["gamma"] for run in sweep[5:]] == list(plan.SWEEP)
    assert all(run.seed == 1 for run in sweep)


def test_what_is_not_known():
    with pytest.raises(ValueError, match=r"target.*table1, .* got 'table9'"):
        plan.jobs("table9")
    with pytest.raises(ValueError, match=r"recipe.*short, paper, quick, got 'long'"):
        plan.jobs("table1", "long")
    with pytest.raises(ValueError, match=r"questions.*cnn-built, cnn, got 'squad'"):
        plan.jobs("table4", "short", "squad")


def test_readers():
    found = plan.needed(["fig4a", "table4"], "short", 1, FOLDER)
    assert [run.config.model for run in found] == [*plan.READERS, "lstm", "bn-e**"]
    assert [run.config.tag for run in found] == [""] * 5 + ["full"] * 2
    assert found[-1].job.command == "rbn train cnn-built --model 'bn-e**' --config cnn-built-full"
    assert found[-1].config.batch_size == 40  # the paper's for this model


def test_readers_of_the_papers_archive():
    found = plan.needed(["fig4a", "table4"], "paper", 1, FOLDER, questions="cnn")
    assert {run.config.task for run in found} == {"cnn"}
    assert [run.folder.name for run in found[-2:]] == [
        "lstm-full-seed1",
        "bn-e-star-star-full-seed1",
    ]
    assert found[0].job.command == "rbn train cnn --model lstm"
    assert found[-1].job.command == "rbn train cnn --model 'bn-e**' --config cnn-full"


def test_published_runs_are_found(results):
    known = read_results(results)
    runs = plan.needed(["table2"], "short", 3, FOLDER)
    found = [run.result_in(known) is not None for run in runs]
    assert found == [True, True, False, True, True, False]


def test_time_is_that_of_runs_alike(results):
    (run, *_) = plan.needed(["table2"], "short", 1, FOLDER)
    measured = estimate.seconds_of(run.config, CPU, read_results(results))
    assert measured == pytest.approx(60 / 300 * estimate.steps_of(run.config))
    guessed = estimate.seconds_of(run.config, torch.device("cuda"), read_results(results))
    assert guessed == pytest.approx(0.006 * 790 * 12 * 1.15)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "5 s"), (120, "2 min"), (7200, "2.0 h"), (200_000, "2.3 days")],
)
def test_spoken(seconds, words):
    assert estimate.format_duration(seconds) == words


@pytest.mark.parametrize(
    ("name", "model", "steps"),
    [
        ("cnn-built-full", "lstm", 36_880),  # as in results/cnn-built
        ("cnn-built-full", "bn-e**", 59_000),
    ],
)
def test_steps_of_readers_follow_from_their_minibatches(name, model, steps):
    found = configs.for_model(configs.read_yaml(configs.find(name)), model)
    whole = configs.from_mapping(found)
    assert estimate.steps_of(whole) == steps
    part = configs.with_settings(whole, ["data.sentences=4"])
    seconds = [estimate.seconds_of(each, CPU, []) for each in (part, whole)]
    assert seconds[0] < seconds[1]
