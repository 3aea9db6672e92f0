"""Sweep files: the paper's grids, and every mistake is named before any work."""

import pytest
import yaml

pytest.importorskip("optuna")

from rbn.experiments import config as configs
from rbn.experiments.search import sweep_file
from rbn.experiments.search.space import Choices, Range
from rbn.experiments.task_kinds import TASKS


def trials_of(name):
    sweep = sweep_file.read(name)
    return [sweep.config(point) for point in sweep.points]


@pytest.mark.parametrize("name", sweep_file.names())
def test_every_packaged_sweep_is_right(name):
    sweep = sweep_file.read(name)
    assert sweep.name == name
    assert sweep.trials >= 1
    assert sweep.config({}).task in TASKS


@pytest.mark.parametrize("task", ["mnist", "pmnist"])
def test_mnist_varies_each_setting_by_itself(task):
    found = trials_of(f"{task}-table5")
    base = configs.from_mapping(configs.for_model(configs.published(task), "bn-lstm"))
    assert len(found) == 2 * (1 + 2 + 1 + 2) + 4  # the base; rates, decays and sizes; gammas
    assert len(set(map(str, found))) == len(found)
    assert sum(config == base for config in found) == 1  # bn-lstm, as published
    for model in ("lstm", "bn-lstm"):
        mine = [config for config in found if config.model == model]
        assert {c.optimizer["lr"] for c in mine} == {1e-2, 1e-3, 1e-4}
        assert {c.optimizer["alpha"] for c in mine} == {0.5, 0.9}
        assert {c.hidden_size for c in mine} == {100, 200, 400}
        for config in mine:
            changed = [
                config.optimizer != base.optimizer,
                config.hidden_size != base.hidden_size,
                config.normalization != base.normalization,
            ]
            assert sum(changed) <= 1
    gammas = {c.normalization["gamma"] for c in found if c.model == "bn-lstm"}
    assert gammas == {0.1, 0.3, 0.5, 0.7, 1.0}


def test_penn_treebank_has_a_grid_and_two_lines():
    found = trials_of("ptb-table5")
    for model in ("lstm", "bn-lstm"):
        mine = [c for c in found if c.model == model]
        grid = {(c.optimizer["lr"], c.hidden_size) for c in mine if c.optimizer["lr"] != 0.002}
        assert grid == {
            (lr, size) for lr in (0.1, 0.01, 0.02, 0.001) for size in (800, 1000, 1200, 1500, 2000)
        }
        assert {c.batch_size for c in mine} == {32, 64, 100, 128}
    gammas = {c.normalization["gamma"] for c in found if c.model == "bn-lstm"}
    assert gammas == {0.1, 0.3, 0.5, 0.7, 1.0}
    assert len(found) == 2 * 20 + 2 * 4 + 4


@pytest.mark.parametrize(
    ("name", "rates", "sizes"),
    [
        ("text8-table5", {0.1, 0.01, 0.001}, {500, 1000, 2000, 4000}),
        ("cnn-table5", {8e-3, 8e-4, 8e-5, 8e-6}, {60, 120, 240, 280}),
        ("cnn-built-table5", {8e-3, 8e-4, 8e-5, 8e-6}, {60, 120, 240, 280}),
    ],
)
def test_text8_and_the_reader_have_a_grid(name, rates, sizes):
    found = {(c.model, c.optimizer["lr"], c.hidden_size) for c in trials_of(name)}
    models = ("lstm", "bn-lstm")
    assert found == {(m, lr, size) for m in models for lr in rates for size in sizes}


def test_a_trial_is_repeated_by_its_command(make):
    sweep = make(
        "repeated",
        space={"model": ["lstm", "bn-lstm"], "optimizer.lr": [1e-5], "clip": [None]},
        settings=["precision=bf16-mixed"],
    )
    point = sweep.points[1]
    command = sweep.command(point, 1)
    words = command.split()
    assert words[:7] == ["rbn", "train", "digits", "--model", "bn-lstm", "--config", "digits"]
    settings = [words[k + 1] for k, word in enumerate(words) if word == "--set"]
    found = configs.for_model(configs.read_yaml(configs.find("digits")), "bn-lstm")
    again = configs.with_settings(configs.from_mapping(found), settings)
    assert again == sweep.config(point, 1)
    assert again.tag == "repeated-1"
    assert again.precision == "bf16-mixed"


