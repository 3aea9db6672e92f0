"""The host's side of the CUDA kernels: how the work is cut, what is compiled and kept."""

import collections
import contextlib
import ctypes
import types

import pytest
import torch
from recurrence_cases import call, make_case

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu import cuda_lstm, gradients, launch, nvrtc, plan, signature, small_lstm, wide_lstm
from rbn.ops.gpu.call import MOMENTS
from rbn.ops.gpu.input_moments import input_moments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [2, 8, 100, 240, 256, 258, 512, 1000, 1056])
@pytest.mark.parametrize("batch", [1, 16, 17, 64, 65, 100, 128])
def test_a_cut_covers_the_batch_and_fits_the_card(dtype, hidden, batch):
    for make, columns, pitch, sums in (
        (cuda_lstm.cut_forward, 4, 40, 64),
        (cuda_lstm.cut_backward, 1, 8, 96),
    ):
        cut = make(dtype, batch, hidden)
        if cut is None:  # the Triton kernels run
            assert hidden > 240
            continue
        assert 16 * cut.tiles >= batch
        assert cut.tiles % cut.row_warps == 0
        assert 96 <= cut.threads <= 1024  # a thread for each sum over the batch
        width = hidden if columns == 4 else 4 * hidden
        blocks = -(-width // (16 if dtype == torch.float32 else 32))
        assert cut.shared(blocks, columns, pitch, sums) <= 227 * 1024


def test_the_shapes_of_the_paper_are_cut():
    for batch, hidden in ((100, 100), (64, 240), (64, 1000)):
        for dtype in TYPES:
            assert cuda_lstm.cut_forward(dtype, batch, hidden) is not None
            assert cuda_lstm.cut_backward(dtype, batch, hidden) is not None
    assert cuda_lstm.cut_forward(torch.float32, 129, 100) is None


def test_a_card_with_less_shared_memory():
    limit = 99 * 1024
    assert cuda_lstm.cut_forward(torch.bfloat16, 100, 100, limit) is not None
    assert cuda_lstm.cut_forward(torch.bfloat16, 64, 1000, limit) is None


@pytest.mark.parametrize("limit", [110 * 1024, 227 * 1024])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("hidden", [4, 52, 240, 1060, 2000, 2112])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wide_cut_covers_the_weights_and_fits_the_card(direction, hidden, rows, limit):
    for team in wide_lstm.TEAMS[direction]:
        cut = wide_lstm.cut_wide(direction, hidden, team, limit, rows)
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


@pytest.mark.parametrize(
    ("hidden", "itemsize", "stages"),
    [(1056, 2, (3, 3)), (1058, 2, (1, 3)), (1055, 2, (1, 1)), (1058, 4, (1, 3)), (1056, 4, (3, 3))],
)
def test_rows_that_begin_anywhere_are_not_read_in_the_background(hidden, itemsize, stages):
    found = plan.make_plan(1, 9, hidden, 132, itemsize, 227 * 1024)
    assert (found.stages_forward, found.stages_backward) == stages


@pytest.mark.parametrize("shared", [48, 64, 96, 163, 227])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("batch", [1, 64, 129, 400, 1000, 2000])
@pytest.mark.parametrize("hidden", [1, 24, 40, 100, 1000])
def test_the_tiles_of_triton_fit_the_card(shared, itemsize, batch, hidden):
    found = plan.make_plan(1, batch, hidden, 132, itemsize, 1024 * shared)
    rows = max(16, plan.power_of_two(batch))
    if found is None:
        # The smallest tile of four units does not fit, or the gates take too many registers.
        assert (rows + 16) * 16 * itemsize > 1024 * shared or rows * 16 * -(-hidden // 528) > 2**13
        return
    assert rows * 4 * found.units <= 2**13
    for k, stages, columns in (
        (found.k_forward, found.stages_forward, 4 * found.units),
        (found.k_backward, found.stages_backward, found.units),
    ):
        assert k >= 16
        assert stages * (rows + columns) * k * itemsize <= 1024 * shared


def test_text8_is_cut_as_planned():
    limit = 227 * 1024
    forward = wide_lstm.cut_wide("forward", 2000, 1, limit)
    backward = wide_lstm.cut_wide("backward", 2000, 8, limit)
    assert (forward.blocks, forward.first, forward.resident, forward.second) == (125, 9, 46, 9)
    assert (backward.blocks, backward.first, backward.resident, backward.second) == (128, 5, 22, 5)


@pytest.fixture
def hopper(monkeypatch):
    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    caches = (wide_lstm._choose, cuda_lstm._has_room)
    for module in (wide_lstm, cuda_lstm):
        monkeypatch.setattr(module, "shared_limit", lambda device: 227 * 1024)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


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
    assert kind(64, 1002) == kind(64, 1000, dtype=torch.float32) == ("units of 8",)
    wx = torch.empty(1, 1, 64, 4000).bfloat16()
    assert cuda_lstm.meeting("forward", wx, cuda_lstm.family(wx)) == (False, False)
    monkeypatch.setattr(wide_lstm, "PREFERRED", {64: 1000, 128: 500})
    assert kind(64, 1000) == ("wide", 64)
    assert kind(64, 500) == kind(65, 1000) == ("wide", 128)


def test_zoned_calls_do_not_run_wide_yet():
    """The kernels have not been on a card with zoneout."""
    assert not wide_lstm.ZONED


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
    assert not any(runs(*size) for size in sizes)
    monkeypatch.setattr(wide_lstm, "ZONED", True)
    # Also where small layers or few rows have other kernels, without zoneout.
    assert all(runs(*size) for size in sizes)
    assert cuda_lstm.family(zoned_call(100, 100).wx) == "small"
    assert not runs(64, 1000, dtype=torch.float32)
    assert not runs(64, 1002)
    assert not runs(129, 1000)
    assert not runs(64, 1000, pass_normalized_cell=True)
    assert not runs(64, 2400)


def test_which_layers_are_wide(monkeypatch):
    """Hopper, half precision, a multiple of four units, and room for all blocks at once."""
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
    assert not team("forward", half.float())
    assert not team("forward", half.expand(2, 1, 128, 8000))
    assert not team("forward", half[..., : 4 * 1998])
    assert not team("forward", half.new_empty(1, 1, 129, 8000))
    card.multi_processor_count = 125
    assert team("forward", half) == 1
    card.multi_processor_count = 124
    assert not team("forward", half)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not team("forward", half)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_blocks_look_at_begins_at_zero(direction, rows):
    """Pieces beyond the last unit, counters, and the sums, whose last bit says when they came."""
    wx = torch.empty(2, 1, 3, 4 * 72, dtype=torch.bfloat16)
    team = wide_lstm.TEAMS[direction][0]
    cut = wide_lstm.cut_wide(direction, 72, team, 227 * 1024, rows)
    found, (clear, spilled) = wide_lstm.rooms(cut, wx)
    assert found.pop("spilled") == spilled.data_ptr()
    assert spilled.numel() >= 2 * cut.spilled
    ends = [*list(found.values())[1:], clear.data_ptr() + clear.numel()]
    sizes = {name: end - at for (name, at), end in zip(found.items(), ends, strict=True)}
    pieces = sizes["passed"] // (2 * 2 * 2 * rows * 16)  # of two recurrences, for two steps
    assert pieces >= 5 * (4 if direction == "backward" else 1)  # by 5 blocks of 16 units
    if direction == "backward":  # 8 blocks, from 7 others each a word of 16 bytes for every thread
        assert sizes["handed"] == 2 * 8 * 7 * 2 * rows * 16
    assert set(sizes) == {"passed", "meetings", *(["handed"] if direction == "backward" else [])}
    assert found["passed"] == clear.data_ptr()
    assert all(at % 16 == 0 for at in found.values())
    assert not clear.any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [2, 8, 10, 100, 128])
@pytest.mark.parametrize("batch", [1, 8, 17, 100, 128])
def test_a_small_cut_covers_the_layer_and_fits_the_card(dtype, hidden, batch):
    cut = small_lstm.cut_small(dtype, batch, hidden)
    assert 8 * cut.tiles * cut.warps >= batch
    assert cut.blocks * small_lstm.UNITS >= hidden
    assert cut.blocks <= 16
    assert cut.threads <= 512
    for direction in ("forward", "backward"):
        assert cut.shared(direction) <= 227 * 1024
        assert cut.shared(direction) % 8 == 0


def test_layers_that_are_not_small():
    for batch, hidden in ((129, 100), (100, 130), (100, 99)):
        assert small_lstm.cut_small(torch.float32, batch, hidden) is None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [130, 240, 250, 256])
