"""Population statistics against averages computed by hand."""

import copy

import pytest
import torch

import rbn
from rbn import batch_statistics, update_population_stats

LAYERS = [rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
EXACT = {"rtol": 1e-5, "atol": 1e-7}  # float32 averages in another order
ZERO = 1e-5 * 2**-22  # variances come from 1 / sqrt(var + eps) rounded to float32, eps = 1e-5


def named_statistics(layer):
    return [(n, m) for n, m in layer.named_children() if n.startswith("stats_")]


def minibatch_statistics(layer, x, **options):
    """The statistics of one training call, read from a layer that has seen nothing else."""
    probe = type(layer)(layer.input_size, layer.hidden_size, momentum=None, **options)
    probe.load_state_dict(layer.state_dict())
    for statistics in probe._all_statistics():
        statistics.reset()
    probe(x)
    return {name: (s.mean.clone(), s.var.clone()) for name, s in named_statistics(probe)}


@pytest.mark.parametrize("layer_class", LAYERS)
def test_statistics_of_the_first_step_by_hand(layer_class):
    layer = layer_class(3, 4)
    x = torch.randn(5, 6, 3)
    layer(x)
    wx = x @ layer.weight_ih_l0.T
    torch.testing.assert_close(layer.stats_x_l0.mean, wx.mean(1), **EXACT)
    torch.testing.assert_close(layer.stats_x_l0.var, wx.var(1, correction=0), **EXACT)
    assert torch.equal(layer.stats_h_l0.mean[0], layer.weight_hh_l0 @ layer.h0_l0)
    assert layer.stats_h_l0.var[0].max() <= ZERO


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0, 0.0, None])
def test_running_average_by_hand(layer_class, momentum):
    layer = layer_class(3, 4, momentum=momentum)
    batches = [torch.randn(5, 6, 3) for _ in range(4)]
    estimates = [minibatch_statistics(layer, x) for x in batches]
    for x in batches:
        layer(x)
    for name, statistics in named_statistics(layer):
        for k, buffer in enumerate((statistics.mean, statistics.var)):
            series = [e[name][k] for e in estimates]
            expected = series[0]  # the first estimate has weight 1
            for n, value in enumerate(series[1:], start=2):
                weight = 1 / n if momentum is None else momentum
                expected = (1 - weight) * expected + weight * value
            torch.testing.assert_close(buffer, expected, **EXACT)
        assert statistics.count.tolist() == [4] * 5


@pytest.mark.parametrize("layer_class", LAYERS)
def test_update_population_stats_is_the_plain_average(layer_class):
    layer = layer_class(3, 4, momentum=0.1)
    batches = [torch.randn(5, b, 3) for b in (6, 4, 9)]
    layer(torch.randn(5, 6, 3) + 7)  # statistics that are discarded later
    estimates = [minibatch_statistics(layer, x) for x in batches]
    assert update_population_stats(layer, batches) == 3
    for name, statistics in named_statistics(layer):
        for k, buffer in enumerate((statistics.mean, statistics.var)):
            expected = torch.stack([e[name][k].double() for e in estimates]).mean(0).float()
            torch.testing.assert_close(buffer, expected, **EXACT)
        assert statistics.momentum == 0.1
        assert statistics.count.tolist() == [3] * 5


def test_update_population_stats_leaves_everything_else_alone():
    layer = rbn.BatchNormLSTM(
        3, 4, 2, dropout=0.5, zoneout=(0.3, 0.2), hidden_noise=0.1, weight_dropout=0.4
    )
    model = torch.nn.Sequential(torch.nn.Dropout(), layer).eval()
    layer.train()
    modes = [m.training for m in model.modules()]
    parameters = [p.detach().clone() for p in model.parameters()]
    random_state = torch.get_rng_state()
    update_population_stats(model, [(torch.randn(5, 6, 3), "label")])
    drawn = torch.randn(30)  # random numbers after the line above
    torch.set_rng_state(random_state)
    torch.randn(5, 6, 3)
    assert torch.equal(torch.randn(30), drawn)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_update_population_stats_takes_any_call():
    layer = rbn.BatchNormLSTM(3, 4)
    batches = [{"x": torch.randn(5, 6, 3), "n": torch.tensor([5, 2, 1, 3, 5, 2])}] * 2
    update_population_stats(layer, batches, forward=lambda m, b: m(b["x"], lengths=b["n"]))
    assert layer.stats_h_l0.count.tolist() == [2] * 5
    update_population_stats(layer, iter([torch.randn(7, 6, 3)]), device="cpu")
    assert layer.stats_h_l0.count.tolist() == [1] * 7
    packed = torch.nn.utils.rnn.pack_sequence([torch.randn(n, 3) for n in (4, 4, 2)])
    update_population_stats(layer, [packed])
    assert layer.stats_h_l0.count.tolist() == [1] * 4 + [0] * 3


