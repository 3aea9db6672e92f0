"""Which steps and rows enter population statistics, and which steps were seen."""

import pytest
import torch

import rbn
from rbn import PopulationStatistics
from rbn.ops.few_rows import pooled

EXACT = {"rtol": 1e-5, "atol": 1e-7}  # float32 averages in another order
ZERO = 1e-5 * 2**-22  # variances come from 1 / sqrt(var + eps) rounded to float32, eps = 1e-5


def named_statistics(layer):
    return [(n, m) for n, m in layer.named_children() if n.startswith("stats_")]


def test_max_length_keeps_that_many_steps():
    layer = rbn.BatchNormLSTM(3, 4, max_length=3)
    assert layer.stats_h_l0.mean.shape == (3, 16)
    layer(torch.randn(2, 6, 3))
    assert layer.stats_h_l0.count.tolist() == [1, 1, 0]
    x = torch.randn(5, 6, 3)
    layer.eval()(x)  # step 2 falls back to step 1
    layer.train()(x)
    assert layer.stats_h_l0.mean.shape == (3, 16)
    assert layer.stats_h_l0.count.tolist() == [2, 2, 1]
    unlimited = rbn.BatchNormLSTM(3, 4)
    unlimited.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x)[0], unlimited.eval()(x)[0])


def test_a_step_counts_only_the_batches_that_reached_it():
    layer = rbn.BatchNormLSTM(3, 4, momentum=None)
    x, y = torch.randn(5, 6, 3), torch.randn(5, 6, 3)
    layer(x, lengths=[2, 1, 2, 2, 1, 2])
    layer(y, lengths=[4, 1, 2, 3, 4, 1])
    assert layer.stats_h_l0.count.tolist() == [2, 2, 1, 1, 0]
    wx, wy = x @ layer.weight_ih_l0.T, y @ layer.weight_ih_l0.T
    expected = (wx[1, [0, 2, 3, 5]].mean(0) + wy[1, [0, 2, 3, 4]].mean(0)) / 2
    torch.testing.assert_close(layer.stats_x_l0.mean[1], expected, **EXACT)
    torch.testing.assert_close(layer.stats_x_l0.mean[3], wy[3, [0, 4]].mean(0), **EXACT)
    variance = wy[3, [0, 4]].var(0, correction=0)
    torch.testing.assert_close(layer.stats_x_l0.var[3], variance, **EXACT)
    layer.eval()(torch.randn(8, 2, 3))  # the step that none reached uses the last one before it


def test_a_step_with_one_row_is_no_nan():
    layer = rbn.BatchNormLSTM(3, 4)
    y, _ = layer(torch.randn(5, 3, 3), lengths=[5, 2, 1])
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert layer.stats_c_l0.var[3].max() <= ZERO


def test_training_in_pieces_records_the_right_steps():
    layer = rbn.BatchNormLSTM(3, 4)
    x = torch.randn(6, 5, 3)
    _, hx = layer(x[:4])
    layer(x[4:], hx, start=4)
    whole = rbn.BatchNormLSTM(3, 4)
    whole.load_state_dict(layer.state_dict())
    for s in whole._all_statistics():
        s.reset()
    whole(x)
    for name, s in named_statistics(layer):
        torch.testing.assert_close(s.mean, whole.get_submodule(name).mean, **EXACT)
        torch.testing.assert_close(s.var, whole.get_submodule(name).var, **EXACT)


def test_steps_before_the_first_estimate_use_it():
    s = PopulationStatistics(2)
    s.update(torch.full((1, 2), 3.0), torch.full((1, 2), 4.0), start=2)
    mean, var = s.read(0, 4)
    assert mean.tolist() == [[3, 3]] * 3
    assert var.tolist() == [[4, 4]] * 3
    mean, _ = s.read(7, 4)
    assert mean.tolist() == [[3, 3]]
    s = PopulationStatistics(2, max_length=2)
    s.update(torch.ones(1, 2), torch.ones(1, 2), start=2)  # beyond max_length: not kept
    s.update(torch.ones(3, 2), torch.ones(3, 2), start=4)
    assert not s.estimated
    assert s.count.tolist() == [0, 0]


def test_evaluation_with_the_statistics_of_a_single_sequence_warns():
    layer = rbn.BatchNormLSTM(3, 4).eval()
    with rbn.batch_statistics(layer), pytest.warns(UserWarning, match="a batch of at least 2"):
        y, _ = layer(torch.randn(5, 1, 3))
    assert y.isfinite().all()
    layer.train()(torch.randn(5, 2, 3))
    layer.eval()(torch.randn(5, 1, 3))  # no warning: population statistics


def estimate(layer, *batches):
    """Population statistics of batches of ``(x, lengths)``, one of a single sequence among them."""
    with pytest.warns(UserWarning, match=r"single sequence.*population statistics"):
        rbn.update_population_stats(layer, batches, forward=lambda m, b: m(b[0], lengths=b[1]))
    return {name: value.clone() for name, value in layer.named_buffers()}


@pytest.mark.parametrize("lengths", [None, [4]])
@pytest.mark.parametrize("input_stats", ["step", "sequence"])
def test_a_batch_of_one_is_not_counted(input_stats, lengths):
    """But over its steps, the input term of a single sequence has a variance."""
    layer = rbn.BatchNormLSTM(3, 4, input_stats=input_stats)
    x = torch.randn(5, 6, 3)
    rbn.update_population_stats(layer, [x])
    before = {name: value.clone() for name, value in layer.named_buffers()}
    after = estimate(layer, (x, None), (x[:, :1], lengths))
    for name, value in after.items():
        counted = name.startswith("stats_x") and input_stats == "sequence"
        assert torch.equal(value, before[name]) is not counted, name


