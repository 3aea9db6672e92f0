"""A run of a real task learns."""

import pytest
import torch

from rbn.experiments import build, results
from rbn.experiments import config as configs
from rbn.experiments.config import from_mapping, with_settings

# A smaller model at a higher rate, with fewer evaluations.
SHORTER = ["evaluate_every=60", "hidden_size=64", "epochs=30", "optimizer.lr=0.01"]


@pytest.mark.no_cover
@pytest.mark.slow
def test_sequential_digits(tmp_path):
    """Like ``rbn train digits``: 64 steps, one pixel at a time; chance is 10 %."""
    config = with_settings(from_mapping(configs.published("digits")), SHORTER)
    task = build.build(config, 1, torch.device("cpu"))
    trainer = build.make_trainer(config, task, tmp_path)
    assert trainer.run().finished
    result = results.finish(config, 1, trainer, "rbn train digits")
    assert result["test"] > 0.9
    assert result["valid"] > 0.9
