"""PyTorch Lightning's Trainer, without and with the callback for exact statistics."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rbn

L = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from rbn.integrations.lightning import ExactStatistics  # noqa: E402

pytestmark = [
    # Lightning's advice, such as to use more workers.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # Lightning's use of torch's pytree.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    # Another trainer loads the checkpoint.
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

DATA = torch.Generator().manual_seed(5)
X = torch.randn(44, 6, 3, generator=DATA)
Y = (X[:, 0, 0] > 0).long()
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 against float64, through six steps


class Classifier(L.LightningModule):
    def __init__(self, zoneout=0.0):
        super().__init__()
        self.layer = rbn.BatchNormLSTM(3, 5, batch_first=True, zoneout=(zoneout, zoneout))
        self.head = nn.Linear(5, 2)
        self.losses, self.evaluated = [], []

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.evaluated.append(copy.deepcopy(self.state_dict()))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def loader(rows=None, **options):
    rows = len(X) if rows is None else rows
    return DataLoader(TensorDataset(X[:rows], Y[:rows]), batch_size=8, **options)


def trainer(folder, **options):
    options = {"max_epochs": 2, "default_root_dir": folder, "enable_progress_bar": False, **options}
    return L.Trainer(accelerator="cpu", **options)


def fitted(folder, data=None, zoneout=0.0, **options):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = Classifier(zoneout)
    used = trainer(folder, **options)
    used.fit(model, data or loader(shuffle=True), loader(10))
    return model, used


def exact(state, batches):
    """In float64: the statistics of these weights, each the average over the batches."""
    model = Classifier().double()
    model.load_state_dict(state)
    rbn.update_population_stats(model, [x.double() for x in batches])
    return {k: v for k, v in model.state_dict().items() if "stats_" in k}


def check_exact(state, batches):
    for name, value in exact(state, batches).items():
        if "count" in name:
            assert torch.equal(state[name], value), name
        else:
            torch.testing.assert_close(state[name].double(), value, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*population statistics")  # from the sanity check
@pytest.mark.parametrize("callback", [False, True])
def test_every_way_to_evaluate_gives_the_same(callback, tmp_path):
    """Fit with the sanity check, validate, test, save a checkpoint, and load a model from it."""
    callbacks = [ExactStatistics()] if callback else []
    model, used = fitted(tmp_path, callbacks=callbacks)
    expected = used.callback_metrics["loss"].item()
    path = used.checkpoint_callback.best_model_path
    new = Classifier.load_from_checkpoint(path)
    alone = trainer(tmp_path, logger=False)
    for found in (
        used.validate(model, loader(10), verbose=False),
        used.test(model, loader(10), verbose=False),
        used.test(model, loader(10), ckpt_path="best", verbose=False),
        alone.test(new, loader(10), verbose=False),
        alone.validate(Classifier(), loader(10), ckpt_path=path, verbose=False),
    ):
        assert found[0]["loss"] == expected
    assert model.training


OPTIONS = {
    "default": {},
    "within the epoch": {"val_check_interval": 2},
    "accumulated": {"accumulate_grad_batches": 3},
    "saved without validation": {"limit_val_batches": 0},
}


@pytest.mark.filterwarnings("ignore:.*population statistics")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_statistics_are_exact_when_they_are_used_and_saved(options, tmp_path):
    data = loader(shuffle=False)
    batches = [x for x, _ in data]
    model, used = fitted(tmp_path, data, callbacks=[ExactStatistics()], **options)
    saved = torch.load(used.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    expected = {"within the epoch": 6, "saved without validation": 0}
    times = next((n for name, n in expected.items() if options is OPTIONS[name]), 2)
    assert len(model.evaluated) == times
    for state in (*model.evaluated, saved):
        check_exact(state, batches)
    assert saved["layer.stats_h_l0.count"].tolist() == [len(batches)] * 6


@pytest.mark.filterwarnings("ignore:.*population statistics")
def test_checkpoints_within_an_epoch(tmp_path):
    data = loader(shuffle=False)
    saving = L.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4, save_top_k=-1)
    fitted(tmp_path, data, callbacks=[saving, ExactStatistics()])
    paths = sorted(tmp_path.glob("saved/*.ckpt"))
    assert len(paths) == 3
    for path in paths:
        state = torch.load(path, weights_only=True)["state_dict"]
        check_exact(state, [x for x, _ in data])


def states():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1]


class Noisy(TensorDataset):
    """Reads every global random state."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(()) + random.random() + np.random.rand(), y