@pytest.mark.parametrize("batch", [1, 32, 37, 64])
def test_a_cut_of_16_units_covers_the_layer_and_fits_the_card(dtype, hidden, batch):
    cut = small_lstm.cut_sixteen(dtype, batch, hidden)
    assert 8 * cut.tiles * cut.row_warps >= batch
    assert (cut.units, cut.row_warps, cut.warps) == (16, 4, 8)
    assert cut.blocks * cut.units >= hidden
    assert cut.blocks <= 16
    assert cut.threads == 384  # all warpgroups are whole: some give registers to others
    for direction in ("forward", "backward"):
        assert cut.shared(direction) <= 227 * 1024
        assert cut.shared(direction) % 16 == 0


def test_layers_that_are_too_large_for_16_units():
    for batch, hidden in ((65, 240), (64, 258), (64, 131), (64, 16)):
        assert small_lstm.cut_sixteen(torch.bfloat16, batch, hidden) is None


def test_blocks_of_16_units_run_in_the_types_that_ask_for_them(monkeypatch):
    wx = types.SimpleNamespace(
        shape=(1, 5, 64, 960), dtype=torch.float16, is_cuda=True, device=torch.device("cuda", 0)
    )
    monkeypatch.setattr(small_lstm, "cluster_of", lambda *args: 15)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wx.dtype = dtype
        assert small_lstm.choose(wx).units == 16
    monkeypatch.setattr(small_lstm, "SIXTEEN", (torch.float16,))
    assert small_lstm.choose(wx) == small_lstm.SmallCut(15, 8, 2, half=True, units=16)
    wx.shape = (1, 5, 100, 400)
    assert small_lstm.choose(wx).units == 8
    wx.shape, wx.dtype = (1, 5, 64, 960), torch.bfloat16
    assert small_lstm.choose(wx) is None


