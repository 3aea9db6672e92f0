"""Configs: every published one builds its model; mistakes are named."""

import itertools
import json

import pytest
import torch

from rbn.experiments import config as configs
from rbn.experiments.build import check
from rbn.experiments.config import Config, from_mapping, with_settings
from rbn.experiments.recurrent_layers import recurrent_layer
from rbn.experiments.task_kinds import QUESTIONS, READERS, TASK_KINDS

SYMBOLS = {"ptb": 50, "text8": 27, "pydoc": 90}


@pytest.mark.parametrize(
    "task", [task for task, kind in TASK_KINDS.items() if kind is not QUESTIONS]
)
def test_every_published_config_builds_its_models(task):
    for model in TASK_KINDS[task].models:
        config = from_mapping(configs.for_model(configs.published(task), model))
        assert (config.task, config.model) == (task, model)
        layer = recurrent_layer(with_settings(config, ["hidden_size=4"]), SYMBOLS.get(task, 1))
        assert layer.hidden_size == 4


@pytest.mark.parametrize("name", configs.names())
def test_every_variant_builds_both_models(name):
    found = configs.read_yaml(configs.find(name))
    for model in READERS if TASK_KINDS[found["task"]] is QUESTIONS else ("lstm", "bn-lstm"):
        check(from_mapping(configs.for_model(found, model)))


def test_the_papers_numbers():
    mnist, ptb, text8 = (
        from_mapping(configs.for_model(configs.published(task), "bn-lstm"))
        for task in ("mnist", "ptb", "text8")
    )
    assert (mnist.hidden_size, mnist.batch_size, mnist.optimizer["lr"]) == (100, 100, 0.001)
    assert mnist.layer == {"hidden_noise": 0.1}
    assert (ptb.hidden_size, ptb.batch_size, ptb.length, ptb.optimizer["lr"]) == (
        1000,
        64,
        100,
        0.002,
    )
    assert (text8.hidden_size, text8.batch_size, text8.length) == (2000, 128, 180)
    assert "hidden_noise" not in from_mapping(configs.published("pmnist")).layer


@pytest.mark.parametrize(
    "name", [f"mnist{tag}" for tag in ("", "-code", "-rmsprop", "-steady", "-short")]
)
def test_noise_is_for_the_normalized_model(name):
    """As in the authors' scripts."""
    found = configs.read_yaml(configs.find(name))
    layers = [from_mapping(configs.for_model(found, m)).layer for m in ("lstm", "bn-lstm")]
    assert layers == [{}, {"hidden_noise": 0.1}]


def test_identity_start():
    config = with_settings(Config("mnist"), ["hidden_size=3", "start=identity-all"])
    layer = recurrent_layer(config, 1)
    assert torch.equal(layer.weight_hh_l0.detach(), torch.eye(3).repeat(4, 1))
    irnn = recurrent_layer(with_settings(config, ["model=irnn"]), 1)
    assert torch.equal(irnn.weight_hh_l0.detach(), torch.eye(3))
    assert irnn.nonlinearity == "relu"


