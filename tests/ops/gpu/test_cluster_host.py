"""The host's side of the cluster kernels: how small layers are divided, and which are supported."""

import types

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.lstm import backward, cuda_kernels
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.joined import Saved
from rbn.ops.gpu.lstm.term import Term
from rbn.ops.gpu.lstm.workspace import states_buffer
from rbn.ops.gpu.runtime import driver, nvrtc

TYPES = (torch.float32, torch.bfloat16, torch.float16)
CARD = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [2, 8, 10, 100, 128])
@pytest.mark.parametrize("batch", [1, 8, 17, 100, 128])
def test_a_cut_of_8_units_covers_the_layer_and_fits_the_card(dtype, hidden, batch):
    cut = cluster_kernels.cluster_tiling(dtype, batch, hidden)
    assert 8 * cut.tiles * cut.warps >= batch
    assert cut.blocks * cluster_kernels.UNITS >= hidden
    assert cut.blocks <= 16
    assert cut.threads <= 512
    for direction in ("forward", "backward"):
        assert cut.shared(direction) <= 227 * 1024
        assert cut.shared(direction) % 8 == 0


def test_layers_that_are_too_large_for_8_units():
    for batch, hidden in ((129, 100), (100, 130), (100, 99)):
        assert cluster_kernels.cluster_tiling(torch.float32, batch, hidden) is None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [130, 240, 250, 256])
@pytest.mark.parametrize("batch", [1, 32, 37, 64])
def test_a_cut_of_16_units_covers_the_layer_and_fits_the_card(dtype, hidden, batch):
    cut = cluster_kernels.cluster_tiling_16(dtype, batch, hidden)
    assert 8 * cut.tiles * cut.row_warps >= batch
    assert (cut.units, cut.row_warps, cut.warps) == (16, 4, 8)
    assert cut.blocks * cut.units >= hidden
    assert cut.blocks <= 16
    assert cut.threads == 384  # warpgroups are complete, since some give registers to others
    for direction in ("forward", "backward"):
        assert cut.shared(direction) <= 227 * 1024
        assert cut.shared(direction) % 16 == 0


def test_layers_that_are_too_large_for_16_units():
    for batch, hidden in ((65, 240), (64, 258), (64, 131), (64, 16)):
        assert cluster_kernels.cluster_tiling_16(torch.bfloat16, batch, hidden) is None


def test_blocks_of_16_units_run_in_the_types_that_ask_for_them(monkeypatch):
    def choose(batch, hidden, dtype):
        return cluster_kernels.choose(Term((1, 5, batch, 4 * hidden), dtype, CARD))

    monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *args: 15)
    for dtype in TYPES:
        assert choose(64, 240, dtype).units == 16
    monkeypatch.setattr(cluster_kernels, "SIXTEEN", (torch.float16,))
    expected = cluster_kernels.ClusterTiling(15, 8, 2, half=True, units=16)
    assert choose(64, 240, torch.float16) == expected
    assert choose(100, 100, torch.float16).units == 8
    assert choose(64, 240, torch.bfloat16) is None