def test_update_population_stats_without_noise_matches_the_evaluated_model():
    """train_mode=False: with one batch, evaluation repeats the estimate's own forward pass."""
    layer = rbn.BatchNormLSTM(
        3, 4, 2, dropout=0.5, zoneout=(0.3, 0.2), hidden_noise=0.1, weight_dropout=0.4
    )
    x = torch.randn(5, 6, 3)
    update_population_stats(layer, [x], train_mode=False)
    layer.eval()
    with batch_statistics(layer):
        expected, _ = layer(x)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_a_failed_update_changes_nothing():
    layer = rbn.BatchNormLSTM(3, 4)
    layer(torch.randn(5, 6, 3))
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match="Expected 3, got 2"):
        update_population_stats(layer, [torch.randn(9, 6, 3), torch.randn(9, 6, 2)])
    with pytest.raises(ValueError, match="batches is empty"):
        update_population_stats(layer, [])
    after = layer.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert layer.training
    assert layer.stats_h_l0.momentum == 0.1
    assert layer.stats_h_l0.forced is None


def test_nothing_to_update_is_no_error():
    assert update_population_stats(rbn.LSTM(3, 4), [torch.randn(5, 6, 3)]) == 0


def test_progress_on_request(capsys):
    pytest.importorskip("rich")
    update_population_stats(rbn.BatchNormLSTM(3, 4), [torch.randn(5, 6, 3)] * 3, progress=True)
    shown = capsys.readouterr()
    assert "population statistics" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("layer_class", LAYERS)
def test_evaluation_of_one_sequence_without_statistics_is_refused(layer_class):
    layer = layer_class(3, 4).eval()
    with pytest.raises(RuntimeError, match="update_population_stats"):
        layer(torch.randn(5, 1, 3))
    layer.train()(torch.randn(5, 6, 3))
    layer.eval()(torch.randn(5, 1, 3))
    layer.reset_parameters()
    with pytest.raises(RuntimeError, match="no population statistics"):
        layer(torch.randn(5, 1, 3))


@pytest.mark.parametrize("layer_class", LAYERS)
def test_evaluation_does_not_depend_on_the_batch(layer_class):
    layer = layer_class(3, 4)
    layer(torch.randn(5, 6, 3))
    layer.eval()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    x = torch.randn(5, 6, 3)
    together, _ = layer(x)
    alone = torch.cat([layer(x[:, k : k + 1])[0] for k in range(6)], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(layer.state_dict()[k], v) for k, v in before.items())


@pytest.mark.parametrize("layer_class", LAYERS)
def test_steps_beyond_the_last_use_its_statistics(layer_class):
    layer = layer_class(3, 4)
    layer(torch.randn(5, 6, 3))
    longer = layer_class(3, 4)
    longer.load_state_dict(layer.state_dict())
    for s in longer._all_statistics():
        s.grow(9)
        for buffer in (s.mean, s.var, s.count):
            buffer[5:] = buffer[4]
    x = torch.randn(9, 6, 3)
    assert torch.equal(layer.eval()(x)[0], longer.eval()(x)[0])


@pytest.mark.parametrize("layer_class", LAYERS)
def test_sequencewise_input_statistics_by_hand(layer_class):
    layer = layer_class(3, 4, input_stats="sequence")
    x, lengths = torch.randn(5, 4, 3), torch.tensor([5, 2, 3, 1])
    layer(x, lengths=lengths)
    rows = torch.cat([x[:n, b] for b, n in enumerate(lengths)]) @ layer.weight_ih_l0.T
    torch.testing.assert_close(layer.stats_x_l0.mean, rows.mean(0, True), **EXACT)
    expected = rows.var(0, correction=0, keepdim=True)
    torch.testing.assert_close(layer.stats_x_l0.var, expected, **EXACT)
    assert layer.stats_h_l0.mean.shape[0] == 5
    layer.eval()(torch.randn(7, 2, 3))


def test_shared_statistics_are_the_average_over_time():
    layer = rbn.BatchNormLSTM(3, 4, ablations=["shared_stats"], refresh_stats=False)
    layer(torch.randn(5, 6, 3), lengths=[4, 2, 4, 3, 1, 2])
    mean, var = layer.stats_h_l0.read(0, 5)
    torch.testing.assert_close(mean, layer.stats_h_l0.mean[:4].mean(0, True), **EXACT)
    torch.testing.assert_close(var, layer.stats_h_l0.var[:4].mean(0, True), **EXACT)
    plain = rbn.BatchNormLSTM(3, 4)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 6, 3)
    assert not torch.allclose(layer.eval()(x)[0], plain.eval()(x)[0])


