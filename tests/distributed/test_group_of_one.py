"""A group of one process: nothing to exchange, and nothing may change."""

import pytest
import torch
import torch.distributed as dist
from recurrence_cases import (
    GRADIENT_TOLERANCE,
    RESULT_TOLERANCE,
    assert_same,
    constant_beginning,
    differentiate,
    make_case,
)

import rbn
from rbn.nn import processes


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "case",
    [
        make_case("bn_lstm", 4, 5, 3, lengths="random"),
        make_case("bn_lstm", 4, 5, 3, input_stats="sequence", absent=("gamma_c",)),
        make_case("bn_rnn", 4, 5, 3, zoneout=(0.0, "mask")),
        make_case("bn_gru", 4, 5, 3, lengths="random"),
        constant_beginning("bn_lstm", 2, 4, 5, 3),
        make_case("bn_lstm", 3, 4, 2, population=3),
    ],
    ids=["lengths", "sequence", "simple", "gru", "rows alike", "population"],
)
def test_the_recurrences(case, group):
    results, gradients = differentiate(case, "reference")
    found, grads = differentiate(case.with_options(group=group))
    assert_same(found, results, RESULT_TOLERANCE)
    assert_same(grads, gradients, GRADIENT_TOLERANCE)


def test_layers_and_statistics(group):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 4, sync_stats=True)
    batches = [torch.randn(length, 6, 3) for length in (5, 3)]
    assert rbn.update_population_stats(layer, batches) == 2
    assert layer.stats_h_l0.group is None  # a single process uses the fast path
    before = {name: value.clone() for name, value in layer.named_buffers()}
    rbn.average_population_stats(layer)
    statistics = [layer.stats_h_l0, layer.stats_c_l0]
    for spread in (False, True):
        processes.average(statistics, group, spread)
    assert all(torch.equal(value, before[name]) for name, value in layer.named_buffers())
    assert list(processes.as_many_on_all("abc", group, torch.device("cpu"))) == ["a", "b", "c"]
