"""Evaluation of tasks: batches and randomness behind population statistics."""

import torch

from rbn import data
from rbn.experiments.build import build
from rbn.experiments.config import Config, with_settings
from rbn.nn import update_population_stats

CPU = torch.device("cpu")


def make_task(*settings):
    """A small language model on random symbols, with its config."""
    config = with_settings(
        Config("pydoc", hidden_size=8, batch_size=8, length=10, population_batch=50),
        settings,
    )
    parts = (torch.randint(5, (n,), dtype=torch.uint8) for n in (2000, 500, 500))
    return build(config, 1, CPU, loaded=data.Text(*parts, "abcde")), config


def test_an_evaluation_estimates_with_batches_of_the_final_size():
    """The estimate covers all 200 windows, so it equals the final one bit for bit."""
    task, config = make_task()
    found = task.evaluate()["valid_population"]
    task.estimate_population(config.population_batch)
    assert task.measure_with("valid", "population") == found
    task.estimate_population(config.batch_size)
    assert task.measure_with("valid", "population") != found


def test_statistics_are_those_of_the_evaluated_model():
    """Without the dropout of training, but with noise in the initial state."""
    task, _ = make_task("layer.weight_dropout=0.5", "layer.zoneout=[0.3, 0.2]")
    task.estimate_population(50)
    found = task.model.recurrent.stats_h_l0.var.clone()
    batches = list(task.population_batches(50))
    update_population_stats(task.model, batches, train_mode=False)
    assert torch.equal(task.model.recurrent.stats_h_l0.var, found)
    task, _ = make_task("layer.hidden_noise=0.5")
    task.estimate_population(50)
    assert task.model.recurrent.stats_h_l0.var[0].min() > 0  # h0 is the same in all rows


def test_images_that_start_alike_are_estimated_with_the_masks_of_zoneout():
    """Without masks, nothing varies before the first pixel that differs."""
    images = torch.zeros(6, 200, 1)
    images[3:] = torch.rand(3, 200, 1)
    part = data.Split(images, torch.randint(10, (200,)))
    config = with_settings(
        Config("digits", hidden_size=8, batch_size=50, population_batch=50),
        ["layer.zoneout=[0.5, 0.05]"],
    )
    task = build(config, 1, CPU, loaded=data.Splits(part, part, part))
    recurrent = task.model.recurrent
    torch.nn.init.normal_(recurrent.bias_l0)  # so that the cell changes from the first step on
    torch.nn.init.normal_(recurrent.beta_c_l0)
    update_population_stats(task.model, [images], train_mode=False)
    assert recurrent.stats_h_l0.var[1:3].max() < 1e-10
    task.estimate_population(50)
    assert recurrent.stats_h_l0.var[1:3].mean(1).min() > 1e-5
