"""Reading tasks on a GPU: the same results as on the CPU, without waiting for the device."""

import pytest
import torch

from rbn.experiments.build import build
from rbn.experiments.config import Config
from rbn.experiments.task_kinds import READERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def task(variant, device):
    torch.manual_seed(0)
    data = {"sizes": [200, 40, 40], "rename": None}
    config = Config("cloze", variant, hidden_size=16, batch_size=20, data=data)
    return build(config, 1, torch.device(device))


@pytest.mark.parametrize("variant", READERS)
def test_loss_and_gradients_are_those_of_the_cpu(variant):
    here, there = task(variant, "cpu"), task(variant, "cuda")
    there.model.load_state_dict(here.model.state_dict())
    losses = [t.loss(*t.batch(0)) for t in (here, there)]
    for loss in losses:
        loss.backward()
    # Products in tf32 have 10 bits, and errors add up over the steps.
    torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-2, atol=1e-2)
    norms = [
        torch.stack([p.grad.norm().cpu() for p in t.model.parameters()]) for t in (here, there)
    ]
    torch.testing.assert_close(norms[1], norms[0], rtol=5e-2, atol=1e-3)
    here.measure_with("valid", "batch")
    assert abs(there.measure_with("valid", "population") - 0.5) <= 0.5


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("variant", READERS)
def test_a_step_does_not_wait_for_the_device(variant):
    there = task(variant, "cuda")
    there.batches.rename = "text"
    for step in range(3):
        there.loss(*there.batch(step)).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 6):
            there.loss(*there.batch(step)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
