"""The host's side of the CUDA kernels for wide layers: how it is cut, and which they take."""

import dataclasses
import types

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu import cuda_lstm, signature, small_lstm, wide_lstm


@pytest.mark.parametrize("limit", [110 * 1024, 227 * 1024])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("hidden", [4, 52, 240, 1060, 2000, 2112])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wide_cut_covers_the_weights_and_fits_the_card(direction, hidden, rows, limit):
    for team in wide_lstm.TEAMS[direction]:
        cut = wide_lstm.cut_wide(direction, hidden, team, limit, rows)
        full = wide_lstm.cut_wide(direction, hidden, team, limit, rows, half=False)
        assert full == (cut and dataclasses.replace(cut, half=False))
        if cut is None:  # not even by reading everything twice
            assert limit < 227 * 1024
            continue
        assert cut.shared <= limit
        assert cut.resident >= 3  # the second groups are asked for while two of them are used
        assert cut.slice % 4 == 0  # two groups at a time, and parts of the same size
        assert cut.blocks % team == 0
        assert cut.blocks * wide_lstm.UNITS >= hidden
        assert cut.second <= cut.first  # the slots are as many as the first need
        pieces = -(-hidden // wide_lstm.UNITS) * (1 if direction == "forward" else 4)
        assert 2 * cut.slice * team >= pieces
        assert pieces * 16 * 2 * rows <= cut.passed
        assert (full.shared, full.spilled) == (cut.shared, cut.spilled)  # of 16 bits either way
        powers = -(-hidden // wide_lstm.UNITS) * rows // 16  # one for each block and warp
        scaled = direction == "backward"
        assert full.passed >= cut.passed + (4 * powers if scaled else 0)
        assert scaled or full.passed == cut.passed


def test_text8_is_cut_as_planned():
    limit = 227 * 1024
    forward = wide_lstm.cut_wide("forward", 2000, 1, limit)
    backward = wide_lstm.cut_wide("backward", 2000, 8, limit)
    assert (forward.blocks, forward.first, forward.resident, forward.second) == (125, 9, 46, 9)
    assert (backward.blocks, backward.first, backward.resident, backward.second) == (128, 5, 22, 5)


@pytest.mark.usefixtures("hopper")
def test_which_layers_are_preferably_wide(monkeypatch):
    monkeypatch.setattr(cuda_lstm, "_capable", lambda device: True)

    def kind(batch, hidden, recurrences=1, dtype=torch.bfloat16):
        wx = torch.empty(recurrences, 1, batch, 4 * hidden, dtype=dtype)
        rows = {cut.rows for d in wide_lstm.TEAMS if (cut := wide_lstm.choose(d, wx))}
        assert len(rows) <= 1
        return (cuda_lstm.kind(wx), *rows)

    assert kind(64, 1000) == kind(64, 2000) == ("wide", 64)  # Penn Treebank's layer
    assert kind(128, 2000) == ("wide", 128)  # text8's
    assert kind(33, 264) == ("wide", 64)
    assert kind(65, 264) == ("wide", 128)
    assert kind(32, 264) == kind(1, 1000) == ("units of 8", 64)  # few rows
    assert kind(1, 2000) == ("wide", 64)  # no other has room
    assert kind(64, 240) == ("units of 8", 128)
    monkeypatch.setattr(wide_lstm, "PREFERRED", {})
    assert kind(64, 1000) == ("units of 8", 128)
    assert kind(64, 2000) == ("wide", 128)
    monkeypatch.setattr(wide_lstm, "PREFERRED", {64: 1000})
    assert kind(64, 1000) == kind(1, 2000) == ("wide", 64)
    assert kind(64, 1000, recurrences=2) == ("wide", 64)  # 128 blocks backward
    assert kind(64, 996) == kind(65, 1000) == ("units of 8", 128)
    assert kind(65, 2000) == ("wide", 128)
    assert kind(64, 1002) == kind(64, 1002, dtype=torch.float32) == ("units of 8",)
    assert kind(64, 1000, dtype=torch.float32) == ("wide", 64)
    assert kind(128, 2000, dtype=torch.float32) == ("wide", 128)
    for name, value in (("tf32_allowed", lambda: False), ("TYPES", wide_lstm.TYPES[1:])):
        with monkeypatch.context() as patch:
            patch.setattr(wide_lstm, name, value)
            assert kind(64, 1000, dtype=torch.float32) == ("units of 8",)
            assert kind(128, 2000, dtype=torch.float32) == (None,)
            assert kind(64, 1000) == ("wide", 64)
    wx = torch.empty(1, 1, 64, 4000).bfloat16()
    cut = cuda_lstm.cut_of("forward", wx, cuda_lstm.family(wx))
    assert cuda_lstm.meeting(cut) == (False, False)
    monkeypatch.setattr(wide_lstm, "PREFERRED", {64: 1000, 128: 500})
    assert kind(64, 1000) == ("wide", 64)
    assert kind(64, 500) == kind(65, 1000) == ("wide", 128)


def zoned_call(batch, hidden, dtype=torch.bfloat16, **options):
    """What the choice of kernels looks at, of one that is on a card."""
    wx = types.SimpleNamespace(
        shape=(5, batch, 4 * hidden), dtype=dtype, is_cuda=True, device=torch.device("cuda", 0)
    )
    fields = dict.fromkeys(signature.Inputs._fields) | {"wx": wx, "population": [], "norm": "none"}
    return signature.Inputs(**fields | {"rate_c": 0.0, "rate_h": 0.0} | options)


MASK = torch.zeros(5, 1, 1, dtype=torch.bool)

ZONEOUT = [{"mask_c": MASK}, {"mask_h": MASK}, {"rate_c": 0.5}, {"rate_h": 0.05}]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("zoneout", ZONEOUT)
def test_which_zoned_calls_run_wide(zoneout, monkeypatch):
    monkeypatch.setattr(cuda_lstm, "_capable", lambda device: True)
    monkeypatch.setattr(small_lstm, "cluster_of", lambda *args: 13)

    def runs(*sizes, **options):
        a = zoned_call(*sizes, **zoneout | options)
        assert a.zoned
        assert cuda_lstm.family(a.wx, a.zoned) == "wide"
        return cuda_lstm.covers(a)

    sizes = ((64, 1000), (128, 2000), (100, 100), (16, 512), (64, 240))
    # Also where small layers or few rows have other kernels, without zoneout.
    assert all(runs(*size) for size in sizes)
    assert cuda_lstm.family(zoned_call(100, 100).wx) == "small"
    assert all(runs(*size, dtype=torch.float32) for size in sizes)
    assert not runs(64, 1000, dtype=torch.float64)
    for module in (wide_lstm, cuda_lstm):
        with monkeypatch.context() as patch:
            patch.setattr(module, "tf32_allowed", lambda: False)
            assert not runs(64, 1000, dtype=torch.float32)
            assert runs(64, 1000)
    assert not runs(64, 1002)
    assert not runs(129, 1000)
    assert not runs(64, 1000, pass_normalized_cell=True)
    assert not runs(64, 2400)


def test_which_layers_are_wide(monkeypatch):
    """Hopper, a multiple of four units, and room for all blocks at once; no float64."""
    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(wide_lstm, "shared_limit", lambda device: 227 * 1024)

    def team(direction, wx):
        wide_lstm._choose.cache_clear()
        cut = wide_lstm.choose(direction, wx)
        wide_lstm._choose.cache_clear()
        return cut and cut.team

    half = torch.empty(1, 1, 128, 8000, dtype=torch.bfloat16)
    assert team("forward", half) == 1
    assert team("backward", half) == 8
    # 8 would need 136 blocks
    assert team("backward", half.new_empty(1, 1, 128, 4 * 2112)) == 4
    assert team("forward", half.float()) == 1
    assert team("backward", half.float()) == 8
    assert not team("forward", half.double())
    assert not team("forward", half.expand(2, 1, 128, 8000))
    assert not team("forward", half[..., : 4 * 1998])
    assert not team("forward", half.new_empty(1, 1, 129, 8000))
    card.multi_processor_count = 125
    assert team("forward", half) == 1
    card.multi_processor_count = 124
    assert not team("forward", half)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not team("forward", half)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_blocks_look_at_begins_at_zero(direction, rows, half):
    """Pieces beyond the last unit, counters, and the sums, whose last bit says when they came."""
    team = wide_lstm.TEAMS[direction][0]
    cut = wide_lstm.cut_wide(direction, 72, team, 227 * 1024, rows, half)
    sizes = wide_lstm.zeroed(cut, 2)
    pieces = sizes["passed"] // (2 * 2 * 2 * rows * 16)  # of two recurrences, for two steps
    assert pieces >= 5 * (4 if direction == "backward" else 1)  # by 5 blocks of 16 units
    if direction == "backward":  # 8 blocks, from 7 others each a word of 16 bytes for every thread
        powers = 0 if half else 2 * 8 * rows // 16  # of each block's warps
        assert sizes["handed"] == 2 * 8 * 7 * 2 * rows * 16 + 4 * powers
    assert set(sizes) == {"passed", "meetings", *(["handed"] if direction == "backward" else [])}
    assert all(size % 16 == 0 for size in sizes.values())
