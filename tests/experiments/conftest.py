"""What tests of experiments have in common."""

import pytest
import torch

from rbn.experiments.build import build, make_trainer


@pytest.fixture
def stopped_and_whole(tmp_path):
    """What trains without a stop, and with one after some steps, to the same numbers."""

    def compare(config, steps):
        def trainer(folder):
            return make_trainer(config, build(config, 1, torch.device("cpu")), tmp_path / folder)

        whole, first = trainer("whole"), trainer("stopped")
        whole.run()
        for progress in first.steps():
            if progress.step == steps:
                break
        with first.isolated():
            first.save()
        second = trainer("stopped")
        assert second.progress.step == steps
        second.run()
        expected, found = whole.module.state_dict(), second.module.state_dict()
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name
        assert whole.progress.best == second.progress.best

    return compare