@pytest.mark.parametrize("start", [0, 2, 9])
def test_what_is_read_is_the_same_whether_the_host_knows_of_it_or_not(start):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 4)
    layer(torch.randn(6, 5, 3))
    statistics = layer.stats_h_l0
    with torch.no_grad():
        known = statistics.read(start, 4)
        assert known[0].untyped_storage().data_ptr() == statistics.mean.untyped_storage().data_ptr()
        statistics.set_cached(True, 0)
        for one, other in zip(known, statistics.read(start, 4), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("counts", "seen"), [([2, 1, 3], 3), ([2, 0, 3], 1), ([0, 1, 1], 0)])
def test_loaded_counts_say_which_steps_were_seen(counts, seen):
    layer = rbn.BatchNormLSTM(3, 4, max_length=3)
    state = layer.state_dict()
    for name in ("x", "h", "c"):
        state[f"stats_{name}_l0.count"] = torch.tensor(counts)
    layer.load_state_dict(state)
    assert layer.stats_c_l0.known_steps == seen


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_step_that_one_sequence_reaches_has_no_variance_to_record(momentum):
    """In evaluation, such steps use the statistics of the last step before them."""
    layer = rbn.BatchNormLSTM(3, 4, momentum=momentum)
    for _ in range(3):
        layer(torch.randn(6, 3, 3), lengths=torch.tensor([6, 4, 2]))
    statistics = layer.stats_h_l0
    assert statistics.count.tolist() == [3] * 4 + [0] * 2
    mean, var = statistics.read(0, 8)
    torch.testing.assert_close(var[4:], var[3:4].expand_as(var[4:]), rtol=0, atol=0)
    torch.testing.assert_close(mean[4:], mean[3:4].expand_as(mean[4:]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("steps", "lengths", "padding", "counted"),
    [
        (1, None, "exclude", False),
        (1, [1], "include", False),
        (4, [1], "exclude", False),
        (4, [1], "include", True),
        (4, [2], "exclude", True),
        (4, None, "exclude", True),
    ],
)
def test_a_single_position_has_no_variance_to_record(steps, lengths, padding, counted):
    layer = rbn.BatchNormLSTM(3, 4, input_stats="sequence", padding=padding)
    x = torch.randn(6, 3, 3)
    rbn.update_population_stats(layer, [x])
    before = layer.stats_x_l0.var.clone()
    estimate(layer, (x, None), (torch.randn(steps, 1, 3), lengths))
    assert layer.stats_x_l0.count.tolist() == [1 + counted]
    assert torch.equal(layer.stats_x_l0.var, before) is not counted
    assert layer.stats_h_l0.count.tolist() == [1] * 6


def test_padded_rows_count_where_they_are_included():
    layer = rbn.BatchNormLSTM(3, 4, padding="include")
    layer(torch.randn(6, 3, 3), lengths=torch.tensor([6, 4, 2]))
    assert layer.stats_h_l0.count.tolist() == [1] * 6


def batch_with_an_outlier(seed):
    """Twelve sequences of 4 steps, but one of 9."""
    x = torch.randn(9, 12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return {"input": x, "lengths": [9] + [4] * 11}


def test_exact_statistics_of_late_steps_are_the_constants_of_training():
    layer = rbn.BatchNormLSTM(3, 4, dtype=torch.float64)
    batches = [batch_with_an_outlier(seed) for seed in range(16)]
    own = {"stats_h_l0": [], "stats_c_l0": [], "stats_x_l0": []}
    for batch in batches:
        rbn.update_population_stats(layer, [batch])
        for name, each in own.items():
            found = layer.get_submodule(name)
            assert found.count.tolist() == [1] * 4 + [0] * 5  # one sequence says nothing
            rows = torch.full((4,), 12)
            each.append(pooled(found.mean[:4].clone(), found.var[:4].clone(), rows, layer.eps))
    rbn.update_population_stats(layer, batches)
    for name, each in own.items():
        found = layer.get_submodule(name)
        assert found.count.tolist() == [16] * 9
        mean, var = (torch.cat(v).mean(0) for v in zip(*each, strict=True))
        for t in range(4, 9):
            torch.testing.assert_close(found.mean[t], mean)
            torch.testing.assert_close(found.var[t], var)


def test_exact_statistics_leave_out_steps_that_few_sequences_reach():
    layer = rbn.BatchNormLSTM(3, 4, dtype=torch.float64)
    batches = [batch_with_an_outlier(seed) for seed in range(15)]
    rbn.update_population_stats(layer, batches)
    late = layer.stats_h_l0
    assert late.count.tolist() == [15] * 4 + [0] * 5
    mean, var = late.read(0, 9)
    for t in range(4, 9):  # those of the closest earlier step
        assert torch.equal(mean[t], late.mean[3])
        assert torch.equal(var[t], late.var[3])


def test_a_feature_that_never_varied_has_no_variance_in_exact_statistics():
    layer = rbn.BatchNormLSTM(3, 4, dtype=torch.float64, hidden_noise=0)
    with torch.no_grad():
        layer.weight_hh_l0.zero_()  # W_h h is 0 in every row
    rbn.update_population_stats(layer, [batch_with_an_outlier(seed) for seed in range(16)])
    assert layer.stats_h_l0.count[8] == 16
    assert layer.stats_h_l0.var.le(ZERO).all()