@pytest.mark.parametrize(("hidden", "expected"), [(100, "sm_90"), (240, "sm_90a")])
def test_how_small_kernels_are_compiled(monkeypatch, hidden, expected):
    """Warps of blocks of 16 units give each other registers, as only Hopper's own code can."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "compiled", lambda *args: asked.append(args))
    monkeypatch.setattr(small_lstm, "Kernel", lambda *args: args)
    monkeypatch.setattr(small_lstm, "SWITCHES", {"ALL_WAIT": 1})
    sizes = (torch.float16, 64, hidden)
    cut = small_lstm.cut_small(*sizes) or small_lstm.cut_sixteen(*sizes)
    small_lstm.kernel.__wrapped__("forward", cut, cut.blocks, 0, (("H", hidden),))
    defines = {"H": hidden, "MW": 4, "RT": 2, "ALL_WAIT": 1}
    if hidden > 128:
        defines |= {"UNITS": 16, "STAGGERED": 1}
    assert asked == [("small_forward", defines, expected)]


def test_blocks_of_16_units_are_for_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    cut = small_lstm.cut_sixteen(torch.float16, 64, 240)
    assert small_lstm.cluster_of.__wrapped__(cut, torch.float16, 240, 0) is None


def test_small_kernels_run_where_a_cluster_finds_room(monkeypatch):
    wx = types.SimpleNamespace(
        shape=(1, 5, 100, 400), dtype=torch.float32, is_cuda=True, device=torch.device("cuda", 0)
    )
    monkeypatch.setattr(small_lstm, "cluster_of", lambda *args: 13)
    assert small_lstm.choose(wx) == small_lstm.SmallCut(blocks=13, warps=7, tiles=2, half=False)
    monkeypatch.setattr(small_lstm, "cluster_of", lambda *args: None)
    assert small_lstm.choose(wx) is None
    monkeypatch.setattr(small_lstm, "cluster_of", lambda *args: 13)
    wx.is_cuda = False
    assert small_lstm.choose(wx) is None


def test_small_layers_side_by_side(monkeypatch):
    """Clusters need not run at once, so any number of recurrences is taken as one of them is."""
    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(cuda_lstm, "_capable", lambda device: True)
    monkeypatch.setattr(cuda_lstm, "shared_limit", lambda device: 227 * 1024)
    monkeypatch.setattr(small_lstm, "cluster_of", lambda *args: 13)
    cuda_lstm._has_room.cache_clear()

    def kind(recurrences, batch=100, hidden=100):
        wx = types.SimpleNamespace(
            shape=(recurrences, 5, batch, 4 * hidden),
            dtype=torch.float32,
            is_cuda=True,
            device=torch.device("cuda", 0),
        )
        return cuda_lstm.kind(wx)

    assert [kind(1), kind(2), kind(20)] == ["small"] * 3
    assert kind(1, hidden=240) == "units of 8"
    monkeypatch.setattr(small_lstm, "cluster_of", lambda *args: None)
    assert [kind(1), kind(2), kind(20)] == ["units of 8", "units of 8", None]
    cuda_lstm._has_room.cache_clear()


@pytest.mark.parametrize(
    ("room", "expected"), [({13: 7, 16: 6}, 13), ({13: 0, 16: 6}, 16), ({13: 0, 16: 0}, None)]
)
def test_the_size_of_a_cluster(monkeypatch, room, expected):
    """The number of blocks, or the next power of two, or none."""
    asked = []

    def kernel(direction, cut, size, device, defines):
        asked.append((direction, size))
        return types.SimpleNamespace(at_once=size * room[size])

    monkeypatch.setattr(small_lstm, "kernel", kernel)
    monkeypatch.setattr(small_lstm, "shared_limit", lambda device: 227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    find = small_lstm.cluster_of.__wrapped__
    cut = small_lstm.cut_small(torch.bfloat16, 100, 100)
    assert find(cut, torch.bfloat16, 100, 0) == expected
    assert asked[:2] == [("forward", 13), ("backward", 13)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert find(cut, torch.bfloat16, 100, 0) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(small_lstm, "shared_limit", lambda device: cut.shared("backward") - 1)
    assert find(cut, torch.bfloat16, 100, 0) is None


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("options", [{}, {"gamma_c": None}, {"input_stats": "sequence"}])
def test_statistics_are_parts_of_one_piece(lead, options):
    """Each begins at a multiple of 16 bytes, where the kernel was told, and they do not overlap."""
    T, B, H = 3, 5, 6
    fields = dict.fromkeys(signature.Inputs._fields) | {
        "wx": torch.empty(*lead, T, B, 4 * H),
        "gamma_x": torch.empty(4 * H),
        "gamma_c": torch.empty(H),
        "population": [],
        "norm": "batch",
        "input_stats": "step",
    }
    a = signature.Inputs(**fields | options)
    given = types.SimpleNamespace(a=a, flat=a.wx)
    for apart in (False, True):
        moments = launch._Moments(given, apart)
        parts = moments.parts()
        rooms = {part.untyped_storage().data_ptr() for part in parts if part is not None}
        assert (len(rooms) > 1) == apart
        expected = [shape for shape in signature.statistics_shapes(a) for _ in range(2)]
        shapes = [(0,) if part is None else tuple(part.shape) for part in parts]
        assert shapes == expected
        assert moments.rows == [shape[-2] if len(shape) > 1 else 0 for shape in expected[::2]]
        named = zip(MOMENTS, parts, strict=True)
        present = [(part, moments.at[name]) for name, part in named if part is not None]
        assert len(present) == len(moments.at)
        for k, (part, at) in enumerate(present):
            assert part.is_contiguous()
            assert part.data_ptr() == at
            assert at % 16 == 0
            part.fill_(k)
        assert all((part == k).all() for k, (part, _) in enumerate(present))


@pytest.mark.parametrize("lead", [(), (2,)])
def test_gradients_unit_by_unit_give_those_of_the_weights(lead):
    """Kernels for small layers write the gates of a unit side by side."""
    T, B, H = 3, 4, 5
    da, weight = torch.randn(*lead, T, B, 4, H), torch.randn(*lead, 4 * H, H)
    hidden, h0 = torch.randn(*lead, T, B, H), torch.randn(*lead, B, H)
    given = types.SimpleNamespace(a=types.SimpleNamespace(h0=h0), T=T, H=H, lead=lead)
    given.in_rows = lambda state: state
    turned = da.transpose(-2, -1).flatten(-2)
    expected = gradients._through_weight(given, da.flatten(-2), weight, hidden, apart=True)
    found = gradients._through_weight(given, turned, weight, hidden, apart=False)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("batch", "hidden"), [(100, 100), (5, 6), (17, 50)])
def test_outputs_of_small_layers_begin_at_multiples_of_16_bytes(dtype, batch, hidden):
    wx = torch.empty(3, batch, 4 * hidden, dtype=dtype)
    given = types.SimpleNamespace(lead=(), T=3, B=batch, H=hidden, flat=wx, family=cuda_lstm.SMALL)
    stride = launch._stride(given)
    assert stride == hidden
    room = launch._room_for_states(given, stride)
    assert room.shape == (4, batch, hidden)
    assert room[1].data_ptr() % 16 == 0
    assert room.data_ptr() % (2 * room.itemsize) == 0  # the kernel reads h0 in pairs


def test_what_is_saved_has_room_for_pairs_of_rows():
    for batch, rows in ((1, 2), (7, 8), (100, 100)):
        assert signature.saved_rows(batch) == rows


@pytest.mark.parametrize(
    "name",
    [
        *("lstm_forward", "lstm_backward", "wide_forward", "wide_backward"),
        *("small_forward", "small_backward"),
    ],
)
def test_sources_are_whole(name):
    text = nvrtc.source(name)
    assert "#include" not in text
    threads = "LAUNCHED" if name.startswith("small") else "THREADS"
    assert f'extern "C" __global__ void __launch_bounds__({threads}, 1) {name}(' in text


def test_compiled_code_is_kept(tmp_path, monkeypatch):
    calls = []

    def compile_source(text, name, defines, arch):
        calls.append((name, defines, arch))
        return b"code"

    monkeypatch.setenv("RBN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    for _ in range(2):
        assert nvrtc.compiled("lstm_forward", {"H": 8}, "sm_90") == b"code"
    assert calls == [("lstm_forward", {"H": 8}, "sm_90")]
    nvrtc.compiled("lstm_forward", {"H": 8}, "sm_80")
    nvrtc.compiled("lstm_forward", {"H": 16}, "sm_90")
    assert len(calls) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("RBN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: b"code")
    assert nvrtc.compiled("lstm_forward", {"H": 8}, "sm_90") == b"code"


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    with pytest.raises(RuntimeError, match="no NVRTC library"):
        nvrtc.compile_source("", "nothing", {}, "sm_90")


@pytest.mark.parametrize("rows", [16, 2])  # a tile for the batch, or several
@pytest.mark.parametrize("padded", [False, True])
def test_moments_of_the_input_term(padded, rows):
    R, T, B, F = 2, 5, 7, 70
    torch.manual_seed(0)
    wx = torch.randn(R, T, B, F, device=DEVICE) + 100  # a mean that one pass would not survive
    lengths = torch.tensor([3, 1, 4, 4, 2, 1, 3] if padded else [T] * B, device=DEVICE)
    valid = torch.arange(T, device=DEVICE)[:, None] < lengths
    mean, var = torch.full((2, R, T, F), torch.nan, device=DEVICE)
    input_moments[(R * T, 2)](
        wx,
        mean,
        var,
        lengths.to(torch.int32),
        T,
        B,
        F=F,
        ROWS=rows,
        COLUMNS=64,
        LENGTHS=padded,
    )
    for t in range(T):
        counted = wx[:, t, valid[t]].double()
        if len(counted[0]) == 0:
            assert mean[:, t].abs().max() == 0
            assert var[:, t].abs().max() == 0
            continue
        expected_var, expected_mean = torch.var_mean(counted, dim=1, correction=0)
        torch.testing.assert_close(mean[:, t].double(), expected_mean, rtol=1e-6, atol=0)
        # float32 holds a deviation from 100 to 4e-6.
        torch.testing.assert_close(var[:, t].double(), expected_var, rtol=1e-4, atol=1e-4)


def test_tf32_follows_the_setting_for_recurrent_networks():
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    try:
        for allowed in (True, False):
            cudnn.allow_tf32 = allowed
            assert plan.tf32_allowed() is allowed
        if not hasattr(cudnn, "rnn"):
            return  # a torch without settings of its own for them
        for rnn, conv in (("tf32", "ieee"), ("ieee", "tf32")):
            cudnn.rnn.fp32_precision, cudnn.conv.fp32_precision = rnn, conv
            with pytest.raises(RuntimeError, match="TF32"):
                cudnn.allow_tf32  # noqa: B018
            assert plan.tf32_allowed() is (rnn == "tf32")
    finally:
        cudnn.allow_tf32 = before


class Writer:
    """A kernel's stand-in: fills some of its results, and keeps the addresses it was given."""

    at_once, cluster, together = 1000, 0, True

    def __init__(self, hidden):
        self.hidden, self.seen = hidden, {}

    def launch(self, grid, packed):
        both = (cuda_lstm.ForwardArguments, cuda_lstm.BackwardArguments)
        (struct,) = [s for s in both if ctypes.sizeof(s) == len(packed)]
        arguments = struct.from_buffer_copy(packed)
        self.seen |= {name: getattr(arguments, name) for name in arguments.pointers}
        states, steps = arguments.B * self.hidden, 4 * arguments.T * arguments.B * self.hidden
        numbers = {"c_n": states, "dc": states, "da": steps, "dwx": steps}
        numbers |= {"dbias": 4 * self.hidden, "dbeta_c": self.hidden}
        for name, count in numbers.items():
            if name in arguments.pointers:
                ctypes.memset(getattr(arguments, name), 0x3F, 4 * count)


