"""A small task with everything that has state: noise, zoneout, dropout, statistics."""

import torch
import torch.nn.functional as F

import rbn
from rbn.models import LanguageModel
from rbn.training import Schedule, Trainer, checkpoint


class Letters:
    """Predict the next letter of a random text with a pattern."""

    metric = "valid"
    higher_is_better = False

    def __init__(self, seed=0, layer_class=rbn.BatchNormLSTM):
        torch.manual_seed(seed)
        options = {"hidden_noise": 0.1, "zoneout": (0.1, 0.1), "num_layers": 2, "dropout": 0.2}
        self.model = LanguageModel(layer_class(5, 6, **options))
        generator = torch.Generator().manual_seed(1)
        self.text = torch.randint(5, (400,), generator=generator).sort().values

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(380, (8,), generator=generator)
        window = self.text[starts + torch.arange(12)[:, None]]
        return window[:-1], window[1:]

    def loss(self, symbols, targets):
        logits, _ = self.model(symbols)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            value = float(self.loss(*self.batch(10**6)))
        self.model.train()
        return {"valid": value, "half": value / 2}


def trainer(folder, task=None, schedule=None, **options):
    task = task or Letters()
    schedule = schedule or Schedule(20, evaluate_every=5, checkpoint_every=3)
    optimizer = torch.optim.Adam(task.model.parameters(), 0.01)
    return Trainer(task, optimizer, schedule, folder, **options)


def final(folder):
    """Everything a run leaves behind, except its time."""
    tensors, metadata = checkpoint.load(folder / "last.safetensors")
    progress = metadata["progress"]
    progress.pop("seconds")
    progress.pop("loss")  # mean over the steps fetched together
    for record in progress["history"]:
        record.pop("seconds")
    return tensors, metadata


def assert_same_run(one, other):
    (tensors, metadata), (tensors2, metadata2) = final(one), final(other)
    assert metadata == metadata2
    assert tensors.keys() == tensors2.keys()
    for name, value in tensors.items():
        assert torch.equal(value, tensors2[name]), name
