"""Batches of more than 64 rows in the grid kernels, on a GPU: splits of 64 and 128 rows."""

import copy
import math

import pytest
import torch
from cuda_cases import OPTIONS, UNITS, compare, needs_hopper, on_a_card, same_bits
from recurrence_cases import (
    assert_same,
    call,
    calm,
    differentiate,
    fresh_seed,
    make_case,
    poisoned_memory,
)

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.term import Term

pytestmark = [*on_a_card, needs_hopper]


@pytest.fixture
def launched(record_runs):
    """Directions and splits of the grid kernels that ran."""
    return record_runs(
        "grid", lambda direction, call: (direction, call.plan.tilings[direction].splits)
    )


@pytest.fixture(params=[64, 128])
def rows(request, monkeypatch):
    """Splits of 128 rows, which otherwise do not run if there is room for splits of 64 rows."""
    monkeypatch.setattr(grid_kernels, "SPLIT_ROWS", (request.param,))
    return request.param


@pytest.fixture
def of_128(monkeypatch):
    monkeypatch.setattr(grid_kernels, "SPLIT_ROWS", (128,))


def both(splits):
    return [("forward", splits), ("backward", splits)]


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("op", ["bn_lstm", "lstm"])
@pytest.mark.parametrize(
    ("batch", "hidden", "splits"),
    [
        (65, 136, 2),  # of 64 rows
        (128, 264, 2),
        (100, 1000, 2),
        (128, 1200, 1),  # there is no room for more
        (129, 20, 3),
        (200, 60, 4),
        (512, 100, 8),
        (513, 100, 5),  # of 128
        (192, 512, 3),
    ],
)
def test_split_batches_against_the_reference(op, batch, hidden, splits, dtype, launched):
    compare(op, (3, batch, hidden), dtype, {})
    assert launched == both(splits)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("op", ["bn_lstm", "lstm"])
