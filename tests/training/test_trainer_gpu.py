"""Training on a GPU: the step as a graph, several runs at once, and resuming after a stop."""

import pytest
import torch
from letters_task import Letters

from rbn.training import Schedule, Trainer, checkpoint, train_interleaved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, torch.tensor(0.01).cuda(), capturable=True),
    "rmsprop": lambda p: torch.optim.RMSprop(
        p, torch.tensor(0.01).cuda(), momentum=0.9, capturable=True
    ),
}


class LettersOnGpu(Letters):
    def __init__(self, seed=0):
        super().__init__(seed)
        self.model = self.model.cuda()
        torch.cuda.manual_seed(seed)

    def batch(self, step):
        return tuple(tensor.cuda() for tensor in super().batch(step))

    def loss(self, symbols, targets):
        return self.model(symbols, targets=targets)[0]


def trainer(folder, seed=0, graph=True, optimizer="adam", **options):
    task = LettersOnGpu(seed)
    schedule = Schedule(20, evaluate_every=5, checkpoint_every=3, decay_from=0.3)
    made = OPTIMIZERS[optimizer](task.model.parameters())
    return Trainer(task, made, schedule, folder, graph=graph, **options)


def final(folder):
    tensors, metadata = checkpoint.load(folder / "last.safetensors")
    return tensors, [record["valid"] for record in metadata["progress"]["history"]]


def assert_same(one, other):
    (tensors, looks), (tensors2, looks2) = final(one), final(other)
    assert looks == looks2
    for name, value in tensors.items():
        if not name.startswith("random.cpu"):
            assert torch.equal(value, tensors2[name]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_graph_gives_the_numbers_of_ordinary_steps(optimizer, tmp_path):
    for graph in (False, True):
        trainer(tmp_path / str(graph), graph=graph, optimizer=optimizer).run()
    assert_same(tmp_path / "True", tmp_path / "False")


def test_several_at_once_give_the_numbers_of_each_alone(tmp_path):
    for seed in (1, 2, 3):
        trainer(tmp_path / f"alone{seed}", seed).run()
    train_interleaved([trainer(tmp_path / f"together{seed}", seed) for seed in (1, 2, 3)])
    for seed in (1, 2, 3):
        assert_same(tmp_path / f"alone{seed}", tmp_path / f"together{seed}")


@pytest.mark.parametrize("stop", [2, 9, 17])
def test_a_run_that_was_killed_goes_on_to_the_same_numbers(stop, tmp_path):
    class Killed(Exception):
        pass

    def kill(progress):
        if progress.step == stop:
            raise Killed

    trainer(tmp_path / "whole").run()
    with pytest.raises(Killed):
        trainer(tmp_path / "cut", on_step=kill).run()
    trainer(tmp_path / "cut", seed=9).run()
    assert_same(tmp_path / "whole", tmp_path / "cut")