def test_settings_from_the_command_line():
    config = with_settings(
        Config("ptb"), ["optimizer.lr=0.01", "patience=null", "tag=wide", "layer.dropout=0.5"]
    )
    assert config.optimizer == {"name": "adam", "lr": 0.01}
    assert config.patience is None
    assert config.name == "bn-lstm-wide"
    assert config.layer == {"dropout": 0.5}
    assert from_mapping(json.loads(config.to_json())) == config


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), ("-2E+3", -2000.0), ("1.5e3", 1500.0), ("1e", "1e")]
)
def test_numbers_are_what_they_look_like(text, value, tmp_path):
    config = with_settings(Config("ptb"), [f"layer.some={text}"])  # a setting that accepts anything
    assert (config.layer["some"], type(config.layer["some"])) == (value, type(value))
    (tmp_path / "mine.yaml").write_text(f"decay_from: {text}\n")
    assert configs.read_yaml(tmp_path / "mine.yaml") == {"decay_from": value}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lr=0.1"], r"'lr'.*optimizer\.lr\?"),
        (["hiden_size=5"], r"'hiden_size'.*hidden_size\?"),
        (["xyz=5"], "'xyz'.* task, model, tag, hidden_size, "),
        (["optimizer.name.x=1"], r"'optimizer\.name\.x'"),
        (["epochs"], "key=value, got 'epochs'"),
        (["epochs=0"], "epochs.* 1, got 0"),
        (["epochs=1.5"], "epochs.*integer"),
        (["model=gru"], "model.*lstm, .*got 'gru'"),
        (["task=imdb"], "task.*digits, .*got 'imdb'"),
        (["optimizer.name=lion"], "optimizer.*got 'lion'"),
        (["model=irnn"], "model.*got 'irnn'"),
        (["dropout=1"], "dropout.* 0.* 1, got 1"),
        (["start=zeros"], "start .*, got 'zeros'"),
        (["dropout=much"], "dropout.*number, got 'much'"),
        (["clip=yes"], "clip.*number, got True"),
        (["average=abc"], "average.*number, got 'abc'"),
        (["decay_from=null"], "decay_from.*number, got None"),
        (["optimizer.lr=abc"], r"optimizer\.lr.*number, got 'abc'"),
        (["evaluate_every=abc"], "evaluate_every.* 1, got 'abc'"),
        (["patience=0"], "patience.* 1, got 0"),
        (["valid_windows=1.5"], "valid_windows.* 1, got 1.5"),
        (["layer=3"], "layer.*settings.*got 3"),
        (["optimizer=adam"], "optimizer.*settings.*got 'adam'"),
        ([f"epochs={10**30}"], f"epochs.*{2**63 - 1}, got {10**30}"),
        ([f"clip={10**400}"], "clip.*finite, got 1000"),
        ([f"clip={10**30}"], f"clip.*{2**63 - 1}, got {10**30}"),
        (["data.seed=-1"], rf"data\.seed.* 0.*{2**63 - 1}, got -1"),
        ([f"data.seed={2**63}"], rf"data\.seed.* 0.*{2**63}"),
        (["data.seed=abc"], r"data\.seed.* 0.*'abc'"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        with_settings(Config("ptb"), settings)


@pytest.mark.parametrize("model", ["rnn", "irnn"])
def test_torchs_own_network_takes_no_options_of_ours(model):
    config = Config("digits", model, layer={"hidden_noise": 0.1, "weight_dropout": 0.1})
    with pytest.raises(ValueError, match=rf"{model} .*weight_dropout"):
        check(config)
    check(Config("digits", model, layer={"hidden_noise": 0.1}))


@pytest.mark.parametrize("model", ["lstm", "bn-lstm"])
def test_numbers_that_a_layer_cannot_hold(model):
    with pytest.raises(ValueError, match="model's settings"):
        check(Config("digits", model, normalization={"gamma": 1e300}))


def test_files(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("task: ptb\nhidden: 3\n")
    with pytest.raises(ValueError, match="unknown setting 'hidden'"):
        from_mapping(configs.read_yaml(path))
    path.write_text("hidden_size: 3\n")
    with pytest.raises(ValueError, match="must name its task"):
        from_mapping(configs.read_yaml(path))
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match="settings by name"):
        configs.read_yaml(path)
    path.write_text("a: [1")
    with pytest.raises(ValueError, match=r"mine\.yaml is not YAML"):
        configs.read_yaml(path)
    with pytest.raises(ValueError, match=r"cannot read .*none\.yaml"):
        configs.read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match=r"task .*imdb"):
        configs.published("imdb")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tag=../x", "tag.*word"),
        ("tag=a/b", "tag.*word"),
        ("tag=[1, 2]", "tag.*word"),
        ("tag=2024-01-01", "tag.*word"),
        ("optimizer.lr=.inf", "optimizer.lr.*finite"),
        ("optimizer.lr=-1", "optimizer.lr.*negative, got -1"),
        ("optimizer.fused=maybe", "optimizer.fused.*true.*false"),
        ("layer.batch_first=true", "layer.batch_first cannot be set"),
        ("layer.device=cuda", "layer.device cannot be set"),
        ("normalization.device=7", "normalization.device cannot be set"),
        ("optimizer.betas=[]", r"optimizer.betas.*two.* 1, got \[\]"),
        ("optimizer.betas=[0.9]", r"optimizer.betas.*two.*\[0.9\]"),
        ("optimizer.betas=[0.9, 0.99, 0.5]", "optimizer.betas.*two"),
        ("optimizer.betas={a: 1, b: 2}", "optimizer.betas.*two"),
        ("optimizer.betas=[0.9, abc]", "optimizer.betas.*two"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas.*two"),
        ("optimizer.betas=0.9", "optimizer.betas.*two"),
        ("optimizer.capturable=true", "optimizer.capturable cannot be set"),
        ("optimizer.differentiable=true", "optimizer.differentiable cannot be set"),
        ("optimizer.eps=abc", "optimizer.eps.*number, got 'abc'"),
        ("optimizer.lr=1e39", r"optimizer.lr.* 1e\+30, got 1e\+39"),
        ("optimizer.eps=-1", "optimizer.eps.*negative, got -1"),
        ("optimizer.weight_decay=.nan", "optimizer.weight_decay.*finite"),
        ("optimizer.alpha=7", "optimizer.alpha.* 1, got 7"),
        ("optimizer.alpha=-0.1", "optimizer.alpha.*negative, got -0.1"),
        ("optimizer.momentum=-1", "optimizer.momentum.*negative, got -1"),
        ("optimizer.momentum=2", "optimizer.momentum.* 1, got 2"),
        ("optimizer.dampening=[1]", r"optimizer.dampening.*number, got \[1\]"),
        ("optimizer.decoupled_weight_decay=maybe", "decoupled_weight_decay.*true.*false"),
        ("layer.zoneout=2024-01-01", "settings.*strings"),
        ("hidden_size={", "is not YAML"),
        ("hidden_size=a: b: c", "is not YAML"),
        ("hidden_size=\t1", "is not YAML"),
    ],
)
def test_settings_that_make_no_sense(setting, message):
    with pytest.raises(ValueError, match=message):
        with_settings(from_mapping(configs.published("digits")), [setting])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden_size: 4\nhidden_size: 8", "duplicate key 'hidden_size'"),
        ("layer: {zoneout: 0.1, zoneout: 0.2}", "duplicate key 'zoneout'"),
        ("variants: [a]", "variants.*settings"),
        ("variants: {bn-lstm: 3}", "variants.*settings"),
        ("variants: {bn-lstmm: {epochs: 2}}", "variants.*lstm.*got 'bn-lstmm'"),
        ("variants: {bn-lstm: {task: pydoc}}", "variants: bn-lstm cannot set task"),
        ("variants: {lstm: {model: rnn}}", "variants: lstm cannot set model"),
        ("variants: {lstm: {variants: {}}}", "variants: lstm cannot set variants"),
        ("tag: 2024-13-45", r"own\.yaml is not YAML: month"),
        ("1: 2\nfoo: 1", "unknown setting 1"),
        ("layer: &a {zoneout: *a}", "aliases"),
    ],
)
def test_files_that_make_no_sense(text, message, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(f"task: digits\n{text}\n")
    with pytest.raises(ValueError, match=message):
        from_mapping(configs.for_model(configs.read_yaml(path), "bn-lstm"))


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_bytes(b"task: digits\ntag: \xff\n")
    with pytest.raises(ValueError, match=r"own\.yaml is not UTF-8"):
        configs.read_yaml(path)


@pytest.mark.parametrize("model", [["a"], 5, None])
def test_a_model_is_a_word(model):
    with pytest.raises(ValueError, match=r"model.*lstm, .*got "):
        configs.for_model({"task": "digits"}, model)


def test_a_mapping_may_be_merged_into_another():
    found = configs.parse_yaml("a: &base {x: 1, y: 2}\nb: {<<: *base, y: 3}")
    assert found["b"] == {"x": 1, "y": 3}


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "aliases .* 10,000 "),
        ("a: &a [*a]", "aliases .* 10,000 "),
        ("layer: " + "[" * 5000, "nested too deeply"),
        ("layer: " + "{a: " * 5000, "nested too deeply"),
    ],
)
def test_yaml_that_would_never_end(text, message, tmp_path):
    (tmp_path / "bomb.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        configs.read_yaml(tmp_path / "bomb.yaml")


def test_aliases_are_shared_settings(tmp_path):
    (tmp_path / "fine.yaml").write_text("layer: &x {dropout: 0.1}\ndata: *x\n")
    shared = {"dropout": 0.1}
    assert configs.read_yaml(tmp_path / "fine.yaml") == {"layer": shared, "data": shared}


def test_a_synonym_is_not_taken_for_a_setting():
    config = from_mapping({"task": "digits"})
    with pytest.raises(ValueError, match=r"did you mean optimizer.lr\?"):
        with_settings(config, ["optimizer.learning_rate=0.1"])
    with pytest.raises(ValueError, match=r"tag.*word"):
        with_settings(config, ["tag=.."])
