"""The kernels for wide layers, on a card: blocks of 128 and of 64 rows, zoneout."""

import copy

import pytest
import torch
from cuda_cases import HALVES, OPTIONS, UNITS, compare, needs_hopper, on_a_card, same_bits
from recurrence_cases import assert_same, call, calm, make_case, poisoned_memory

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu import cuda_lstm, wide_lstm

pytestmark = [*on_a_card, needs_hopper]


@pytest.fixture
def wide(monkeypatch, in_memory):
    """Small layers, too, run the kernels for wide ones."""
    monkeypatch.setattr(cuda_lstm, "_fits", lambda wx: False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 52)) for name in OPTIONS),
        *(("bn_lstm", "plain", shape) for shape in [(3, 128, 240), (1, 16, 8), (3, 65, 1000)]),
        *(("lstm", name, (5, 40, 24)) for name in ("plain", "lengths")),
    ],
)
@pytest.mark.usefixtures("wide")
def test_wide_layers_against_the_reference(op, name, shape, dtype, calls):
    compare(op, shape, dtype, OPTIONS[name])
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("dtype", HALVES)
def test_a_wide_layer(dtype, calls):
    compare("bn_lstm", (3, 128, 2000), dtype, {})
    assert calls == ["forward", "backward"]


def test_a_wide_layer_gives_the_same_bits_every_time(calls):
    same_bits(make_case("bn_lstm", 7, 128, 2000, dtype=torch.bfloat16).on("cuda"), 100)
    assert len(calls) == 202


@pytest.fixture
def rows_64(monkeypatch, wide):
    """Batches up to 64 rows, of any layer, run the kernels for wide ones with blocks of 64 rows."""
    monkeypatch.setattr(wide_lstm, "PREFERRED", {64: 1})


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 52)) for name in OPTIONS),
        *(("bn_lstm", "plain", shape) for shape in [(7, 64, 1000), (3, 64, 512), (1, 16, 8)]),
        *(("bn_lstm", "lengths", shape) for shape in [(5, 37, 1000), (4, 1, 2000)]),
        *(("lstm", name, (5, 40, 24)) for name in ("plain", "lengths")),
    ],
)
@pytest.mark.usefixtures("rows_64")
def test_blocks_of_64_rows_against_the_reference(op, name, shape, dtype, calls):
    compare(op, shape, dtype, OPTIONS[name])
    assert calls == ["forward", "backward"]


@pytest.fixture
def with_switch(monkeypatch):
    """What compiles the kernels with a name of trials from now on."""

    def switch(name, value):
        defines, more = cuda_lstm.defines, ((name, value),)
        monkeypatch.setattr(cuda_lstm, "defines", lambda *args: defines(*args) + more)

    return switch


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("block", [0, 3, 4, 7])
@pytest.mark.parametrize("batch", [17, 100])
@pytest.mark.usefixtures("rows_64")
def test_any_block_may_be_late(batch, block, place, with_switch, calls):
    """As when others use the card. Of 52 units four blocks have some, the team's others none."""
    with_switch("LATE", 4 * block + place)
    compare("bn_lstm", (9, batch, 52), torch.bfloat16, {})
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("batch", [100, 64])
@pytest.mark.usefixtures("rows_64")
def test_barriers_at_which_all_wait(batch, with_switch, few_weights):
    """They are for racecheck, and with weights that come again there are most of them."""
    with_switch("ALL_WAIT", 1)
    few_weights(8)
    compare("bn_lstm", (5, batch, 488), torch.bfloat16, OPTIONS["lengths"])


@pytest.mark.usefixtures("rows_64")
def test_two_recurrences_in_blocks_of_64_rows():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(20, 500, bidirectional=True).to("cuda", torch.bfloat16)
    x = torch.randn(5, 33, 20, device="cuda", dtype=torch.bfloat16)
    found = layer(x)[0]
    expected = copy.deepcopy(layer).double()(x.double())[0]
    assert (found - expected).abs().max() <= 16 * UNITS[torch.bfloat16]


@pytest.fixture
def few_weights(monkeypatch):
    """Makes most weights of 488 units be read again in each step, as in a layer of 2000 units."""
    limit = 62 * 1024

    def limited(team):
        teams = {"forward": (1,), "backward": (team,)}
        monkeypatch.setattr(wide_lstm, "TEAMS", teams)
        monkeypatch.setattr(wide_lstm, "shared_limit", lambda device: limit)
        wide_lstm._choose.cache_clear()
        for direction in teams:
            assert wide_lstm.cut_wide(direction, 488, *teams[direction], limit).second > 0

    yield limited
    wide_lstm._choose.cache_clear()