def test_directions_split_differently(op, dtype, launched):
    """Backward there is room for fewer blocks, because they are complete teams."""
    compare(op, (3, 256, 480), dtype, {})
    assert launched == [("forward", 4), ("backward", 2)]


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("op", ["bn_lstm", "lstm"])
@pytest.mark.usefixtures("of_128")
@pytest.mark.parametrize(
    ("batch", "hidden", "splits"),
    [
        (129, 20, 2),  # one row more than fits into a block
        (200, 60, 2),
        (256, 100, 2),
        (300, 52, 3),
        (512, 60, 4),
        (600, 20, 5),
        (1024, 60, 8),
        (192, 512, 2),
    ],
)
def test_splits_of_128_rows_against_the_reference(op, batch, hidden, splits, dtype, launched):
    compare(op, (3, batch, hidden), dtype, {})
    assert launched == both(splits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_split_batches(name, dtype, rows, launched):
    compare("bn_lstm", (4, 200, 52), dtype, OPTIONS[name])
    assert launched == both(-(-200 // rows))


ZONEOUT = {
    "masks": {"zoneout": ("mask", "mask")},
    "rates, lengths": {"zoneout": (0.5, 0.05), "lengths": "random"},
    "both kinds, population": {"zoneout": (0.3, "mask"), "population": 2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ZONEOUT)
def test_zoneout_of_split_batches(name, dtype, rows, launched):
    compare("bn_lstm", (4, 300, 36), dtype, ZONEOUT[name])
    assert launched == both(-(-300 // rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["bn_lstm", "lstm"])
def test_steps_at_which_some_splits_have_no_row(op, dtype, rows, launched):
    """First one, then the others, then all: a batch whose last step has no row at all."""
    for lengths in ([1] * 112 + [4] * 88, [4] * 112 + [2] * 88, [3] * 200):
        compare(op, (4, 200, 52), dtype, {"lengths": lengths})
    assert launched == both(-(-200 // rows)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("op", "shape"),
    [("bn_lstm", (9, 256, 256)), ("bn_lstm", (9, 300, 60)), ("lstm", (9, 500, 60))],
)
def test_split_batches_give_the_same_bits_every_time(op, shape, dtype, rows, launched):
    same_bits(make_case(op, *shape, dtype=dtype).on("cuda"), 20)
    assert len(launched) == 42


@pytest.fixture
def few_weights(monkeypatch):
    """Most weights of 488 units are read again in each step."""
    monkeypatch.setattr(grid_kernels, "shared_limit", lambda device: 66 * 1024)
    grid_kernels._choose.cache_clear()
    yield
    grid_kernels._choose.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("few_weights", "of_128")
def test_weights_of_split_batches_that_do_not_fit(dtype, launched):
    term = Term((5, 200, 4 * 488), dtype, torch.device("cuda", 0))
    assert all(grid_kernels.choose(direction, term).second for direction in ("forward", "backward"))
    compare("bn_lstm", (5, 200, 488), dtype, OPTIONS["lengths"])
    assert launched == both(2)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("block", [0, 3, 4, 7])
@pytest.mark.parametrize("op", ["bn_lstm", "lstm"])
@pytest.mark.usefixtures("of_128")
def test_a_block_of_one_split_may_be_late(op, block, place, monkeypatch, launched):
    defines, more = cuda_kernels.defines, (("LATE", 4 * block + place),)
    monkeypatch.setattr(cuda_kernels, "defines", lambda *args: defines(*args) + more)
    compare(op, (9, 200, 52), torch.bfloat16, {})
    assert launched == both(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer_class", [rbn.BatchNormLSTM, rbn.LSTM])
def test_two_directions_of_a_split_batch(layer_class, dtype, rows, launched):
    torch.manual_seed(0)
    layer = layer_class(20, 60, bidirectional=True).to("cuda", dtype)
    x = torch.randn(5, 300, 20, device="cuda", dtype=dtype)
    twin = copy.deepcopy(layer).double()
    found, expected = layer(x)[0], twin(x.double())[0]
    assert (found - expected).abs().max() <= 16 * UNITS[dtype]
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in twin.named_parameters():
        error = (layer.get_parameter(name).grad - parameter.grad).norm()
        assert error <= 16 * UNITS[dtype] * parameter.grad.norm().clamp(min=1), name
    assert {splits for _, splits in launched} == {-(-300 // rows)}


@pytest.mark.parametrize("op", ["bn_lstm", "lstm"])
def test_a_split_batch_in_inference(op, rows, launched):
    dtype = torch.bfloat16
    case = make_case(op, 5, 200, 60, fresh_seed(), dtype=dtype, **calm(op))
    with torch.no_grad(), poisoned_memory():
        found = call(case.on("cuda"), "gpu")
    assert_same(found, call(case.to(torch.float64), "reference"), 16 * UNITS[dtype])
    assert launched == both(-(-200 // rows))[:1]


def test_a_split_batch_in_a_cuda_graph(capture, rows, launched):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(20, 60).to("cuda", torch.bfloat16)
    x = torch.randn(5, 200, 20, device="cuda", dtype=torch.bfloat16)

    def step():
        output = layer(x)[0]
        grads = torch.autograd.grad(output.float().square().sum(), list(layer.parameters()))
        return [output.detach(), *grads]

    graph, found = capture(step)
    expected = [value.clone() for value in step()]
    for _ in range(2):
        for value in found:
            value.fill_(math.nan)
        graph.replay()
        assert torch.equal(found[0], expected[0])
        for value, want in zip(found, expected, strict=True):
            assert (value - want).norm() <= 8 * UNITS[torch.bfloat16] * want.norm()
    assert {splits for _, splits in launched} == {-(-200 // rows)}


def test_batches_that_find_no_room_run_other_kernels(launched):
    for batch, hidden in ((1025, 20), (1024, 512), (130, 22)):
        compare("bn_lstm", (3, batch, hidden), torch.bfloat16, {})
    assert not launched


def test_nothing_is_split_where_that_is_turned_off(monkeypatch, launched):
    monkeypatch.setattr(grid_kernels, "SPLITS", 1)
    case = make_case("bn_lstm", 3, 200, 60, fresh_seed(), dtype=torch.bfloat16, **calm("bn_lstm"))
    differentiate(case.on("cuda"), "gpu")
    assert not launched
