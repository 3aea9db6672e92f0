"""`update_population_stats` takes batches in every form that data loaders and trainers produce."""

import collections
import copy

import pytest
import torch
from torch import nn

import rbn

EXACT = {"rtol": 1e-5, "atol": 1e-7}  # float32 averages in another order
Pair = collections.namedtuple("Pair", ["first", "second"])


class Model(nn.Module):
    """Lengths are optional."""

    def __init__(self):
        super().__init__()
        self.layer = rbn.BatchNormLSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.seen = []

    def forward(self, x, lengths=None, labels=None):
        self.seen.append((x, lengths, labels))
        return self.head(self.layer(x, lengths=lengths)[0])


class NeedsLengths(Model):
    def forward(self, x, lengths):
        return super().forward(x, lengths)


class TakesAll(Model):
    def forward(self, x, **others):
        return super().forward(x, others["lengths"])


class TakesPair(Model):
    def forward(self, pair):
        return super().forward(pair[0], lengths=pair[1])


X = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(3))
N = torch.tensor([7, 2, 5, 1, 4])
Y = torch.tensor([0, 1, 1, 0, 1])


def statistics_of(model, batch, **options):
    assert rbn.update_population_stats(model, [batch], **options) == 1
    return {k: v.clone() for k, v in model.layer.state_dict().items() if "stats_" in k}


def expected(model, lengths):
    """The result at the same weights, from a call with named arguments."""
    other = copy.deepcopy(model)
    return statistics_of(other, None, forward=lambda m, _: m.layer(X, lengths=lengths))


def check(model, batch, lengths, **options):
    found, wanted = statistics_of(model, batch, **options), expected(model, lengths)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, **EXACT)


@pytest.mark.parametrize(
    "batch",
    [X, (X,), [X], (X, Y), [X, Y], ((X,), Y), {"x": X}, {"x": X, "other": Y}, Pair(X, Y)],
)
def test_forms_without_lengths(batch):
    check(Model(), batch, None)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": X, "lengths": N},
        {"x": X, "lengths": N, "labels": Y, "index": Y},
        collections.UserDict({"x": X, "lengths": N}),
        ({"x": X, "lengths": N}, Y),
        [collections.UserDict({"lengths": N, "x": X}), Y, Y],
        ((X, N), Y),
        [[X, N], Y],
    ],
)
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_forms_with_lengths(batch, device):
    check(Model(), batch, N, device=device)


def test_lengths_change_the_statistics():
    """Without this, the tests above could not fail."""
    model = Model()
    with_lengths, without = expected(model, N), expected(model, None)
    assert not torch.allclose(with_lengths["stats_h_l0.mean"], without["stats_h_l0.mean"])


def test_labels_reach_a_model_that_takes_them():
    model = Model()
    rbn.update_population_stats(model, [{"x": X, "labels": Y, "more": 3}])
    ((x, lengths, labels),) = model.seen
    assert x is X
    assert lengths is None
    assert labels is Y


@pytest.mark.parametrize(
    "batch", [(X, N), (X, N, Y), (X, N, Y, Y), ((X, N), Y), {"x": X, "lengths": N}]
)
def test_as_many_elements_as_forward_requires(batch):
    check(NeedsLengths(), batch, N)


def test_a_model_that_takes_any_keyword_gets_all():
    check(TakesAll(), {"x": X, "lengths": N, "more": Y}, N)


def test_a_model_that_takes_a_tuple_gets_it_whole():
    check(TakesPair(), ((X, N), Y), N)
    check(TakesPair(), {"pair": (X, N)}, N)


def test_the_signature_is_that_of_the_wrapped_model():
    wrapped = nn.DataParallel(NeedsLengths())
    assert rbn.update_population_stats(wrapped, [(X, N, Y)]) == 1
    assert rbn.update_population_stats(wrapped, [{"x": X, "lengths": N, "labels": Y}]) == 1
    found = wrapped.module.layer.stats_h_l0.mean
    torch.testing.assert_close(found, expected(wrapped.module, N)["stats_h_l0.mean"], **EXACT)


def test_a_packed_sequence_is_an_input():
    packed = nn.utils.rnn.pack_padded_sequence(X, N, batch_first=True, enforce_sorted=False)
    layer = rbn.BatchNormLSTM(3, 4, batch_first=True)
    for batch in (packed, (packed, Y)):
        assert rbn.update_population_stats(layer, [batch], device="cpu") == 1
    other = copy.deepcopy(layer)
    rbn.update_population_stats(other, [{"input": X, "lengths": N}])
    torch.testing.assert_close(layer.stats_h_l0.mean, other.stats_h_l0.mean, **EXACT)


@pytest.mark.parametrize(
    ("model", "batch", "names"),
    [
        (Model, (X, N, Y), ["3", "lengths", "forward="]),
        (Model, {"input": X, "target": Y}, ["'x'", "input", "target"]),
        (Model, {}, ["'x'"]),
        (NeedsLengths, (X,), ["'lengths'", "1"]),
        (NeedsLengths, {"x": X}, ["'lengths'"]),
        (Model, None, ["NoneType"]),
        (Model, "text", ["str"]),
        (Model, 3.0, ["float"]),
    ],
)
def test_errors_name_what_they_got(model, batch, names):
    model = model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError) as error:
        rbn.update_population_stats(model, [batch])
    assert all(name in str(error.value) for name in names), error.value
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class Recorded:
    """Stands in for a tensor; remembers where it was moved."""

    def __init__(self):
        self.device = None

    def to(self, device):
        moved = Recorded()
        moved.device = device
        return moved


def test_tensors_at_any_depth_are_moved():
    model = Model()
    moved = []
    leaf = Recorded

    def run(x, lengths=None, labels=None):
        moved.extend((x, lengths, labels))
        return model.layer(X)

    model.forward = run
    batch = {"x": [leaf(), (leaf(), "text", 3)], "lengths": {"a": leaf()}, "labels": None}
    rbn.update_population_stats(model, [batch], device="meta")
    x, lengths, labels = moved
    assert isinstance(x, list)
    assert isinstance(x[1], tuple)
    assert {x[0].device, x[1][0].device, lengths["a"].device} == {"meta"}
    assert x[1][1:] == ("text", 3)
    assert labels is None


class Required(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths):
        return self.layer(x, lengths=lengths)


def test_integers_that_may_be_lengths_are_refused():
    """If taken for targets, padding would enter the statistics of a model trained with lengths."""
    layer, x, lengths = rbn.BatchNormLSTM(3, 4), torch.randn(5, 6, 3), [5, 4, 3, 5, 2, 1]
    layer(x)
    rbn.update_population_stats(layer, [(x, torch.tensor(lengths))])  # never trained with lengths
    layer.train()
    layer(x, lengths=lengths)
    for given in (lengths, torch.tensor(lengths)):
        with pytest.raises(TypeError, match="lengths"):
            rbn.update_population_stats(layer, [(x, given)])
    rbn.update_population_stats(layer, [(x, torch.randn(6))])
    rbn.update_population_stats(layer, [{"input": x, "lengths": torch.tensor(lengths)}])
    wrapped = Required(layer)
    rbn.update_population_stats(wrapped, [(x, torch.tensor(lengths), torch.arange(6))])