@pytest.mark.parametrize("batch", [100, 64])
@pytest.mark.parametrize("team", [8, 4])
@pytest.mark.usefixtures("rows_64")
def test_weights_that_do_not_fit(team, batch, calls, few_weights):
    few_weights(team)
    compare("bn_lstm", (5, batch, 488), torch.bfloat16, OPTIONS["lengths"])
    assert calls == ["forward", "backward"]


ZONEOUT = {
    "masks": {"zoneout": ("mask", "mask")},
    "a mask of the cell": {"zoneout": ("mask", 0.0)},
    "a mask of h": {"zoneout": (0.0, "mask")},
    "rates": {"zoneout": (0.5, 0.05)},
    "both kinds": {"zoneout": (0.3, "mask")},
    "masks, lengths": {"zoneout": ("mask", "mask"), "lengths": "random"},
    "rates, lengths": {"zoneout": (0.5, 0.05), "lengths": "random"},
    "rates, population": {"zoneout": (0.5, 0.05), "population": 2},
    "masks, raw output": {"zoneout": ("mask", "mask"), "absent": ("gamma_c", "bias")},
}


@pytest.fixture
def zoned(monkeypatch):
    """Zoned calls run the kernels for wide layers; how often they did."""
    found = []
    run = cuda_lstm._run_wide

    def counted(*args, **kwargs):
        found.append(args[0])
        run(*args, **kwargs)

    monkeypatch.setattr(cuda_lstm, "_run_wide", counted)
    return found


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("op", "name", "shape"),
    [
        *(("bn_lstm", name, (4, 17, 52)) for name in ZONEOUT),
        *(("bn_lstm", "masks", shape) for shape in [(4, 64, 1000), (3, 128, 264), (3, 1, 72)]),
        *(("bn_lstm", "masks, lengths", shape) for shape in [(5, 37, 1000), (3, 65, 300)]),
        *(("lstm", name, (5, 40, 24)) for name in ("masks", "rates", "masks, lengths")),
    ],
)
def test_zoneout_against_the_reference(op, name, shape, dtype, zoned):
    """Small layers, too: no other kernels in CUDA C++ have zoneout."""
    compare(op, shape, dtype, ZONEOUT[name])
    assert zoned == ["forward", "backward"]


@pytest.mark.parametrize("name", ["masks", "masks, lengths"])
@pytest.mark.parametrize("batch", [100, 64])
@pytest.mark.usefixtures("rows_64")
def test_zoneout_and_weights_that_do_not_fit(batch, name, few_weights, zoned):
    few_weights(8)
    compare("bn_lstm", (5, batch, 488), torch.bfloat16, ZONEOUT[name])
    assert zoned == ["forward", "backward"]


@pytest.mark.parametrize(("op", "name"), [("bn_lstm", "rates, population"), ("lstm", "rates")])
def test_zoneout_in_inference(op, name, zoned):
    dtype = torch.bfloat16
    case = make_case(op, 5, 64, 300, dtype=dtype, **calm(op), **ZONEOUT[name])
    with torch.no_grad(), poisoned_memory():
        found = call(case.on("cuda"), "gpu")
    assert_same(found, call(case.to(torch.float64), "reference"), 16 * UNITS[dtype])
    assert zoned == ["forward"]


@pytest.mark.parametrize("shape", [(7, 128, 2000), (9, 64, 1000)])
def test_zoned_layers_give_the_same_bits_every_time(shape, zoned):
    case = make_case("bn_lstm", *shape, dtype=torch.bfloat16, **ZONEOUT["masks"])
    same_bits(case.on("cuda"), 20)
    assert len(zoned) == 42


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_zoned_layer_in_inference(bidirectional, zoned):
    """Both directions at once, too."""
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(20, 500, zoneout=(0.5, 0.05), bidirectional=bidirectional)
    layer = layer.to("cuda", torch.bfloat16)
    x = torch.randn(5, 33, 20, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)  # for the population's statistics
        layer.eval()
        found = layer(x)[0]
        expected = copy.deepcopy(layer).double()(x.double())[0]
    assert (found - expected).abs().max() <= 16 * UNITS[torch.bfloat16]
    assert zoned == ["forward"] * 2