LOADERS = {
    "shuffled": lambda: loader(shuffle=True),
    "own generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(2)),
    "random data": lambda: DataLoader(Noisy(X, Y), batch_size=8, shuffle=True),
    "workers that stay": lambda: loader(shuffle=True, num_workers=1, persistent_workers=True),
    "drawn as needed": lambda: loader(
        sampler=torch.utils.data.WeightedRandomSampler(torch.ones(44), 44)
    ),
}


@pytest.mark.filterwarnings("ignore:.*population statistics")
@pytest.mark.parametrize("data", LOADERS.values(), ids=LOADERS)
def test_training_is_as_without_the_callback(data, tmp_path):
    found = []
    for callbacks in ([], [ExactStatistics()]):
        options = {"callbacks": callbacks, "val_check_interval": 2, "logger": False}
        model, used = fitted(tmp_path / str(len(callbacks)), data(), 0.1, **options)
        names = sorted(used.logged_metrics)
        found.append((model.losses, list(model.parameters()), states(), names, used.global_step))
    plain, with_callback = found
    assert len(plain[0]) == 12
    assert plain[0] == with_callback[0]
    assert all(map(torch.equal, plain[1], with_callback[1]))
    assert torch.equal(plain[2][0], with_callback[2][0])
    assert plain[2][1] == with_callback[2][1]
    assert (plain[2][2] == with_callback[2][2]).all()
    assert plain[3:] == with_callback[3:]


@pytest.mark.filterwarnings("ignore:.*population statistics")
def test_nothing_is_done_twice(tmp_path):
    calls = []
    callback = ExactStatistics(forward=lambda model, batch: calls.append(model(batch[0])))
    model, used = fitted(tmp_path, callbacks=[callback])
    assert len(calls) == 2 * 6  # validation and the checkpoint together, in each of two epochs
    used.validate(model, loader(10), verbose=False)
    used.test(model, loader(10), verbose=False)
    used.predict(model, DataLoader(X[:10], batch_size=5))
    used.save_checkpoint(tmp_path / "again.ckpt")
    assert len(calls) == 2 * 6
    used.test(Classifier(), loader(10), verbose=False)
    assert len(calls) == 2 * 6


@pytest.mark.filterwarnings("ignore:.*population statistics")
def test_own_batches_and_limits(tmp_path):
    batches = [x for x, _ in loader()]
    model, _ = fitted(tmp_path, callbacks=[ExactStatistics(batches=batches[3:], max_batches=2)])
    check_exact(model.evaluated[-1], batches[3:5])
    data = loader(shuffle=False)
    model, _ = fitted(tmp_path, data, callbacks=[ExactStatistics(max_batches=3)])
    check_exact(model.evaluated[-1], batches[:3])
    limit = {"limit_train_batches": 2}
    model, _ = fitted(tmp_path, data, callbacks=[ExactStatistics(max_batches=3)], **limit)
    check_exact(model.evaluated[-1], batches[:2])


@pytest.mark.filterwarnings("ignore:.*population statistics")
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision_is_that_of_the_trainer(precision, tmp_path):
    data, types = loader(shuffle=False), []

    def forward(model, batch):
        types.append((model(batch[0]).dtype, batch[0].dtype))

    callback = ExactStatistics(forward=forward)
    model, _ = fitted(
        tmp_path, data, callbacks=[callback], precision=precision, enable_model_summary=False
    )
    wanted = torch.float64 if precision == "64-true" else torch.bfloat16
    assert {found for found, _ in types} == {wanted}
    state = model.evaluated[-1]
    assert state["layer.stats_h_l0.mean"].dtype in (torch.float32, torch.float64)
    reference = exact(state, [x for x, _ in data])
    for name in ("mean", "var"):
        # bfloat16 has 8 bits; the statistics are averages of values of about 1.
        found = state[f"layer.stats_x_l0.{name}"].double()
        bound = {"rtol": 0.05, "atol": 0.02} if wanted is torch.bfloat16 else TOLERANCE
        torch.testing.assert_close(found, reference[f"layer.stats_x_l0.{name}"], **bound)


