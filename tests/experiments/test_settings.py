"""The settings of a config reach data, model, training and test."""

import json

import pytest
import torch

import rbn
from rbn import data
from rbn.data import Split, Splits
from rbn.experiments import build, results, run_folder
from rbn.experiments.config import from_mapping
from rbn.experiments.optimizers import make_optimizer
from rbn.experiments.tasks import Classification, NextSymbol
from rbn.experiments.trained_models import open_task
from rbn.experiments.training_session import TrainingSession
from rbn.models import LanguageModel, SequenceClassifier
from rbn.training import Progress, checkpoint
from rbn.training.atomic_files import write_checked

CPU = torch.device("cpu")
SMALL = {"task": "digits", "hidden_size": 4, "batch_size": 600, "evaluate_every": 1, "epochs": 2}


def trained(tmp_path, **settings):
    config = from_mapping(SMALL | settings)
    run = build.make_trainer(config, build.build(config, 1, CPU), tmp_path)
    run.run()
    return config, run


def test_the_best_model_is_tested(tmp_path):
    """Tests the best model, not the last one."""
    config, run = trained(tmp_path)
    best = {k: v.clone() for k, v in checkpoint.load(run.best)[0].items() if "stats" not in k}
    with torch.no_grad():
        for parameter in run.module.parameters():
            parameter.zero_()
    results.finish(config, 1, run, "")
    final, _ = checkpoint.load(tmp_path / "final.safetensors")
    assert best
    assert all(torch.equal(final[name], value) for name, value in best.items())


def test_with_statistics_of_all_training_data(tmp_path):
    config, run = trained(tmp_path, population_batch=400)
    found = results.finish(config, 1, run, "")
    final, _ = checkpoint.load(tmp_path / "final.safetensors")
    assert {int(v.max()) for k, v in final.items() if k.endswith(".count")} == {3}  # 1,200 images
    assert found["valid"] == run.task.measure_with("valid", "population")
    assert found["valid_batch"] == run.task.measure_with("valid", "batch")
    assert found["valid"] != found["valid_batch"]


def test_steps_that_were_left_out_are_in_the_result(tmp_path):
    config, run = trained(tmp_path)
    run.progress.skipped = 3
    assert results.finish(config, 1, run, "")["skipped"] == 3


def test_the_schedule():
    wanted = {"patience": 7, "clip": 0.5, "decay_from": 0.25, "average": 0.75, "evaluate_every": 3}
    schedule = build._schedule(from_mapping(SMALL | wanted), 10, 2.0)
    assert {name: getattr(schedule, name) for name in wanted} == wanted
    assert (schedule.steps, schedule.max_minutes) == (20, 2.0)


@pytest.mark.parametrize("task", ["digits", "pydoc"])
def test_the_task(task):
    settings = {"hidden_size": 4, "batch_size": 60, "dropout": 0.3, "select": "batch"}
    config = from_mapping({"task": task, **settings})
    one, other = (build.build(config, seed, CPU) for seed in (1, 2))
    assert one.metric == "valid_batch"
    assert not torch.equal(one.batch(0)[0], other.batch(0)[0])
    assert any(getattr(module, "p", None) == 0.3 for module in one.model.modules())


def test_runs_with_other_data_do_not_share_them(tmp_path):
    configs = [from_mapping(SMALL | {"data": {"permuted": p}}) for p in (False, True)]
    fit = TrainingSession([(tmp_path / str(k), config, 1) for k, config in enumerate(configs)], CPU)
    one, other = (fit.load(config).train.inputs for config in configs)
    assert not torch.equal(one, other)


def test_the_precision_reaches_fabric(tmp_path):
    fit = TrainingSession(
        [(tmp_path / "run", from_mapping(SMALL | {"precision": "bf16-mixed"}), 1)], CPU
    )
    fit.train(max_minutes=1e-9)
    assert fit.trainers[0].fabric.strategy.precision.precision == "bf16-mixed"