def test_ranges_and_choices(make):
    sweep = make(
        sampler={"name": "tpe", "n_startup_trials": 3},
        pruner={"name": "median", "n_warmup_steps": 2},
        trials=5,
        space={
            "optimizer.lr": {"low": 1e-4, "high": 1, "log": True},
            "patience": {"low": 4, "high": 8, "step": 2},
            "model": ["lstm", "bn-lstm"],
        },
    )
    assert sweep.space["optimizer.lr"] == Range(1e-4, 1.0, log=True)
    assert sweep.space["patience"] == Range(4, 8, step=2)
    assert sweep.space["patience"].is_integer
    assert sweep.space["model"] == Choices(("lstm", "bn-lstm"))
    assert (sweep.trials, sweep.maximize, sweep.points) == (5, True, None)


@pytest.mark.parametrize(
    ("config", "maximize"), [("digits", True), ("pydoc", False), ("cloze", False)]
)
def test_the_direction_is_the_tasks(config, maximize, make):
    assert make(config=config, set={}).maximize is maximize


def test_a_config_lies_beside_its_sweep(make, tmp_path):
    (tmp_path / "mine.yaml").write_text("task: digits\nhidden_size: 7\n")
    assert make(config="mine.yaml", set={}).config({}).hidden_size == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"spaec": 1}, "'spaec'.* config, model"),
        ({"config": "none.yaml"}, r"cannot read .*none\.yaml"),
        ({"space": {}}, "space.*settings"),
        ({"space": []}, "space is empty"),
        ({"space": {"optimizer.lr": 0.1}}, "optimizer.lr.*list.*range"),
        ({"space": {"optimizer.lr": []}}, "optimizer.lr has no values"),
        ({"space": {"optimizer.lr": [1, 1]}}, "optimizer.lr has 1 twice"),
        ({"space": {"optimizer.lr": [[1]]}}, "numbers, words, true, false or null"),
        ({"space": {"optimizer.lr": ["fast"]}}, "space: optimizer.lr='fast' "),
        ({"space": {"optimizer.lr": [0.1, -1.0]}}, "optimizer.lr=-1.0 .*-1.0"),
        ({"space": {"optimizer.beta": [1]}}, "optimizer.beta=1 .*optimizer.betas"),
        ({"space": {"layer.foo": [1]}}, "layer.foo=1 .*'layer.foo'"),
        ({"space": {"depth": [1]}}, "there is no setting 'depth'"),
        ({"space": {"model": ["gru"]}}, "model='gru' .*lstm"),
        ({"space": {"patience": [0]}}, "patience.* 1, got 0"),
        ({"space": {"epochs": [3]}}, "epochs .*both"),
        ({"space": {"optimizer.lr": {"low": 1, "high": 2}}}, "optimizer.lr .*grid"),
        ({"sampler": "cma"}, "sampler.*grid, random, tpe, got 'cma'"),
        ({"sampler": {"name": "tpe", "n_start": 1}}, "sampler tpe"),
        ({"sampler": {"name": "random", "seed": 1}}, "seed "),
        ({"sampler": {"name": "grid", "order": 1}}, "sampler grid"),
        ({"pruner": "often"}, "pruner.*none, median"),
        ({"pruner": {"name": "median", "after": 1}}, "pruner median"),
        (
            {"pruner": {"name": "percentile", "percentile": 120.0}},
            "pruner percentile",
        ),
        ({"sampler": "random"}, "trials .*random"),
        ({"sampler": "tpe", "trials": 0}, "trials.* 1, got 0"),
        ({"sampler": "tpe", "trials": 2, "space": [{"clip": [1]}] * 2}, "list of spaces is for"),
        ({"trials": 3}, "trials.* 2, got 3"),
        ({"seed": -1}, "seed.* 0.* 9223372036854775807, got -1"),
        ({"seed": 2**63}, f"seed.* 0.*{2**63}"),
        ({"seed": True}, "seed.*integer"),
        ({"heartbeat": 0}, "heartbeat.*positive.*number.*got 0"),
        ({"set": [1]}, "set.*settings"),
        ({"set": {1: 2}}, "there is no setting '1'"),
        ({"set": {"task": "pydoc"}}, "set: .*task"),
        ({"space": {"task": ["digits", "pydoc"]}}, "space: .*task"),
        ({"space": [{"clip": [1]}, {"task": ["digits"]}]}, "space: .*task"),
        ({"model": ["a"]}, "model.*lstm"),
        ({"set": {"model": ["a"]}}, "model.*lstm"),
        ({"space": {"optimizer.capturable": [True]}}, "optimizer.capturable cannot be set"),
        ({"space": {"optimizer.eps": ["abc"]}}, "optimizer.eps.*number, got 'abc'"),
        ({"set": {"optimizer.x.y": 1}}, r"there is no setting 'optimizer\.x\.y'"),
        (
            {"space": {"patience": list(range(1, 102)), "clip": list(range(1, 102))}},
            "a grid of 10,201 is too large",
        ),
    ],
)
def test_mistakes_are_named(content, message, make):
    with pytest.raises(ValueError, match=message) as caught:
        make("mistaken", **content)
    assert "mistaken.yaml" in str(caught.value) or "none.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"low": 1}, "high must be a number, got None"),
        ({"low": "a", "high": 1}, "low must be a number, got 'a'"),
        ({"low": True, "high": 1}, "low must be a number, got True"),
        ({"low": 1, "high": 10**400}, "high must be a number, got 1000"),
        ({"low": 2, "high": 1}, "low must be at most high, got 2 and 1"),
        ({"low": 0, "high": 1, "log": True}, "with log, low must be positive, got 0"),
        ({"low": 1, "high": 2, "log": 1}, "log must be true or false, got 1"),
        ({"low": 1, "high": 2, "log": True, "step": 1}, "cannot have both log and step"),
        ({"low": 1, "high": 2, "step": 0}, "step must be positive, got 0"),
        ({"low": 1, "high": 2, "step": 0.5}, "step must be an integer"),
        ({"low": 1, "high": 2, "by": 1}, "unknown 'by'"),
    ],
)
def test_mistakes_in_ranges(given, message, make):
    with pytest.raises(ValueError, match=rf"clip.*{message}"):
        make(sampler="random", trials=1, space={"clip": given})