@pytest.mark.skipif(torch.cuda.is_available(), reason="addresses of the host's memory")
@pytest.mark.parametrize("small", [False, True])
def test_results_are_what_the_kernels_wrote(monkeypatch, small):
    """Of sizes that leave parts of one room unaligned; and arguments are copied where they are."""
    kernel = Writer(6)
    monkeypatch.setattr(cuda_lstm, "covers", lambda a: True)
    monkeypatch.setattr(cuda_lstm, "_has_room", lambda *sizes: True)
    monkeypatch.setattr(cuda_lstm, "_kernel", lambda *sizes: kernel)
    if small:
        monkeypatch.delattr(cuda_lstm, "_kernel")
        cut = small_lstm.cut_small(torch.float32, 5, 6)
        monkeypatch.setattr(small_lstm, "choose", lambda wx: cut)
        monkeypatch.setattr(small_lstm, "cluster_of", lambda *sizes: cut.blocks)
        monkeypatch.setattr(small_lstm, "kernel", lambda *sizes: kernel)
    monkeypatch.setattr(launch, "input_moments", collections.defaultdict(lambda: moments_of))
    case = make_case("bn_lstm", 3, 5, 6, dtype=torch.float32)
    leaves = {name: shifted(v).requires_grad_() for name, v in case.present().items()}
    results = call(case.with_tensors(**leaves), "gpu")
    pattern = torch.tensor([0x3F3F3F3F], dtype=torch.int32).view(torch.float32)
    assert (results["c_n"] == pattern).all()
    assert not any(results[name]._is_view() for name in ("h_n", "c_n"))
    grads = torch.autograd.grad(results["output"].sum(), list(leaves.values()))
    found = dict(zip(leaves, grads, strict=True))
    for name in ("wx", "bias", "beta_c", "c0"):
        assert (found[name] == pattern).all(), name
    for name in ("wx", "weight", "bias", "gamma_x", "c0"):
        assert kernel.seen[name] % 16 == 0, name
    # d(W_h h) lies in the room of W_h h: step 0 of the former behind step 0 of the latter, of which
    # small kernels keep 6 rows of 8 units.
    behind = kernel.seen["da"] - kernel.seen["wh"]
    assert 4 * (6 * 4 * 8) <= behind < 4 * (3 * 6 * 4 * 8)


