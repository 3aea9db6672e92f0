"""The host's side of the grid kernels: how wide layers are divided, and which are supported."""

import contextlib
import dataclasses
import types

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.cuda_kernels import CLUSTER, GRID, PORTABLE
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.plan import Plan
from rbn.ops.gpu.lstm.portable import portable_kernels
from rbn.ops.gpu.lstm.term import Term
from rbn.ops.gpu.runtime import driver, nvrtc, occupancy

HOST = torch.device("cpu")  # without cluster kernels


@pytest.mark.parametrize("limit", [110 * 1024, 227 * 1024])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("hidden", [4, 52, 240, 1060, 2000, 2112])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_cut_covers_the_weights_and_fits_the_card(direction, hidden, rows, limit):
    for team in grid_kernels.TEAMS[direction]:
        cut = grid_kernels.grid_tiling(direction, hidden, team, limit, rows)
        full = grid_kernels.grid_tiling(direction, hidden, team, limit, rows, half=False)
        assert full == (cut and dataclasses.replace(cut, half=False))
        if cut is None:  # not even if everything is read twice
            assert limit < 227 * 1024
            continue
        assert cut.shared <= limit
        assert cut.resident >= 3  # the second groups are prefetched while two of them are used
        assert cut.slice % 4 == 0  # two groups at a time, and parts of the same size
        assert cut.blocks % team == 0
        assert cut.blocks * grid_kernels.UNITS >= hidden
        assert cut.second <= cut.first  # there are as many slots as the first groups need
        pieces = -(-hidden // grid_kernels.UNITS) * (1 if direction == "forward" else 4)
        assert 2 * cut.slice * team >= pieces
        assert pieces * 16 * 2 * rows <= cut.passed
        assert (full.shared, full.spilled) == (cut.shared, cut.spilled)  # of 16 bits either way
        powers = -(-hidden // grid_kernels.UNITS) * rows // 16  # one per block and warp
        scaled = direction == "backward"
        assert full.passed >= cut.passed + (4 * powers if scaled else 0)
        assert scaled or full.passed == cut.passed


def test_text8_is_cut_as_planned():
    limit = 227 * 1024
    forward = grid_kernels.grid_tiling("forward", 2000, 1, limit)
    backward = grid_kernels.grid_tiling("backward", 2000, 8, limit)
    assert (forward.blocks, forward.first, forward.resident, forward.second) == (125, 9, 46, 9)
    assert (backward.blocks, backward.first, backward.resident, backward.second) == (128, 5, 22, 5)


@pytest.mark.usefixtures("hopper")
def test_which_layers_prefer_the_grid(monkeypatch):
    def kind(batch, hidden, recurrences=1, dtype=torch.bfloat16):
        term = Term((recurrences, 1, batch, 4 * hidden), dtype, HOST)
        rows = {cut.rows for d in grid_kernels.TEAMS if (cut := grid_kernels.choose(d, term))}
        assert len(rows) <= 1
        return (cuda_kernels.fastest(term), *rows)

    assert kind(64, 1000) == kind(64, 2000) == (GRID, 64)  # Penn Treebank's layer
    assert kind(128, 2000) == (GRID, 128)  # text8's
    assert kind(33, 264) == (GRID, 64)
    assert kind(65, 264) == kind(128, 136) == kind(128, 960) == (GRID, 64)  # two splits
    assert kind(128, 1024) == (GRID, 128)  # not enough room
    assert kind(32, 264) == kind(1, 1000) == (PORTABLE, 64)  # few rows
    assert kind(16, 1000) == kind(32, 512) == (GRID, 64)
    assert kind(15, 1000) == kind(31, 512) == kind(16, 768) == (PORTABLE, 64)
    assert kind(16, 768, dtype=torch.float32) == (GRID, 64)
    assert (
        kind(15, 768, dtype=torch.float32) == kind(31, 512, dtype=torch.float32) == (PORTABLE, 64)
    )
    assert kind(1, 2000) == (GRID, 64)  # no others have room
    assert kind(64, 240) == (PORTABLE, 128)
    assert kind(65, 132) == (PORTABLE, 64)
    monkeypatch.setattr(grid_kernels, "PREFERRED", {})
    assert kind(64, 1000) == (PORTABLE, 128)
    assert kind(64, 2000) == (GRID, 128)
    monkeypatch.setattr(grid_kernels, "PREFERRED", {64: 1000})
    assert kind(64, 1000) == kind(1, 2000) == (GRID, 64)
    assert kind(64, 1000, recurrences=2) == (GRID, 64)  # 128 blocks backward
    assert kind(64, 996) == kind(65, 1000) == (PORTABLE, 128)
    assert kind(65, 2000) == (GRID, 128)
    assert kind(64, 1002) == kind(64, 1002, dtype=torch.float32) == (PORTABLE,)
    assert kind(64, 1000, dtype=torch.float32) == (GRID, 64)
    assert kind(128, 2000, dtype=torch.float32) == (GRID, 128)
    with monkeypatch.context() as patch:
        patch.setattr(grid_kernels, "TYPES", grid_kernels.TYPES[1:])
        assert kind(64, 1000, dtype=torch.float32) == (PORTABLE,)
        assert kind(128, 2000, dtype=torch.float32) == (None,)
        assert kind(64, 1000) == (GRID, 64)
    term = Term((1, 1, 64, 4000), torch.bfloat16, HOST)
    cut = cuda_kernels.tiling_of("forward", term, cuda_kernels.fastest(term))
    assert isinstance(cut, grid_kernels.GridTiling)
    assert not cuda_kernels.polls(cut)
    monkeypatch.setattr(grid_kernels, "PREFERRED", {64: 1000, 128: 500})
    assert kind(64, 1000) == (GRID, 64)
    assert kind(65, 1000) == (GRID, 128)
    assert kind(64, 500) == (PORTABLE, 128)


def zoned_call(batch, hidden, dtype=torch.bfloat16, **options):
    """The inputs of kernel selection, for a call on a GPU: the input term and the options."""
    fields = dict.fromkeys(LSTM.tensors) | {"tf32": True} | options
    term = Term((5, batch, 4 * hidden), dtype, torch.device("cuda", 0))
    return term, LSTMArguments(**fields)


MASK = torch.zeros(5, 1, 1, dtype=torch.bool)

ZONEOUT = [{"mask_c": MASK}, {"mask_h": MASK}, {"rate_c": 0.5}, {"rate_h": 0.05}]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("zoneout", ZONEOUT)
def test_which_zoned_calls_run_on_the_grid(zoneout, monkeypatch):
    monkeypatch.setattr(grid_kernels.nvrtc, "supports", lambda device: True)
    monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *args: 13)

    def runs(*sizes, **options):
        term, a = zoned_call(*sizes, **zoneout | options)
        assert a.zoned
        return cuda_kernels.family(term, a) == GRID

    sizes = ((64, 1000), (128, 2000), (100, 100), (16, 512), (64, 240))
    # Also where small layers or few rows use other kernels without zoneout.
    assert all(runs(*size) for size in sizes)
    assert cuda_kernels.family(*zoned_call(100, 100)) == CLUSTER
    assert all(runs(*size, dtype=torch.float32) for size in sizes)
    assert not runs(64, 1000, dtype=torch.float64)
    assert not runs(64, 1000, dtype=torch.float32, tf32=False)
    assert runs(64, 1000, tf32=False)
    assert not runs(64, 1002)
    assert runs(129, 900)
    assert not runs(257, 900)
    assert not runs(64, 1000, pass_normalized_cell=True)
    assert not runs(64, 2400)


def test_which_layers_the_grid_takes(monkeypatch):
    """Hopper, a multiple of four units, and room for all blocks at once; no float64."""
    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(grid_kernels, "shared_limit", lambda device: 227 * 1024)
    monkeypatch.setattr(grid_kernels, "clusters", lambda size, device: 66)
    monkeypatch.setattr(grid_kernels.nvrtc, "version", lambda: (12, 3))

    def team(direction, recurrences=1, batch=128, hidden=2000, dtype=torch.bfloat16):
        term = Term((recurrences, 1, batch, 4 * hidden), dtype, HOST)
        grid_kernels._choose.cache_clear()
        cut = grid_kernels.choose(direction, term)
        grid_kernels._choose.cache_clear()
        return cut and cut.team

    assert team("forward") == 1
    assert team("backward") == 8
    # 8 would need 136 blocks
    assert team("backward", hidden=2112) == 4
    assert team("forward", dtype=torch.float32) == 1
    assert team("backward", dtype=torch.float32) == 8
    assert not team("forward", dtype=torch.float64)
    assert not team("forward", recurrences=2)
    assert not team("forward", hidden=1998)
    assert not team("forward", batch=129)
    card.multi_processor_count = 125
    assert team("forward") == 1
    card.multi_processor_count = 124
    assert not team("forward")
    card.multi_processor_count = 125
    with monkeypatch.context() as patch:
        patch.setattr(grid_kernels.nvrtc, "version", lambda: (11, 8))
        assert not team("forward")
    assert team("forward") == 1
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not team("forward")


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_blocks_look_at_begins_at_zero(direction, rows, half):
    """Pieces beyond the last unit, counters, and the sums, whose last bit marks their arrival."""
    team = grid_kernels.TEAMS[direction][0]
    cut = grid_kernels.grid_tiling(direction, 72, team, 227 * 1024, rows, half)
    sizes = grid_kernels.zeroed(cut, 2)
    pieces = sizes["passed"] // (2 * 2 * 2 * rows * 16)  # of two recurrences, for two steps
    assert pieces >= 5 * (4 if direction == "backward" else 1)  # by 5 blocks of 16 units
    if direction == "backward":  # 8 blocks; each gets 16 bytes per thread from 7 others
        powers = 0 if half else 2 * 8 * rows // 16  # of each block's warps
        assert sizes["handed"] == 2 * 8 * 7 * 2 * rows * 16 + 4 * powers
    assert set(sizes) == {"passed", "barriers", *(["handed"] if direction == "backward" else [])}
    assert all(size % 16 == 0 for size in sizes.values())


# Split batches ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hopper")
def test_which_batches_are_split(monkeypatch):
    """If the GPU has room for all clusters: 60 of 2 blocks, 30 of 4, 15 of 8."""

    def cuts(batch, hidden, recurrences=1, dtype=torch.bfloat16):
        term = Term((recurrences, 1, batch, 4 * hidden), dtype, HOST)
        found = [grid_kernels.choose(direction, term) for direction in ("forward", "backward")]
        assert (cuda_kernels.fastest(term) == GRID) == grid_kernels.fits(term) == all(found)
        return [(cut.splits, cut.rows, cut.blocks, cut.team) for cut in found if cut]

    monkeypatch.setattr(grid_kernels, "SPLIT_ROWS", (128,))
    monkeypatch.setattr(grid_kernels, "UNSPLIT", 128)
    assert cuts(129, 256) == cuts(256, 256) == [(2, 128, 16, 1), (2, 128, 16, 8)]
    assert cuts(257, 60, dtype=torch.float32) == [(3, 128, 4, 1), (3, 128, 8, 8)]
    assert cuts(512, 60, dtype=torch.float16) == [(4, 128, 4, 1), (4, 128, 8, 8)]
    assert cuts(1024, 60) == [(8, 128, 4, 1), (8, 128, 8, 8)]
    assert cuts(1025, 60) == []
    assert cuts(256, 60, dtype=torch.float64) == cuts(256, 62) == []
    assert cuts(256, 900) == [(2, 128, 57, 1), (2, 128, 60, 4)]  # teams of 8 would be 64 blocks
    assert cuts(256, 960) == [(2, 128, 60, 1), (2, 128, 60, 4)]
    assert cuts(256, 964) == []
    assert cuts(512, 256, recurrences=2) == []
    assert cuts(256, 256, recurrences=2) == [(2, 128, 16, 1), (2, 128, 16, 8)]
    with monkeypatch.context() as patch:
        patch.setattr(grid_kernels, "SPLITS", 1)
        assert cuts(129, 256) == []
        patch.setattr(grid_kernels, "SPLITS", 2)
        assert cuts(257, 256) == []
    monkeypatch.setattr(grid_kernels, "SPLIT_ROWS", (64, 128))
    assert cuts(129, 60) == [(3, 64, 4, 1), (3, 64, 8, 8)]
    assert cuts(512, 60) == [(8, 64, 4, 1), (8, 64, 8, 8)]
    assert cuts(513, 60) == [(5, 128, 4, 1), (5, 128, 8, 8)]
    assert cuts(256, 480) == [(4, 64, 30, 1), (2, 128, 32, 8)]  # backward 32 blocks or none
    assert cuts(128, 264) == [(1, 128, 17, 1), (1, 128, 24, 8)]
    monkeypatch.setattr(grid_kernels, "UNSPLIT", 64)
    assert cuts(65, 264) == [(2, 64, 17, 1), (2, 64, 24, 8)]
    assert cuts(128, 2000) == [(1, 128, 125, 1), (1, 128, 128, 8)]


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_splits_have_for_themselves(direction, splits):
    """Everything that blocks pass to each other, and memory for the sums they send."""
    team, limit = grid_kernels.TEAMS[direction][0], 227 * 1024
    one = grid_kernels.grid_tiling(direction, 200, team, limit)
    cut = grid_kernels.grid_tiling(direction, 200, team, limit, splits=splits)
    assert dataclasses.replace(cut, splits=1) == one
    sums = 128 + 32 if direction == "forward" else 3 * 64 + 32
    assert cut.shared == one.shared + 4 * 8 + 2 * splits * 4 * sums  # 4 barriers
    assert cut.shared % 16 == 0
    of_one, of_all = grid_kernels.zeroed(one, 3), grid_kernels.zeroed(cut, 3)
    assert of_all == {name: splits * size for name, size in of_one.items()}
    few = grid_kernels.grid_tiling(direction, 2000, team, limit, splits=splits)
    assert few.shared <= limit
    assert few.spilled == splits * few.blocks * (few.first + few.second) * few.group > 0


def test_how_many_clusters_the_card_has_room_for(drive, monkeypatch):
    """Queried with a kernel that takes one multiprocessor per block, and with its grid."""
    asked = []

    def most_clusters(count, function, config):
        given = config._obj
        asked.append((list(given.grid), list(given.attributes[0].value[:3]), given.count))
        assert (given.shared, list(given.block)) == (227 * 1024, [256, 1, 1])
        count._obj.value = 30
        return 0

    drive(cuOccupancyMaxActiveClusters=most_clusters)
    monkeypatch.setattr(driver, "shared_limit", lambda device: 227 * 1024)
    monkeypatch.setattr(nvrtc, "architecture_of", lambda device: "sm_90")
    monkeypatch.setattr(nvrtc, "compiled", lambda *args: b"")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    assert occupancy.clusters.__wrapped__(4, 0) == 30
    assert asked == [([1, 4, 1], [1, 4, 1], 1)]


def test_a_split_batch_is_launched_in_clusters_all_at_once(drive, monkeypatch):
    launched, named = [], []

    def launch(config, *rest):
        given = config._obj
        assert [a.id for a in given.attributes[:2]] == [driver._CLUSTER, driver._COOPERATIVE]
        dimensions = (list(a.value[:3]) for a in given.attributes[:2])
        launched.append((list(given.grid), *dimensions, given.count))
        return 0

    def clusters(count, *rest):
        count._obj.value = 66
        return 0

    drive(cuOccupancyMaxActiveClusters=clusters, cuLaunchKernelEx=launch)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(
        grid_kernels.nvrtc, "compiled", lambda name, defines, arch: named.append(defines) or b""
    )
    cut = grid_kernels.grid_tiling("forward", 52, 1, 227 * 1024, splits=2)
    kernel = grid_kernels.kernel.__wrapped__(cut, 0, (("H", 52),))
    assert named[0]["SPLITS"] == 2
    assert kernel.at_once == 132
    monkeypatch.setattr(grid_kernels, "kernel", lambda *sizes: kernel)
    term = Term((3, 1, 200, 4 * 52), torch.bfloat16, HOST)
    plan = types.SimpleNamespace(term=term, sizes=((3,), 3, 1, 200, 52), tilings={"forward": cut})
    plan.family = cuda_kernels.GRID
    found, grid = cuda_kernels._kernel_and_grid("forward", plan, ())
    found.launch(grid, b"")
    assert launched == [([4, 6, 1], [1, 2, 1], [1, 0, 0], 2)]
    plan.sizes = ((17,), 17, 1, 200, 52)  # 136 blocks
    with pytest.raises(RuntimeError, match="do not fit on the GPU"):
        cuda_kernels._kernel_and_grid("forward", plan, ())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("batch", "norm", "given", "together"),
    [
        (64, "none", False, True),
        (129, "none", False, False),
        (129, "batch", False, True),
        (129, "batch", True, False),
    ],
)
def test_splits_keep_step_where_they_have_sums_in_common(batch, norm, given, together, monkeypatch):
    monkeypatch.setattr(portable_kernels, "fits", lambda term: False)
    H = 12
    fields = dict.fromkeys(LSTM.tensors) | {"norm": norm, "save": True}
    fields["input"] = torch.empty(2, batch, 4 * H).bfloat16()
    fields["weight_hh"] = torch.empty(4 * H, H).bfloat16()
    fields |= dict.fromkeys(("h0", "c0"), torch.empty(H).bfloat16())
    if norm == "batch":
        fields |= dict.fromkeys(("gamma_x", "gamma_h"), torch.ones(4 * H))
        fields |= dict.fromkeys(("gamma_c", "beta_c"), torch.ones(H))
    if given:
        statistics = [torch.ones(1, 4 * H)] * 4 + [torch.ones(1, H)] * 2
        fields |= dict(zip(LSTM.moments, statistics, strict=True))
    term = Term((2, batch, 4 * H), torch.bfloat16, HOST)
    found = Plan(LSTMArguments(**fields), term, one_feature=False, family=GRID)
    assert {cut.splits for cut in found.tilings.values()} == {-(-batch // 64)}
    assert found.lockstep == together