def test_the_task_is_not_set_on_the_command_line_either(make):
    with pytest.raises(ValueError, match=r"set: .*task"):
        make(settings=["task=pydoc"])


def test_no_such_file():
    with pytest.raises(ValueError, match=r"no-such.*ptb-table5"):
        sweep_file.read("no-such")


def test_the_command_lines_number_of_trials_counts(make, tmp_path):
    make("counted", trials=2)
    path = str(tmp_path / "counted.yaml")
    assert [sweep_file.read(path, (), n).trials for n in (None, 1)] == [2, 1]
    with pytest.raises(ValueError, match=r"trials.* 2, got 4"):
        sweep_file.read(path, (), 4)


def test_a_setting_of_the_command_line_is_checked(make):
    with pytest.raises(ValueError, match="there is no setting 'nothing'"):
        make(settings=["nothing=1"])
    with pytest.raises(ValueError, match="must look like key=value"):
        make(settings=["epochs"])
    assert make(settings=["epochs=3"]).config({}).epochs == 3


def test_what_must_not_change(make):
    sweep = make("first")
    stored = yaml.safe_load(yaml.safe_dump(sweep.identity()))
    assert make("first", heartbeat=3, trials=1).differences(stored) == []
    assert make("first", settings=["epochs=2"]).differences(stored) == ["config"]
    assert make("first", seed=2, pruner="median").differences(stored) == ["pruner", "seed"]
    for config in stored["config"].values():
        del config["valid_windows"]  # as written by a version without this setting
    assert sweep.differences(stored) == []