@pytest.mark.parametrize(("hidden", "expected"), [(100, "sm_90"), (240, "sm_90a")])
def test_how_cluster_kernels_are_compiled(monkeypatch, hidden, expected):
    """Warps of blocks of 16 units give each other registers, which only code for Hopper can do."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "compiled", lambda *args: asked.append(args))
    monkeypatch.setattr(cluster_kernels, "Kernel", lambda *args: args)
    monkeypatch.setattr(cluster_kernels, "SWITCHES", {"ALL_WAIT": 1})
    sizes = (torch.float16, 64, hidden)
    cut = cluster_kernels.cluster_tiling(*sizes) or cluster_kernels.cluster_tiling_16(*sizes)
    cluster_kernels.kernel.__wrapped__("forward", cut, cut.blocks, 0, (("H", hidden),))
    shared = cut.shared("forward")
    defines = {"H": hidden, "MW": 4, "RT": 2, "SHARED_BYTES": shared, "ALL_WAIT": 1}
    if hidden > 128:
        defines["UNITS"] = 16
    assert asked == [("cluster_forward", defines, expected)]


def test_blocks_of_16_units_are_for_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    cut = cluster_kernels.cluster_tiling_16(torch.float16, 64, 240)
    assert cluster_kernels.cluster_of.__wrapped__(cut, 0) is None


def test_cluster_kernels_run_where_a_cluster_fits(monkeypatch):
    term = Term((1, 5, 100, 400), torch.float32, CARD)
    monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *args: 13)
    expected = cluster_kernels.ClusterTiling(blocks=13, warps=7, tiles=2, half=False)
    assert cluster_kernels.choose(term) == expected
    assert cluster_kernels.choose(term._replace(device=torch.device("cpu"))) is None
    monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *args: None)
    assert cluster_kernels.choose(term) is None


@pytest.mark.usefixtures("hopper")
def test_small_layers_side_by_side(monkeypatch):
    """Clusters need not run at the same time, so if one recurrence is supported, any number is."""
    monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *args: 13)

    def kind(recurrences, batch=100, hidden=100):
        shape = (recurrences, 5, batch, 4 * hidden)
        return cuda_kernels.fastest(Term(shape, torch.float32, CARD))

    assert [kind(1), kind(2), kind(20)] == [cuda_kernels.CLUSTER] * 3
    assert kind(1, hidden=240) == cuda_kernels.GRID
    monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *args: None)
    assert [kind(1), kind(2), kind(20)] == [cuda_kernels.PORTABLE] * 2 + [None]


@pytest.mark.parametrize(
    ("at_once", "expected"), [({13: 7, 16: 6}, 13), ({13: 0, 16: 6}, 16), ({13: 0, 16: 0}, None)]
)
def test_the_size_of_a_cluster(monkeypatch, at_once, expected):
    """The number of blocks, or the next power of two, or none. Nothing must be compiled to know."""
    monkeypatch.setattr(cluster_kernels, "clusters", lambda size, device: at_once[size])
    monkeypatch.setattr(cluster_kernels, "kernel", lambda *args: pytest.fail("compiled"))
    monkeypatch.setattr(cluster_kernels, "shared_limit", lambda device: 227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 3))
    find = cluster_kernels.cluster_of.__wrapped__
    cut = cluster_kernels.cluster_tiling(torch.bfloat16, 100, 100)
    assert find(cut, 0) == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert find(cut, 0) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "version", lambda: (12, 2))
        assert find(cut, 0) is None
    monkeypatch.setattr(cluster_kernels, "shared_limit", lambda device: cut.shared("backward") - 1)
    assert find(cut, 0) is None


@pytest.mark.parametrize("lead", [(), (2,)])
def test_gradients_unit_by_unit_give_those_of_the_weights(lead):
    """The cluster kernels write the gates of a unit next to each other."""
    T, B, H = 3, 4, 5
    da, weight = torch.randn(*lead, T, B, 4, H), torch.randn(*lead, 4 * H, H)
    hidden, h0 = torch.randn(*lead, T, B, H), torch.randn(*lead, B, H)
    given = types.SimpleNamespace(a=types.SimpleNamespace(h0=h0), T=T, H=H, lead=lead)
    given.in_rows = lambda state: state
    given.plan = types.SimpleNamespace(by_unit=False)
    turned = da.transpose(-2, -1).flatten(-2)
    saved = Saved(output=hidden)
    expected = backward._through_weight(given, da.flatten(-2), weight, saved)
    given.plan.by_unit = True
    found = backward._through_weight(given, turned, weight, saved)
    saved = Saved(hidden=torch.cat([h0.unsqueeze(-3), hidden], -3))  # contiguous
    in_one = backward._through_weight(given, turned, weight, saved)
    (expected, of_h0), *others = expected, found, in_one
    for dweight, dh0 in others:
        by_gate = backward.by_gate(dweight, H)
        torch.testing.assert_close(by_gate, expected)
        torch.testing.assert_close(dh0, of_h0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("batch", "hidden"), [(100, 100), (5, 6), (17, 50)])
@pytest.mark.parametrize("empty", [False, True])
def test_outputs_of_small_layers_begin_at_multiples_of_16_bytes(dtype, batch, hidden, empty):
    term = Term((3, batch, 4 * hidden), dtype, torch.device("cpu"))
    plan = types.SimpleNamespace(term=term, sizes=((), 1, 3, batch, hidden))
    states = states_buffer(plan, hidden, empty)
    assert (states.shape, states.dtype) == ((4, batch, hidden), dtype)
    assert states[1].data_ptr() % 16 == 0
    assert states.data_ptr() % (2 * states.itemsize) == 0  # the kernel reads h0 in pairs
    if empty:  # a number that no kernel writes
        assert (states.view(torch.uint8) == 255).all()


@pytest.mark.parametrize(
    ("blocks", "refused", "at_once"), [(13, True, 0), (13, False, 26), (8, True, 16)]
)
def test_a_size_of_clusters_that_the_card_refuses(drive, blocks, refused, at_once):
    """Then none of them fits, and other kernels run; 8 blocks need not be tested."""

    def clusters(count, function, config):
        count._obj.value = 2
        return 0

    def allow(function, attribute, value):
        return int(refused and attribute == driver._NON_PORTABLE)

    drive(cuFuncSetAttribute=allow, cuOccupancyMaxActiveClusters=clusters)
    assert driver.Kernel(b"", "cluster_forward", 256, 1024, blocks).at_once == at_once
