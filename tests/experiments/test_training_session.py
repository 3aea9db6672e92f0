"""Tasks and runs: measurements, two steps of each, and the result that is written."""

import io
import json
import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.text import Text as Styled

import rbn
from rbn.data import Split, Splits, Text
from rbn.experiments import build, results, run_folder
from rbn.experiments import config as configs
from rbn.experiments.config import Config, from_mapping, with_settings
from rbn.experiments.progress_bars import ProgressBars
from rbn.experiments.task_kinds import TEXT
from rbn.experiments.tasks import Classification, NextSymbol
from rbn.experiments.training_session import TrainingSession
from rbn.models import LanguageModel, SequenceClassifier
from rbn.training.atomic_files import read_checked, write_checked

CPU = torch.device("cpu")


@pytest.fixture
def text():
    torch.manual_seed(0)
    stream = torch.randint(4, (900,)).to(torch.uint8)
    return Text(train=stream[:600], valid=stream[600:751], test=stream[751:], symbols="abcd")


@pytest.fixture
def language(text):
    torch.manual_seed(1)
    model = LanguageModel(rbn.BatchNormLSTM(4, 6))
    return NextSymbol(model, text, length=10, batch_size=8, seed=3)


def test_bits_per_character(language, text):
    language.model(language.batches.batch(0, 0)[0])  # statistics
    found = language.measure_with("valid", "population")
    windows = text.valid[:150].view(15, 10).t().long()
    with torch.no_grad():
        logits, _ = language.model.eval()(windows[:-1])
    nats = F.cross_entropy(logits.flatten(0, 1), windows[1:].flatten())
    assert found == pytest.approx(float(nats) / math.log(2), rel=1e-5)
    assert language.items_per_step == 72
    assert language.batches_per_epoch == 7


@pytest.mark.parametrize("piece", [1, 7, 148, 1000])
def test_a_whole_sequence_in_pieces(piece, language, text):
    language.model(language.batches.batch(0, 0)[0])
    stream = text.test.long()
    with torch.no_grad():
        logits, _ = language.model.eval()(stream[:-1, None])
    nats = F.cross_entropy(logits[:, 0], stream[1:])
    found = language.measure_whole("test", piece)
    assert found == pytest.approx(float(nats) / math.log(2), rel=1e-5)


def test_both_kinds_of_statistics_and_none(language, text):
    language.model.train()
    language.model(language.batches.batch(0, 0)[0])
    looked = language.evaluate()
    assert looked["valid_batch"] != looked["valid_population"]
    assert language.model.training
    plain = NextSymbol(LanguageModel(rbn.LSTM(4, 6)), text, 10, 8, 3)
    looked = plain.evaluate()
    assert looked["valid_batch"] == looked["valid_population"]


class LogitsAlone(LanguageModel):
    """A custom model that does not compute a loss itself."""

    def forward(self, input, states=None, start=0):
        return super().forward(input, states, start)


def test_a_model_that_gives_logits_alone(language, text):
    torch.manual_seed(1)
    other = NextSymbol(LogitsAlone(rbn.BatchNormLSTM(4, 6)), text, 10, 8, 3)
    symbols, targets = language.batch(0)
    one, same = (task.loss(symbols, targets) for task in (language, other))
    assert torch.equal(one, same)
    assert torch.equal(
        one, F.cross_entropy(other.model(symbols)[0].flatten(0, 1), targets.flatten())
    )
    assert language.measure_whole("test", 50) == other.measure_whole("test", 50)
    assert language.evaluate() == other.evaluate()


def test_the_first_validation_windows(text):
    model = LanguageModel(rbn.LSTM(4, 6))
    few = NextSymbol(model, text, 10, 8, 3, valid_windows=2)
    shorter = Text(train=text.train, valid=text.valid[:20], test=text.test, symbols="abcd")
    all_of_less = NextSymbol(model, shorter, 10, 8, 3)
    assert few.evaluate() == all_of_less.evaluate()


def test_accuracy():
    torch.manual_seed(0)
    split = Split(torch.randn(3, 25, 1), torch.randint(10, (25,)))
    model = SequenceClassifier(rbn.LSTM(1, 4), 10)
    task = Classification(model, Splits(split, split, split), 10, 0)
    right = (model(split.inputs).argmax(-1) == split.labels).float().mean()
    assert task.measure_with("test", "population") == pytest.approx(float(right))
    assert sum(x.shape[1] for x in task.population_batches(10)) == 25