def test_a_trained_model_is_measured_in_its_precision(tmp_path):
    run_folder.create(tmp_path, from_mapping(SMALL | {"precision": "bf16-mixed"}), 1)
    config, run = trained(tmp_path, precision="bf16-mixed")
    results.finish(config, 1, run, "")
    _, task = open_task(tmp_path, CPU)
    inputs = task.splits.test.inputs[:, :5]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = run.module.eval()(inputs)
    found = task.model(inputs)
    assert torch.equal(found.float(), wanted.float())
    assert not torch.equal(found.float(), run.module(inputs))


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd"])
def test_an_optimiser_without_a_rate_has_its_own(name):
    """Also if a CUDA graph captures the step, and the rate is a tensor."""
    config = from_mapping(SMALL | {"optimizer": {"name": name}, "decay_from": 0.5})
    eager, graph = (
        make_optimizer(config, torch.nn.Linear(2, 2), graph).param_groups[0]["lr"]
        for graph in (False, True)
    )
    assert isinstance(graph, torch.Tensor)
    assert float(graph) == pytest.approx(eager, rel=1e-6)  # up to rounding to float32


def numbers(*sizes):
    """Text of random symbols."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(4, (n,), dtype=torch.uint8, generator=generator) for n in sizes]
    return data.Text(*parts, "abcd")


def test_few_validation_windows_but_all_of_the_test():
    torch.manual_seed(0)
    model, text = LanguageModel(rbn.LSTM(4, 6)), numbers(600, 100, 100)
    few, every = (NextSymbol(model, text, 10, 8, 3, valid_windows=n) for n in (2, None))
    for part, same in (("valid", False), ("test", True)):
        found = [task.measure_with(part, "population") for task in (few, every)]
        assert (found[0] == found[1]) == same, part


def test_an_evaluation_leaves_the_running_statistics():
    """Estimates new statistics from 50 minibatches of training data."""
    task = NextSymbol(LanguageModel(rbn.BatchNormLSTM(4, 6)), numbers(6000, 100, 100), 10, 8, 3)
    task.loss(*task.batch(0))
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    counts, estimate = [], task.estimate_population

    def noted(*arguments):
        estimate(*arguments)
        counts.append(int(task.model.recurrent.stats_h_l0.count[0]))

    task.estimate_population = noted
    task.evaluate()
    assert counts == [50]
    after = task.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_parts_are_not_confused():
    train, valid, test = (
        Split(torch.full((3, n, 1), float(n)), torch.zeros(n, dtype=torch.int64))
        for n in (30, 20, 10)
    )
    model = SequenceClassifier(rbn.LSTM(1, 4), 10)
    images = Classification(model, Splits(train, valid, test), 10, 0)
    assert images.batches_per_epoch == 3
    assert images.batch(0)[0].unique().tolist() == [30]
    assert [x.shape[1] for x in images.population_batches(20)] == [20, 10]
    parts = (torch.full((n,), k, dtype=torch.uint8) for k, n in enumerate((600, 100, 90)))
    text = NextSymbol(LanguageModel(rbn.LSTM(3, 4)), data.Text(*parts, "abc"), 10, 8, 3)
    assert {int(x.max()) for x in text.population_batches(20)} == {0}


def test_the_result_of_another_best_step_is_not_the_runs(tmp_path):
    checkpoint.save(tmp_path / "final.safetensors", {"weight": torch.ones(2)}, {})
    content = {"steps": 9, "best_step": 3, "diverged_at": None, "valid": 0.5, "test": 0.5}
    content |= {"metric": "accuracy"}
    write_checked(tmp_path / "result.json", content)
    assert results.finished(tmp_path, Progress(step=9, best_step=3)) == content
    for other in ({"best_step": 4}, {"step": 8}, {"diverged_at": 9}):
        now = Progress(**({"step": 9, "best_step": 3} | other))
        assert results.finished(tmp_path, now) is None, other


def test_a_run_that_diverged_is_tested(tmp_path):
    class Spoilt:
        """Makes the loss of step 2 NaN."""

        def add(self, trainer, task):
            batch, loss = task.batch, task.loss

            def remember(step):
                self.step = step
                return batch(step)

            task.batch = remember
            task.loss = lambda *parts: loss(*parts) * (torch.nan if self.step == 2 else 1)

    fit = TrainingSession([(tmp_path / "run", from_mapping(SMALL), 1)], CPU)
    fit.train(observer=Spoilt())
    assert fit.diverged is not None
    assert len(list(fit.results())) == 1
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["diverged_at"] == 2
    assert found["best_step"] <= 2