@pytest.mark.filterwarnings("ignore:.*population statistics")
def test_frozen_layers_keep_their_statistics(tmp_path):
    class TwoLayers(Classifier):
        def __init__(self):
            super().__init__()
            self.frozen = rbn.BatchNormLSTM(3, 3, batch_first=True)
            self.frozen(X + 1)
            self.frozen.eval().requires_grad_(False)

        def forward(self, x):
            return super().forward(self.frozen(x)[0])

    torch.manual_seed(0)
    model = TwoLayers()
    before = copy.deepcopy(model.frozen.state_dict())
    used = trainer(tmp_path, callbacks=[ExactStatistics()])
    used.fit(model, loader(), loader(10))
    assert all(torch.equal(before[k], v) for k, v in model.frozen.state_dict().items())
    assert model.layer.stats_h_l0.count.tolist() == [6] * 6
    assert not model.frozen.training
    assert model.layer.training

    model.layer.eval().requires_grad_(False)  # all are frozen now
    before = copy.deepcopy(model.layer.state_dict())
    trainer(tmp_path, callbacks=[ExactStatistics()]).fit(model, loader(), loader(10))
    stats = {k: v for k, v in model.layer.state_dict().items() if "stats" in k}
    assert all(torch.equal(before[k], v) for k, v in stats.items())


class Recorder(L.Callback):
    """Writes each process's batches and statistics to files."""

    def __init__(self, folder):
        self.folder, self.batches = folder, []

    def forward(self, model, batch):
        self.batches.append(batch[0])
        model(batch[0])

    def on_fit_end(self, trainer, pl_module):
        found = self.batches, pl_module.evaluated[-1]
        torch.save(found, self.folder / f"rank{trainer.global_rank}.pt")


@pytest.mark.filterwarnings("ignore:.*population statistics")
def test_processes_average_over_the_batches_of_all(tmp_path):
    recorder = Recorder(tmp_path)
    callbacks = [recorder, ExactStatistics(forward=recorder.forward)]
    options = {"strategy": "ddp_fork", "devices": 2, "logger": False, "max_epochs": 1}
    fitted(tmp_path, callbacks=callbacks, **options)
    found = [torch.load(tmp_path / f"rank{k}.pt", weights_only=True) for k in range(2)]
    (first, state), (second, other) = found
    assert all(torch.equal(state[name], other[name]) for name in state)
    rows = torch.cat([*first, *second]).flatten(1)
    assert torch.equal(rows.sort(0).values, X.flatten(1).sort(0).values)  # each row once
    check_exact(state, [*first, *second])


@pytest.mark.filterwarnings("ignore:.*population statistics")
def test_wrong_arguments(tmp_path):
    with pytest.raises(TypeError, match="many times"):
        ExactStatistics(batches=iter([X]))
    with pytest.raises(TypeError, match="int"):
        ExactStatistics(batches=3)
    for value in (0, -1, True):
        with pytest.raises(ValueError, match="max_batches"):
            ExactStatistics(max_batches=value)
    model = Classifier()
    used, data = trainer(tmp_path, callbacks=[ExactStatistics()]), {"a": loader(), "b": loader()}
    with pytest.raises(TypeError, match="batches="):
        used.fit(model, data)
    assert model.losses == []


class WithLengths(Classifier):
    def forward(self, x, lengths=None):
        return self.head(self.layer(x, lengths=lengths)[0][:, -1])

    def training_step(self, batch, batch_idx):
        x, lengths = batch
        return self(x, lengths).square().mean()

    def validation_step(self, batch, batch_idx):
        self(*batch)


def with_lengths(model, batch):
    return model(*batch)


@pytest.mark.filterwarnings("ignore:.*population statistics")
def test_integers_that_may_be_lengths_are_refused(tmp_path):
    """If taken for targets, padding would enter the statistics of a model trained with lengths."""
    data = DataLoader(TensorDataset(X, torch.arange(44) % 6 + 1), batch_size=8)
    given = [(X[:8], torch.arange(8) % 6 + 1)]
    for callback in (ExactStatistics(), ExactStatistics(batches=given)):
        used = trainer(tmp_path, callbacks=[callback], num_sanity_val_steps=0)
        with pytest.raises(TypeError, match="lengths"):
            used.fit(WithLengths(), data, data)
        assert used.global_step == 1  # not after the whole epoch
    used = trainer(tmp_path, max_epochs=1, callbacks=[ExactStatistics(forward=with_lengths)])
    used.fit(WithLengths(), data, data)