def test_batch_statistics_in_evaluation():
    layer = rbn.BatchNormLSTM(3, 4, 2, dropout=0.5)
    x = torch.randn(5, 6, 3)
    layer.eval()
    with batch_statistics(layer):
        a, _ = layer(x)
        b, _ = layer(x)
    assert torch.equal(a, b)  # without dropout
    assert not layer.stats_h_l0.estimated
    with batch_statistics(torch.nn.ModuleList([layer.train()])):
        layer(x)
    assert not layer.stats_h_l0.estimated
    layer(x)
    assert layer.stats_h_l0.estimated
    with pytest.raises(KeyError), batch_statistics(layer):
        raise KeyError
    assert layer.stats_h_l0.forced is None


def test_nan_shows_and_is_not_averaged_away():
    layer = rbn.BatchNormLSTM(3, 4)
    x = torch.randn(5, 6, 3)
    layer(x)
    bad = x.clone()
    bad[2, 1, 0] = float("nan")
    y, _ = layer.eval()(bad)
    assert y[2:, 1].isnan().all()
    assert y[:2].isfinite().all()
    assert y[:, [0, 2, 3, 4, 5]].isfinite().all()
    y, _ = layer.train()(bad)
    assert y[2:].isnan().all()
    assert layer.stats_x_l0.mean[2].isnan().any()
    bad[2, 1, 0] = float("inf")
    y, _ = layer(bad)
    assert y[2:].isnan().all()


def test_a_sequence_in_pieces_is_the_sequence():
    layer = rbn.BatchNormLSTM(3, 4, 2)
    x = torch.randn(9, 6, 3)
    layer(x[:6])
    layer.eval()
    whole, states = layer(x)
    pieces, hx = [], None
    for start, stop in ((0, 2), (2, 3), (3, 7), (7, 9)):
        y, hx = layer(x[start:stop], hx, start=start)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(hx, states, rtol=1e-6, atol=1e-7)


def test_frozen_parts_stay_frozen_in_a_model_that_is_trained():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.BatchNorm1d(3)
            self.dropout = torch.nn.Dropout()
            self.recurrent = rbn.BatchNormLSTM(3, 4)

        def forward(self, x):
            encoded = self.encoder(x.flatten(0, 1)).view_as(x)
            modes.append((self.encoder.training, self.dropout.training))
            return self.recurrent(self.dropout(encoded))[0]

    model, modes = Model(), []
    model.encoder.eval()
    batches = [torch.randn(5, 6, 3) * 3 + 2]
    rbn.update_population_stats(model, batches)
    assert modes == [(False, True)]
    assert torch.equal(model.encoder.running_var, torch.ones(3))
    rbn.update_population_stats(model, batches, train_mode=False)
    rbn.update_population_stats(model.eval(), batches)  # nothing in the model says what is frozen
    assert modes[1:] == [(False, False), (True, True)]
    assert not any(module.training for module in model.modules())


class Parts(torch.nn.Module):
    """A layer that may be frozen, one after it, and one that no call of the model reaches."""

    def __init__(self):
        super().__init__()
        self.first, self.second = rbn.BatchNormLSTM(3, 4), rbn.BatchNormLSTM(4, 2)
        self.unused = rbn.BatchNormLSTM(3, 2)

    def forward(self, x):
        return self.second(self.first(x)[0])[0]


@pytest.mark.parametrize("train_mode", [True, False])
def test_frozen_layers_keep_and_use_their_statistics(train_mode):
    model, x = Parts(), torch.randn(5, 6, 3)
    model(x)
    model.first.eval()
    kept = {k: v.clone() for k, v in model.first.state_dict().items()}
    batches = [3 * torch.randn(5, 6, 3) + 2 for _ in range(3)]
    rbn.update_population_stats(model, batches, train_mode=train_mode)
    for name, value in model.first.state_dict().items():
        assert torch.equal(value, kept[name]), name
    second = rbn.BatchNormLSTM(4, 2)
    second.load_state_dict(
        {k: v for k, v in model.second.state_dict().items() if "stats" not in k}, strict=False
    )
    with torch.no_grad():
        rbn.update_population_stats(second, [model.first(batch)[0] for batch in batches])
    for name, value in second.state_dict().items():
        torch.testing.assert_close(model.second.state_dict()[name], value)
    assert not model.first.training
    assert model.second.training
    model.second.eval(), model.unused.eval()
    with pytest.raises(ValueError, match="frozen"):
        rbn.update_population_stats(model, batches)
    assert rbn.update_population_stats(model.eval(), batches) == 3


def test_layers_that_no_batch_reaches_keep_their_statistics():
    model, x = Parts(), torch.randn(5, 6, 3)
    model.unused(x)
    kept = {k: v.clone() for k, v in model.unused.state_dict().items()}
    rbn.update_population_stats(model, [x])
    for name, value in model.unused.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert model.unused.eval()(x)[0].isfinite().all()
    assert model.first.stats_x_l0.count.tolist() == [1] * 5


