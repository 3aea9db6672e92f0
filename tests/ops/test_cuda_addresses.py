"""What the CUDA kernels find, and leave, at the addresses that they are given."""

import collections
import ctypes

import pytest
import torch
from recurrence_cases import call, make_case

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.lstm import backward, cuda_kernels, forward, signature
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels


class Writer:
    """A kernel's stand-in: fills some of its results, and keeps the addresses it was given."""

    at_once, cluster, together = 1000, 0, True

    def __init__(self, hidden):
        self.hidden, self.seen = hidden, {}

    def launch(self, grid, packed):
        both = (cuda_kernels.ForwardArguments, cuda_kernels.BackwardArguments)
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
    monkeypatch.setattr(cuda_kernels, "covers", lambda a: True)
    monkeypatch.setattr(cuda_kernels, "_has_room", lambda *sizes: True)
    monkeypatch.setattr(cuda_kernels, "_kernel", lambda *sizes: kernel)
    if small:
        monkeypatch.delattr(cuda_kernels, "_kernel")
        cut = cluster_kernels.cut_small(torch.float32, 5, 6)
        monkeypatch.setattr(cluster_kernels, "choose", lambda wx: cut)
        monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *sizes: cut.blocks)
        monkeypatch.setattr(cluster_kernels, "kernel", lambda *sizes: kernel)
    monkeypatch.setattr(forward, "input_moments", collections.defaultdict(lambda: moments_of))
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
        both = (cuda_kernels.ForwardArguments, cuda_kernels.BackwardArguments)
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
    monkeypatch.setattr(cuda_kernels, "covers", lambda a: True)
    monkeypatch.setattr(cuda_kernels, "_has_room", lambda *sizes: True)
    monkeypatch.setattr(cuda_kernels, "_kernel", lambda *sizes: kernel)
    monkeypatch.setattr(forward, "input_moments", collections.defaultdict(lambda: moments_of))
    results = forward.forward(a)
    doutput, dh_n = new(T, B, H), new(B, H)
    backward.backward(a, results, doutput, dh_n if option == "lengths" else None, None)
    seen_forward, seen_backward = kernel.seen
    for name in ("wx", "bias", "gamma_x", "gamma_h", "gamma_c", "beta_c"):
        for seen in (seen_forward, seen_backward):
            assert (name in seen) == (given[name] is not None)
            if name in seen:
                assert torch.equal(seen[name], given[name].flatten().to(sizes[name][0])), name
    assert torch.equal(seen_forward["weight"], a.weight_hh.flatten())
    assert torch.equal(seen_backward["weight"], a.weight_hh.mT.flatten())
    assert torch.equal(seen_forward["c0"], a.c0.flatten().to(full))
    states = seen_forward["hs"].view(n, T + 1, B, 8)
    assert torch.equal(states[:, 0, :, :H].flatten(), a.h0.flatten())
    assert not states[:, 0, :, H:].any()
    assert torch.equal(seen_backward["doutput"], doutput.flatten())
    assert torch.equal(seen_backward["dh"], dh_n.flatten().to(full) * (option == "lengths"))
    assert not seen_backward["dc"].any()
    assert not seen_backward["counter"].any()
    if option == "lengths":
        for seen in (seen_forward, seen_backward):
            assert seen["lengths"].tolist() == [3, 1, 2, 3, 2]
            torch.testing.assert_close(seen["inv_n"], torch.tensor([1 / 5, 1 / 4, 1 / 2]))
    if option == "population":
        for seen in (seen_forward, seen_backward):
            for name, value in zip(seen_forward.MOMENTS, a.population, strict=True):
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
        both = (cuda_kernels.WideForwardArguments, cuda_kernels.WideBackwardArguments)
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
    monkeypatch.setattr(cuda_kernels, "covers", cuda_kernels.takes_options)
    monkeypatch.setattr(grid_kernels, "kernel", lambda cut, device, d: defines.append(d) or kernel)
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
    results = forward.forward(a)
    backward.backward(a, results, new(T, B, H), None, None)
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