def test_the_cross_entropy_beside_the_accuracy():
    """25 sequences are split into 9, 8 and 8, each normalized with its own statistics."""
    torch.manual_seed(0)
    split = Split(torch.randn(3, 25, 1), torch.randint(10, (25,)))
    model = SequenceClassifier(rbn.BatchNormLSTM(1, 4), 10)
    with torch.no_grad():
        model(split.inputs)  # running statistics
        before = {name: value.clone() for name, value in model.state_dict().items()}
        task = Classification(model, Splits(split, split, split), 10, 0)
        task.estimate = None  # so that these are the population statistics
        found = task.evaluate()
        cuts = zip(split.inputs.split([9, 8, 8], 1), split.labels.split([9, 8, 8]), strict=True)
        population = F.cross_entropy(model.eval()(split.inputs), split.labels)
        with rbn.batch_statistics(model):
            batch = sum(F.cross_entropy(model(x), y, reduction="sum") for x, y in cuts) / 25
    # The same float32 outputs, summed differently: a few times 6e-8.
    assert found["valid_batch_nats"] == pytest.approx(float(batch), rel=1e-6)
    assert found["valid_population_nats"] == pytest.approx(float(population), rel=1e-6)
    assert found["valid_batch_nats"] != found["valid_population_nats"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_one_pass_gives_accuracy_and_cross_entropy():
    split = Split(torch.randn(3, 25, 1), torch.randint(10, (25,)))
    model = SequenceClassifier(rbn.LSTM(1, 4), 10)
    task = Classification(model, Splits(split, split, split), 10, 0)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    found = task.evaluate()
    assert len(passes) == 3  # 25 sequences, at most 10 per batch
    assert found["valid_batch_nats"] == found["valid_population_nats"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["digits", "pydoc", "mnist", "pmnist", "ptb", "text8"])
@pytest.mark.parametrize("model", ["bn-lstm", "lstm"])
def test_two_steps(task, model):
    if task not in ("digits", "pydoc") and not os.environ.get("RBN_DATA"):
        pytest.skip("RBN_DATA is not set: it names the folder with the data sets")
    found = configs.for_model(configs.published(task), model)
    config = with_settings(from_mapping(found), ["hidden_size=4", "batch_size=2"])
    built = build.build(config, 1, CPU)
    optimizer = torch.optim.SGD(built.model.parameters(), 0.1)
    for step in range(2):
        loss = built.loss(*built.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
    chance = math.log(10 if config.kind is not TEXT else len(built.text.symbols))
    assert float(loss.detach()) == pytest.approx(chance, rel=0.5)


def test_a_run_and_its_result(tmp_path):
    settings = ["epochs=2", "hidden_size=8", "evaluate_every=6"]
    config = with_settings(from_mapping(configs.published("digits")), settings)
    run_folder.create(tmp_path / "run", config, 5)
    run_folder.create(tmp_path / "run", config, 5)  # the same run
    with pytest.raises(FileExistsError, match=r"other settings \(seed 5 there, 6 here\)"):
        run_folder.create(tmp_path / "run", config, 6)
    other = with_settings(config, ["optimizer.lr=0.5", "epochs=9", "clip=2", "tag=x"])
    what = r"\(tag \"\" there, \"x\" here; epochs 2 there, 9 here; clip .*; and 1 more\)"
    with pytest.raises(FileExistsError, match=what):
        run_folder.create(tmp_path / "run", other, 5)
    assert run_folder.read_config(tmp_path / "run") == (config, 5)
    trainer = build.make_trainer(config, build.build(config, 5, CPU), tmp_path / "run")
    assert trainer.run().finished
    result = results.finish(config, 5, trainer, "rbn train digits")
    assert read_checked(tmp_path / "run" / "result.json") == result
    assert {"task", "model", "tag", "seed", "metric", "valid", "test", "stats"} <= result.keys()
    assert {"steps", "seconds", "params", "config", "versions", "gpu", "commit"} <= result.keys()
    assert 0 <= result["test"] <= 1
    assert result["steps"] == 24


def test_a_run_that_went_on_alone_still_shared_the_device(tmp_path):
    small = {"task": "digits", "hidden_size": 4, "batch_size": 600, "evaluate_every": 1}
    short, long = from_mapping(small | {"epochs": 1}), from_mapping(small | {"epochs": 2})
    wanted = [(tmp_path / "short", short, 1), (tmp_path / "long", long, 1)]
    both = TrainingSession(wanted, CPU, tmp_path)
    both.train(max_minutes=1e-9)  # one step each
    assert [trainer.progress.finished for trainer in both.trainers] == [False, False]
    for folder, config, seed in wanted:
        alone = TrainingSession([(folder, config, seed)], CPU, tmp_path)
        alone.train()
        assert len(list(alone.results())) == 1
        assert json.loads((folder / "result.json").read_text())["together"] == 2


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_a_progress_bar_fits_into_80_columns(seeds, tmp_path):
    config = from_mapping({"task": "digits", "hidden_size": 4, "epochs": 1, "evaluate_every": 6})
    fit = TrainingSession(
        [(tmp_path / f"bn-lstm-seed{seed}", config, seed) for seed in seeds], CPU, tmp_path
    )
    shown = io.StringIO()
    with ProgressBars(Console(file=shown, width=80, force_terminal=True)) as watch:
        fit.train(observer=watch)
    erased = "\x1b[2K"  # erases everything before showing it again
    text = Styled.from_ansi(shown.getvalue().rpartition(erased)[2]).plain
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text  # nothing was truncated
    parts = ("step 12/12", " steps/s,", " images/s", "0:00:00 left", "train loss 2.", "validation")
    for part in (*parts, "bn-lstm-seed1"):
        assert text.count(part) == (1 if part == "bn-lstm-seed1" else len(seeds)), part


@pytest.mark.parametrize("seeds", [[1], [1, 2]])
def test_lines_where_there_is_no_terminal(seeds, tmp_path):
    config = from_mapping({"task": "digits", "hidden_size": 4, "epochs": 1, "evaluate_every": 6})
    fit = TrainingSession(
        [(tmp_path / f"bn-lstm-seed{seed}", config, seed) for seed in seeds], CPU, tmp_path
    )
    shown = io.StringIO()
    with ProgressBars(Console(file=shown, width=80)) as watch:
        fit.train(observer=watch)
    lines = shown.getvalue().splitlines()
    assert len(lines) == 2 * len(seeds)
    for line in lines:
        for part in ("/12  ", " steps/s, ", " images/s  ", " left  train loss 2.", " nats"):
            assert part in line, part
        assert re.search(r"  validation accuracy [\d.]+ % \(batch stats\), [\d.]+ % \(popu", line)
    names = sorted(line.split(": ")[0] for line in lines)  # each line names its run
    assert names == [str(tmp_path / f"bn-lstm-seed{seed}") for seed in seeds for _ in range(2)]


def test_statistics_are_not_named_where_the_model_has_none(tmp_path):
    config = from_mapping({"task": "digits", "model": "lstm", "hidden_size": 4, "epochs": 1})
    fit = TrainingSession([(tmp_path / "run", config, 1)], CPU, tmp_path)
    shown = io.StringIO()
    with ProgressBars(Console(file=shown, width=80)) as watch:
        fit.train(observer=watch)
    (result,) = fit.results()
    (again,) = fit.results()
    assert again == result.replace("test ", "already finished, test ")
    for text in (shown.getvalue(), result):
        assert re.search(r"validation accuracy [\d.]+ %, ", text)
        assert "stats" not in text
        assert "population" not in text


def test_a_folder_is_trained_in_by_one_process_at_a_time(tmp_path):
    small = from_mapping({"task": "digits", "hidden_size": 4, "batch_size": 600, "epochs": 1})
    fit = TrainingSession([(tmp_path / "run", small, 1)], CPU, tmp_path)
    run_folder.create(tmp_path / "run", small, 1)
    with run_folder.locked(tmp_path / "run"):
        with pytest.raises(FileExistsError, match="another process"):
            fit.train()
        assert sorted(os.listdir(tmp_path / "run")) == ["config.json", "run.lock"]
    fit.trainers.clear()
    fit.train()
    assert fit.trainers[0].progress.finished


def test_float16_needs_a_gpu(tmp_path):
    half = from_mapping({"task": "digits", "precision": "16-mixed"})
    with pytest.raises(ValueError, match=r"16-mixed .*GPU"):
        TrainingSession([(tmp_path / "run", half, 1)], CPU, tmp_path).train()
    assert not (tmp_path / "run").exists()


def test_exact_statistics_are_those_of_the_training_set():
    config = Config("digits", hidden_size=4, population_batch=400)
    built = build.build(config, 1, CPU)
    results.exact_statistics(config, built)
    assert int(built.model.recurrent.stats_h_l0.count[0]) == 3  # minibatches of 400 of 1,200


def test_no_run_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run"):
        run_folder.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json has no checksum"):
        run_folder.read_config(tmp_path)
    write_checked(tmp_path / "config.json", {})
    with pytest.raises(ValueError, match="not the config of a run"):
        run_folder.read_config(tmp_path)