def test_batches_that_are_none():
    layer = rbn.BatchNormLSTM(3, 4)
    with pytest.raises(ValueError, match="empty tuple or list"):
        rbn.update_population_stats(layer, [()])
    with pytest.raises(TypeError, match=r"object.*forward="):
        rbn.update_population_stats(layer, [object()], device="cpu")


def test_a_loaded_state_without_estimates_takes_the_first_minibatch_as_it_is():
    layer = rbn.BatchNormLSTM(3, 4, max_length=5)
    empty = {name: value.clone() for name, value in layer.state_dict().items()}
    for _ in range(3):
        layer(torch.randn(5, 6, 3))
    twin = rbn.BatchNormLSTM(3, 4, max_length=5)
    twin.load_state_dict(empty)
    x = torch.randn(5, 6, 3)
    layer.load_state_dict(empty)
    layer(x)
    twin(x)
    assert torch.equal(layer.stats_h_l0.mean, twin.stats_h_l0.mean)
    assert torch.equal(layer.stats_h_l0.var, twin.stats_h_l0.var)


def test_shorter_sequences_in_a_new_estimate_leave_later_steps_unseen():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 4)
    layer(torch.randn(6, 5, 3))
    rbn.update_population_stats(layer, [torch.randn(4, 5, 3)])
    x = torch.randn(6, 5, 3)
    estimates = minibatch_statistics(layer, x)
    layer(x)
    for name, statistics in named_statistics(layer):
        # The first estimate of steps 4 and 5 has weight 1; it is not averaged with zeros.
        torch.testing.assert_close(statistics.var[4:], estimates[name][1][4:], **EXACT)


def test_training_between_an_evaluation_and_its_backward_pass():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 4)
    x = torch.randn(6, 5, 3)
    layer(x)
    layer.eval()
    layer(x)[0].sum().backward()
    expected = layer.weight_hh_l0.grad.clone()
    layer.zero_grad()
    output, _ = layer(x)
    layer.train()(x)
    output.sum().backward()
    torch.testing.assert_close(layer.weight_hh_l0.grad, expected)


def test_statistics_estimated_in_inference_mode_can_be_trained_on():
    layer, x = rbn.BatchNormLSTM(3, 4), torch.randn(5, 4, 3)
    with torch.inference_mode():
        layer(x)
    layer(torch.randn(7, 4, 3))
    with torch.inference_mode():
        rbn.update_population_stats(layer, [x, x])
    layer(x)[0].sum().backward()
    assert layer.stats_x_l0.count.tolist() == [3] * 5 + [0] * 2
    assert not layer.stats_x_l0.mean.is_inference()


def test_a_copy_made_inside_batch_statistics_is_a_layer_like_any_other(tmp_path):
    layer, x = rbn.BatchNormLSTM(3, 4), torch.randn(5, 4, 3)
    layer(x)
    with rbn.batch_statistics(layer):
        best = copy.deepcopy(layer)
        torch.save(layer, tmp_path / "layer.pt")
    saved = torch.load(tmp_path / "layer.pt", weights_only=False)
    for each in (best, saved):
        each.eval()
        torch.testing.assert_close(each(x)[0][:, :2], each(x[:, :2])[0])
        assert all(s.forced is None for s in each._all_statistics())


def test_statistics_that_someone_else_has_put_there_are_found():
    """E.g. averages over models, or a call with another model's buffers."""
    layer, x = rbn.BatchNormLSTM(3, 4, max_length=6), torch.randn(6, 5, 3)
    average = torch.optim.swa_utils.AveragedModel(layer)
    layer(x)
    average.update_parameters(layer)
    expected = layer.eval()(x)[0]
    torch.testing.assert_close(average.eval()(x)[0], expected)
    fresh = rbn.BatchNormLSTM(3, 4, max_length=6).eval()
    values = dict(layer.named_parameters()) | dict(layer.named_buffers())
    torch.testing.assert_close(torch.func.functional_call(fresh, values, (x,))[0], expected)


def test_momentum_can_be_changed():
    layer, x = rbn.BatchNormLSTM(3, 4, refresh_stats=False), torch.randn(5, 4, 3)
    layer(x)
    layer.momentum = 1.0
    layer(2 * x)
    with rbn.batch_statistics(layer):
        expected = layer(2 * x)[0]
    torch.testing.assert_close(layer.eval()(2 * x)[0], expected)
    with pytest.raises(ValueError, match="momentum"):
        layer.momentum = 2.0


def test_statistics_have_the_default_type_where_that_is_wide():
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            torch.set_default_dtype(dtype)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            assert rbn.BatchNormLSTM(3, 4).stats_h_l0.mean.dtype == wide
    finally:
        torch.set_default_dtype(before)
