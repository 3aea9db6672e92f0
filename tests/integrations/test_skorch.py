"""skorch: fit and predict like scikit-learn, with its validation split and checkpoints."""

import numpy as np
import pytest
import torch
from torch import nn

import rbn

skorch = pytest.importorskip("skorch", reason="skorch is not installed")

from skorch.callbacks import Checkpoint, EarlyStopping, LoadInitState  # noqa: E402

DATA = np.random.default_rng(5)
X = DATA.normal(size=(60, 6, 3)).astype(np.float32)
Y = (X[:, 0, 0] > 0).astype(np.int64)


class Classifier(nn.Module):
    def __init__(self, hidden=5):
        super().__init__()
        self.layer = rbn.BatchNormLSTM(3, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, x, lengths=None):
        return self.head(self.layer(x, lengths=lengths)[1][0][-1])


def classifier(**options):
    torch.manual_seed(0)
    settings = {
        "criterion": nn.CrossEntropyLoss,
        "optimizer": torch.optim.Adam,
        "lr": 0.02,
        "batch_size": 16,
        "max_epochs": 3,
        "verbose": 0,
        **options,
    }
    return skorch.NeuralNetClassifier(Classifier, **settings)


def test_fit_predict_and_saved_parameters(tmp_path):
    net = classifier().fit(X, Y)
    assert all(np.isfinite(net.history[:, ("train_loss", "valid_loss", "valid_acc")]).flatten())
    expected = net.predict_proba(X)
    assert np.isfinite(expected).all()
    assert np.array_equal(net.predict_proba(X), expected)
    np.testing.assert_allclose(net.predict_proba(X[:1]), expected[:1], rtol=1e-5)  # a batch of one
    net.save_params(f_params=tmp_path / "params.pt", f_optimizer=tmp_path / "optimizer.pt")
    net.save_params(f_params=tmp_path / "params.safetensors", use_safetensors=True)
    for name, options in (("params.pt", {}), ("params.safetensors", {"use_safetensors": True})):
        new = classifier().initialize()
        new.load_params(f_params=tmp_path / name, **options)
        assert np.array_equal(new.predict_proba(X), expected)


@pytest.mark.slow
def test_it_learns_and_the_validation_score_shows_it():
    x = DATA.normal(size=(200, 6, 3)).astype(np.float32)
    y = (x[:, -1, 0] > 0).astype(np.int64)
    net = classifier(max_epochs=12).fit(x, y)
    assert net.history[-1, "valid_acc"] > 0.8
    assert net.score(x, y) > 0.8


def test_the_best_epoch_and_early_stopping(tmp_path):
    best = Checkpoint(monitor="valid_loss_best", dirname=str(tmp_path), load_best=True)
    net = classifier(max_epochs=4, callbacks=[best, EarlyStopping(patience=3)]).fit(X, Y)
    expected = net.predict_proba(X)
    new = classifier(callbacks=[LoadInitState(best)])
    new.initialize()
    new.load_params(checkpoint=best)
    assert np.array_equal(new.predict_proba(X), expected)
    new.partial_fit(X, Y)
    assert np.isfinite(new.history[-1, "valid_loss"])


def test_copies_and_a_grid():
    sklearn = pytest.importorskip("sklearn.model_selection", reason="scikit-learn is not installed")
    base = pytest.importorskip("sklearn.base")
    search = sklearn.GridSearchCV(
        base.clone(classifier(max_epochs=1, train_split=None)), {"module__hidden": [3, 5]}, cv=2
    )
    search.fit(X, Y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert np.isfinite(search.predict_proba(X)).all()


def test_exact_statistics_of_the_training_set():
    net = classifier(train_split=None, iterator_train__shuffle=False).fit(X, Y)
    batches = net.get_iterator(net.get_dataset(X, Y), training=True)
    assert rbn.update_population_stats(net.module_, batches, device=net.device) == 4
    model = Classifier().double()
    model.load_state_dict(net.module_.state_dict())
    wide = torch.tensor(X).double()
    rbn.update_population_stats(model, wide.split(16))
    for name, value in model.layer.state_dict().items():
        if name.endswith(("mean", "var")):
            found = net.module_.layer.state_dict()[name].double()
            # float32 against float64, through six steps.
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


def test_inputs_by_name():
    """skorch passes the entries of a dict as keyword arguments; so do exact statistics."""
    lengths = DATA.integers(2, 7, 60)
    inputs = {"x": X, "lengths": lengths}
    net = classifier().fit(inputs, Y)
    batches = net.get_iterator(net.get_dataset(inputs, Y), training=True)
    assert rbn.update_population_stats(net.module_, batches) == 4
    assert net.predict(inputs).shape == (60,)