class Reader:
    """A kernel's stand-in that keeps what lies at the addresses it was given."""

    at_once, cluster, together = 1000, 0, True

    def __init__(self, sizes):
        self.sizes, self.seen, self.places = sizes, [], []

    def launch(self, grid, packed):
        both = (cuda_lstm.ForwardArguments, cuda_lstm.BackwardArguments)
        (struct,) = [s for s in both if ctypes.sizeof(s) == len(packed)]
        arguments = struct.from_buffer_copy(packed)
        found = {}
        for name, (dtype, count) in self.sizes.items():
            if count and name in arguments.pointers and getattr(arguments, name):
                raw = ctypes.string_at(getattr(arguments, name), count * dtype.itemsize)
                found[name] = torch.frombuffer(bytearray(raw), dtype=dtype)
        self.seen.append(found)
        self.places.append({name: getattr(arguments, name) for name in arguments.pointers})


@pytest.mark.skipif(torch.cuda.is_available(), reason="addresses of the host's memory")
@pytest.mark.parametrize("option", ["plain", "lengths", "population", "raw output"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("R", [0, 2])
@pytest.mark.parametrize("spread", [False, True])
def test_kernels_find_the_arguments_where_they_are_told(monkeypatch, option, dtype, R, spread):
    """Of every kind of memory: with and without a leading dimension, contiguous or not."""
    T, B, H = 3, 5, 6
    lead, n, full = ((R,) if R else ()), max(R, 1), torch.float32
    generator = torch.Generator().manual_seed(0)

    def new(*shape, dtype=dtype):
        value = torch.randn(*lead, *shape, generator=generator).to(dtype)
        return value if not spread else value.mT.contiguous().mT if len(shape) > 1 else value

    shapes = {"wx": (T, B, 4 * H), "weight_hh": (4 * H, H), "h0": (B, H), "c0": (B, H)}
    shapes |= dict.fromkeys(("bias", "gamma_x", "gamma_h"), (4 * H,))
    shapes |= dict.fromkeys(("gamma_c", "beta_c"), (H,))
    given = dict.fromkeys(signature.Inputs._fields) | {k: new(*v) for k, v in shapes.items()}
    given |= {"population": [], "rate_c": 0.0, "rate_h": 0.0, "norm": "batch", "eps": 1e-5}
    given |= {"input_stats": "step", "padding": "exclude", "pass_normalized_cell": False}
    given["save"] = True
    if option == "lengths":
        given["lengths"] = torch.tensor([3, 1, 2, 3, 2])
    if option == "population":
        features = [4 * H] * 4 + [H] * 2
        given["population"] = [new(2, F, dtype=full).square() for F in features]
    if option == "raw output":
        given |= {"gamma_c": None, "bias": None}
    a = signature.Inputs(**given)
    sizes = dict.fromkeys(("bias", "gamma_x", "gamma_h"), (full, n * 4 * H))
    sizes |= dict.fromkeys(("gamma_c", "beta_c"), (full, n * H))
    sizes |= dict.fromkeys(("c0", "dh", "dc"), (full, n * B * H))
    sizes |= {"wx": (dtype, n * T * B * 4 * H), "weight": (dtype, n * 4 * H * H)}
    sizes |= {"doutput": (dtype, n * T * B * H), "hs": (dtype, n * (T + 1) * B * 8)}
    sizes |= {"lengths": (torch.int32, B), "inv_n": (full, T), "counter": (torch.int32, n)}
    for name, F in zip(("x", "h", "c"), (4 * H, 4 * H, H), strict=True):
        rows = 2 if option == "population" else 0
        sizes |= {f"{what}_{name}": (full, n * rows * F) for what in ("mean", "var")}
    kernel = Reader(sizes)
    monkeypatch.setattr(cuda_lstm, "covers", lambda a: True)
    monkeypatch.setattr(cuda_lstm, "_has_room", lambda *sizes: True)
    monkeypatch.setattr(cuda_lstm, "_kernel", lambda *sizes: kernel)
    monkeypatch.setattr(launch, "input_moments", collections.defaultdict(lambda: moments_of))
    results = launch.forward(a)
    doutput, dh_n = new(T, B, H), new(B, H)
    gradients.backward(a, results, doutput, dh_n if option == "lengths" else None, None)
    forward, backward = kernel.seen
    for name in ("wx", "bias", "gamma_x", "gamma_h", "gamma_c", "beta_c"):
        for seen in (forward, backward):
            assert (name in seen) == (given[name] is not None)
            if name in seen:
                assert torch.equal(seen[name], given[name].flatten().to(sizes[name][0])), name
    assert torch.equal(forward["weight"], a.weight_hh.flatten())
    assert torch.equal(backward["weight"], a.weight_hh.mT.flatten())
    assert torch.equal(forward["c0"], a.c0.flatten().to(full))
    states = forward["hs"].view(n, T + 1, B, 8)
    assert torch.equal(states[:, 0, :, :H].flatten(), a.h0.flatten())
    assert not states[:, 0, :, H:].any()
    assert torch.equal(backward["doutput"], doutput.flatten())
    assert torch.equal(backward["dh"], dh_n.flatten().to(full) * (option == "lengths"))
    assert not backward["dc"].any()
    assert not backward["counter"].any()
    if option == "lengths":
        for seen in (forward, backward):
            assert seen["lengths"].tolist() == [3, 1, 2, 3, 2]
            torch.testing.assert_close(seen["inv_n"], torch.tensor([1 / 5, 1 / 4, 1 / 2]))
    if option == "population":
        for seen in (forward, backward):
            for name, value in zip(launch.MOMENTS, a.population, strict=True):
                assert torch.equal(seen[name], value.flatten()), name
    one, other = kernel.places
    assert [one[name] for name in ("cs", "wh")] == [other[name] for name in ("cs", "wh")]
    if option != "population":  # written by the one, read by the other; raised variances are new
        assert one["mean_h"] == other["mean_h"] == results.mean_h.data_ptr()
        assert one["mean_x"] == other["mean_x"] == results.mean_x.data_ptr()


class Masked:
    """A stand-in for the kernels for wide layers that keeps what they are told of zoneout."""

    at_once, cluster, together = 1000, 0, True

    def __init__(self, numbers):
        self.numbers, self.seen = numbers, []

    def launch(self, grid, packed):
        both = (cuda_lstm.WideForwardArguments, cuda_lstm.WideBackwardArguments)
        (struct,) = [s for s in both if ctypes.sizeof(s) == len(packed)]
        told = struct.from_buffer_copy(packed)
        places = (told.mask_c, told.mask_h)
        masks = [at and torch.tensor(list(ctypes.string_at(at, self.numbers))) for at in places]
        assert all((at or 0) % 16 == 0 for at in places)
        self.seen.append((told.T, told.B, told.rate_c, told.rate_h, *masks))


@pytest.mark.skipif(torch.cuda.is_available(), reason="addresses of the host's memory")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("R", [1, 2])
@pytest.mark.parametrize("zoneout", [("mask", "mask"), ("mask", 0.25), (0.5, 0.25), (0.0, "mask")])
def test_wide_kernels_find_the_masks(monkeypatch, zoneout, R, spread):
    T, B, H, lead = 3, 5, 12, (R,) if R > 1 else ()
    kernel, defines = Masked(R * T * B * H), []
    monkeypatch.setattr(wide_lstm, "ZONED", True)
    monkeypatch.setattr(cuda_lstm, "covers", cuda_lstm.takes_options)
    monkeypatch.setattr(wide_lstm, "kernel", lambda cut, device, d: defines.append(d) or kernel)
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(*lead, *shape, generator=generator).bfloat16()

    given = [new(T, B, H) > 0, new(T, B, H) > 0]
    if spread:
        given = [given[0].mT.contiguous().mT, shifted(given[1])]
    masks = [mask if z == "mask" else None for z, mask in zip(zoneout, given, strict=True)]
    rates = [0.0 if z == "mask" else z for z in zoneout]
    fields = dict.fromkeys(signature.Inputs._fields) | {"population": [], "norm": "none"}
    fields |= {"wx": new(T, B, 4 * H), "weight_hh": new(4 * H, H), "h0": new(B, H)}
    fields |= {"c0": new(B, H), "eps": 0.0, "save": True}
    names = ("mask_c", "mask_h", "rate_c", "rate_h")
    a = signature.Inputs(**fields | dict(zip(names, masks + rates, strict=True)))
    results = launch.forward(a)
    gradients.backward(a, results, new(T, B, H), None, None)
    assert len(kernel.seen) == 2
    for *sizes, rate_c, rate_h, mask_c, mask_h in kernel.seen:
        assert (*sizes, rate_c, rate_h) == (T, B, *rates)
        for seen, mask in zip((mask_c, mask_h), masks, strict=True):
            assert (seen is None) == (mask is None)
            assert mask is None or torch.equal(seen, mask.flatten().long())
    modes = [1 if z == "mask" else 2 if z else 0 for z in zoneout]
    assert all([dict(d)["ZONE_C"], dict(d)["ZONE_H"]] == modes for d in defines)


def moments_of(*arguments, **flags):
    pass


def shifted(value):
    """The same numbers, four bytes beside where memory begins."""
    room = value.new_empty(value.numel() + 1)
    return room[1:].view(value.shape).copy_(value)
