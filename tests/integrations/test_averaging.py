"""Averaged weights: `AveragedModel`, `update_bn`, and Lightning's callbacks."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

import rbn

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 against float64, through six steps
DATA = torch.Generator().manual_seed(5)
X = torch.randn(44, 6, 3, generator=DATA)
Y = (X[:, 0, 0] > 0).long()
BATCHES = list(zip(X.split(8), Y.split(8), strict=True))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = rbn.BatchNormLSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.layer(x)[1][0][-1])


def statistics(model):
    return {
        name: value.double()
        for name, value in model.state_dict().items()
        if name.endswith((".mean", ".var"))
    }


def exact(model, batches=BATCHES):
    """In float64, at the model's current weights."""
    wide = Classifier().double()
    wide.load_state_dict(model.state_dict())
    rbn.update_population_stats(wide, [x.double() for x, _ in batches])
    return statistics(wide)


def check_exact(model, batches=BATCHES):
    found, wanted = statistics(model), exact(model, batches)
    assert found.keys() == wanted.keys()
    assert len(found) == 6
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **TOLERANCE)


def check_own(model, batches=BATCHES):
    """The input term's means over all rows match the model's own weights."""
    weight = model.layer.weight_ih_l0.detach().double()
    statistics = model.layer.stats_x_l0
    shortest = min(x.shape[1] for x, _ in batches)
    rows = torch.cat([x[:, :shortest] for x, _ in batches]).double()
    expected = (rows @ weight.T).mean(0)
    torch.testing.assert_close(statistics.mean[:shortest].double(), expected, **TOLERANCE)


def averaged(lengths=(6,) * 6, **options):
    torch.manual_seed(0)
    model = Classifier()
    average = AveragedModel(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for (x, y), length in zip(BATCHES, lengths, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:, :length]), y).backward()
        optimizer.step()
        average.update_parameters(model)
    return model, average


AVERAGES = {
    "plain": {},
    "with buffers": {"use_buffers": True},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("lengths", [(6,) * 6, (2, 3, 6, 1, 5, 6)])
def test_averaged_models_evaluate_at_their_own_weights(options, lengths):
    model, average = averaged(lengths, **options)
    average.eval()
    with torch.no_grad():
        found = average(X[:9])
    assert not torch.equal(average.module.head.weight, model.head.weight)
    batches = [(x[:, :n], y) for (x, y), n in zip(BATCHES, lengths, strict=True)]
    check_own(average.module, batches)
    new = Classifier().eval()
    new.load_state_dict(average.module.state_dict())
    assert torch.equal(new(X[:9]), found)


@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES)
def test_update_bn_and_exact_statistics(options):
    _, average = averaged(**options)
    rbn.update_population_stats(average, BATCHES[:3])
    check_exact(average.module, BATCHES[:3])
    update_bn(BATCHES[1:], average)
    check_exact(average.module, BATCHES[1:])
    before = copy.deepcopy(average.state_dict())
    average.eval()(X[:9])  # keeps them
    assert all(torch.equal(before[k], v) for k, v in average.state_dict().items())


def swap(model, average):
    """Through `data`, like Lightning, which version counters do not notice."""
    pairs = zip(model.state_dict().values(), average.state_dict().values(), strict=True)
    for one, other in pairs:
        kept = one.clone()
        one.data.copy_(other.data)
        other.data.copy_(kept)


@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES)
def test_weights_that_are_swapped_without_a_trace(options):
    model, average = averaged(**options)
    own, averages = copy.deepcopy([model.state_dict(), average.module.state_dict()])
    model.eval()
    model(X[:9])
    swap(model, average.module)
    assert torch.equal(model.head.weight, averages["head.weight"])
    model(X[:9])
    check_own(model)
    swap(model, average.module)
    assert torch.equal(model.head.weight, own["head.weight"])
    model(X[:9])
    check_own(model)
    average.eval()
    average(X[:9])
    check_own(average.module)


def test_exact_statistics_outlast_a_copy():
    model, _ = averaged()
    rbn.update_population_stats(model, BATCHES[:2])
    kept = copy.deepcopy(model)
    for found in (model, kept):
        found.eval()(X[:9])
        check_exact(found, BATCHES[:2])


L = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
callbacks = L.callbacks

from rbn.integrations.lightning import ExactStatistics  # noqa: E402

for_lightning = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*population statistics"),  # from the sanity check
]


def marked(test):
    for mark in for_lightning:
        test = mark(test)
    return test


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Classifier()
        self.evaluated = []

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))
        self.evaluated.append(copy.deepcopy(self.model))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.02)


def fitted(folder, used, epochs=2):
    torch.manual_seed(1)
    module = Module()
    trainer = L.Trainer(
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=used,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(module, loader(), loader(10))
    return module, trainer


def loader(rows=44):
    return DataLoader(TensorDataset(X[:rows], Y[:rows]), batch_size=8 if rows == 44 else rows)


ORDERS = {
    "estimated": lambda ema: [ema],
    "exact": lambda ema: [ema, ExactStatistics()],
    "exact, the other order": lambda ema: [ExactStatistics(), ema],
}


@marked
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_exponential_average(order, tmp_path):
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this version of lightning has no EMAWeightAveraging")
    used = order(callbacks.EMAWeightAveraging(decay=0.8))
    module, trainer = fitted(tmp_path, used)
    last = module.evaluated[-1]
    exactly = any(isinstance(callback, ExactStatistics) for callback in used)
    check_exact(last) if exactly else check_own(last)
    expected = trainer.callback_metrics["loss"].item()
    saved = Module.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    torch.testing.assert_close(saved.model.head.weight, module.model.head.weight)
    for found in (module, saved):
        (metrics,) = trainer.test(found, loader(10), verbose=False)
        assert metrics["loss"] == pytest.approx(expected, rel=1e-5)


@marked
@pytest.mark.parametrize("exactly", [False, True])
def test_stochastic_weight_average(exactly, tmp_path):
    used = [callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]
    used += [ExactStatistics()] if exactly else []
    module, trainer = fitted(tmp_path, used, epochs=4)
    trainer.test(module, loader(10), verbose=False)
    weights = [model.head.weight for model in module.evaluated]
    assert not torch.equal(weights[-1], weights[-3])
    assert torch.equal(weights[-1], module.model.head.weight)
    last = module.evaluated[-1]
    check_exact(last) if exactly else check_own(last)
    assert module.model.layer.momentum == 0.1
