"""What the CUDA C++ kernels read and write at the addresses they get."""

import ctypes
import math

import pytest
import torch
from recurrence_cases import call, make_case

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.definition import LSTM, LSTMArguments
from rbn.ops.gpu.lstm import backward, cuda_kernels, forward
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.portable import portable_kernels
from rbn.ops.operator import Incoming


class Writer:
    """Stands in for a kernel: fills some of its results, and keeps the addresses it gets."""

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
@pytest.mark.parametrize("family", [cuda_kernels.PORTABLE, cuda_kernels.CLUSTER])
def test_results_are_what_the_kernels_wrote(monkeypatch, family):
    """Of sizes that leave parts of a buffer unaligned; arguments are copied where they are."""
    kernel = Writer(6)
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: family)
    monkeypatch.setattr(portable_kernels, "kernel", lambda *sizes: kernel)
    if family == cuda_kernels.CLUSTER:
        monkeypatch.delattr(portable_kernels, "kernel")
        cut = cluster_kernels.cluster_tiling(torch.float32, 5, 6)
        monkeypatch.setattr(cluster_kernels, "choose", lambda term: cut)
        monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *sizes: cut.blocks)
        monkeypatch.setattr(cluster_kernels, "kernel", lambda *sizes: kernel)
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
    # d(W_h h) lies in the memory of W_h h: step 0 of the former behind step 0 of the latter, of
    # which the cluster kernels keep 6 rows of 8 units.
    behind = kernel.seen["da"] - kernel.seen["wh"]
    assert 4 * (6 * 4 * 8) <= behind < 4 * (3 * 6 * 4 * 8)


class Reader:
    """Stands in for a kernel and keeps what is at the addresses it gets."""

    at_once, cluster, together = 1000, 0, True

    def __init__(self, sizes, results):
        self.sizes, self.results, self.seen, self.places = sizes, results, [], []

    def launch(self, grid, packed):
        both = (cuda_kernels.ForwardArguments, cuda_kernels.BackwardArguments)
        (struct,) = [s for s in both if ctypes.sizeof(s) == len(packed)]
        arguments = struct.from_buffer_copy(packed)
        found = {}
        if "da" in arguments.pointers:
            count = math.prod(self.results)
            ctypes.memset(arguments.da, 0, count * self.sizes["wx"][0].itemsize)
        for name, (dtype, count) in self.sizes.items():
            if count and name in arguments.pointers and getattr(arguments, name):
                raw = ctypes.string_at(getattr(arguments, name), count * dtype.itemsize)
                found[name] = torch.frombuffer(bytearray(raw), dtype=dtype)
        self.seen.append(found)
        self.places.append({name: getattr(arguments, name) for name in arguments.pointers})


OPTIONS = ("plain", "lengths", "population", "raw output", "inputs", "shared states")


@pytest.mark.skipif(torch.cuda.is_available(), reason="addresses of the host's memory")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("R", [1, 2])
@pytest.mark.parametrize("spread", [False, True])
def test_kernels_find_the_arguments_where_they_are_told(monkeypatch, option, dtype, R, spread):
    """All kinds of memory: of one call and of two side by side, contiguous or not."""
    T, B, H, full = 3, 5, 6, torch.float32
    generator = torch.Generator().manual_seed(0)

    def new(*shape, dtype=dtype):
        value = torch.randn(*shape, generator=generator).to(dtype)
        return value if not spread else value.mT.contiguous().mT if len(shape) > 1 else value

    shapes = {"input": (T, B, 4 * H), "weight_hh": (4 * H, H), "h0": (B, H), "c0": (B, H)}
    shapes |= dict.fromkeys(("bias", "gamma_x", "gamma_h"), (4 * H,))
    shapes |= dict.fromkeys(("gamma_c", "beta_c"), (H,))
    if option == "inputs":
        shapes |= {"input": (T, B, 7), "weight_ih": (4 * H, 7)}
    if option == "shared states":
        shapes |= {"h0": (H,), "c0": (H,)}
    if option == "raw output":
        shapes = {name: v for name, v in shapes.items() if name not in ("gamma_c", "bias")}
    lengths = torch.tensor([3, 1, 2, 3, 2]) if option == "lengths" else None

    def new_call():
        given = dict.fromkeys(LSTM.tensors) | {k: new(*v) for k, v in shapes.items()}
        if option == "population":
            sizes = zip(LSTM.moments, [4 * H] * 4 + [H] * 2, strict=True)
            given |= {name: new(2, F, dtype=full).square() for name, F in sizes}
        given["lengths"] = lengths
        return LSTMArguments(**given, norm="batch", eps=1e-5, save=True)

    calls = [new_call() for _ in range(R)]
    sizes = dict.fromkeys(("bias", "gamma_x", "gamma_h"), (full, R * 4 * H))
    sizes |= dict.fromkeys(("gamma_c", "beta_c"), (full, R * H))
    sizes |= dict.fromkeys(("c0", "dh", "dc"), (full, R * B * H))
    sizes |= {"wx": (dtype, R * T * B * 4 * H), "weight": (dtype, R * 4 * H * H)}
    sizes |= {"doutput": (dtype, R * T * B * H), "hs": (dtype, R * (T + 1) * B * 8)}
    sizes |= {"lengths": (torch.int32, B), "inv_n": (full, T), "counter": (torch.int32, R)}
    for name, F in zip(("x", "h", "c"), (4 * H, 4 * H, H), strict=True):
        rows = 2 if option == "population" else 0
        sizes |= {f"{what}_{name}": (full, R * rows * F) for what in ("mean", "var")}
    kernel = Reader(sizes, (R, T, B, 4 * H))
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: cuda_kernels.PORTABLE)
    monkeypatch.setattr(portable_kernels, "kernel", lambda *sizes: kernel)
    results = forward.forward(calls, separate=False)
    lead = (R,) if R > 1 else ()
    doutput, dh_n = new(*lead, T, B, H), new(*lead, B, H)
    incoming = Incoming(doutput, (dh_n if option == "lengths" else None, None))
    gradients = backward.backward(calls, results.saved, results.plan, incoming)
    assert len(gradients) == R
    for a, own in zip(calls, gradients, strict=True):
        for name in LSTM.gradients:
            tensor = getattr(a, name)
            assert (own[name] is None) == (tensor is None), name
            if tensor is not None:
                assert own[name].shape == tensor.shape, name
                assert own[name].dtype == tensor.dtype, name

    seen_forward, seen_backward = kernel.seen

    def together(name, change=lambda value: value):
        return torch.cat([change(getattr(a, name)).flatten() for a in calls])

    def in_rows(state):
        return state.expand(B, H)

    term = torch.cat([term_of(a).flatten() for a in calls])
    for seen in (seen_forward, seen_backward):
        assert torch.equal(seen["wx"], term)
        for name in ("bias", "gamma_x", "gamma_h", "gamma_c", "beta_c"):
            assert (name in seen) == (name in shapes)
            if name in seen:
                assert torch.equal(seen[name], together(name).to(full)), name
    assert torch.equal(seen_forward["weight"], together("weight_hh"))
    assert torch.equal(seen_backward["weight"], together("weight_hh", lambda w: w.mT))
    assert torch.equal(seen_forward["c0"], together("c0", in_rows).to(full))
    states = seen_forward["hs"].view(R, T + 1, B, 8)
    assert torch.equal(states[:, 0, :, :H].flatten(), together("h0", in_rows))
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
            for name in LSTM.moments:
                assert torch.equal(seen[name], together(name)), name
    one, other = kernel.places
    assert [one[name] for name in ("cs", "wh")] == [other[name] for name in ("cs", "wh")]
    if option != "population":  # written by the one, read by the other; raised variances are new
        moments = dict(zip(LSTM.moments, results.moments, strict=True))
        for name in ("mean_x", "mean_h"):
            assert one[name] == other[name] == moments[name].data_ptr()


def term_of(a):
    return a.input if a.weight_ih is None else torch.nn.functional.linear(a.input, a.weight_ih)


class Masked:
    """Stands in for the grid kernels and keeps their zoneout arguments."""

    at_once, cluster, together = 1000, 0, True

    def __init__(self, numbers):
        self.numbers, self.seen = numbers, []

    def launch(self, grid, packed):
        both = (cuda_kernels.ForwardArguments, cuda_kernels.BackwardArguments)
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
def test_grid_kernels_find_the_masks(monkeypatch, zoneout, R, spread):
    T, B, H = 3, 5, 12
    kernel, defines = Masked(R * T * B * H), []
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: cuda_kernels.GRID)
    monkeypatch.setattr(grid_kernels, "kernel", lambda cut, device, d: defines.append(d) or kernel)
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    rates = [0.0 if z == "mask" else z for z in zoneout]

    def new_call():
        given = [new(T, B, H) > 0, new(T, B, H) > 0]
        if spread:
            given = [given[0].mT.contiguous().mT, shifted(given[1])]
        masks = [mask if z == "mask" else None for z, mask in zip(zoneout, given, strict=True)]
        fields = dict.fromkeys(LSTM.tensors) | {"input": new(T, B, 4 * H)}
        fields |= {"weight_hh": new(4 * H, H), "h0": new(B, H), "c0": new(B, H)}
        names = ("mask_c", "mask_h", "rate_c", "rate_h")
        fields |= dict(zip(names, masks + rates, strict=True))
        return LSTMArguments(**fields, save=True)

    calls = [new_call() for _ in range(R)]
    results = forward.forward(calls, separate=False)
    lead = (R,) if R > 1 else ()
    incoming = Incoming(new(*lead, T, B, H), (None, None))
    backward.backward(calls, results.saved, results.plan, incoming)
    both = ([a.mask_c for a in calls], [a.mask_h for a in calls])
    masks = [None if own[0] is None else torch.stack(own) for own in both]
    assert len(kernel.seen) == 2
    for *sizes, rate_c, rate_h, mask_c, mask_h in kernel.seen:
        assert (*sizes, rate_c, rate_h) == (T, B, *rates)
        for seen, mask in zip((mask_c, mask_h), masks, strict=True):
            assert (seen is None) == (mask is None)
            assert mask is None or torch.equal(seen, mask.flatten().long())
    modes = [1 if z == "mask" else 2 if z else 0 for z in zoneout]
    assert all([dict(d)["ZONE_C"], dict(d)["ZONE_H"]] == modes for d in defines)


def shifted(value):
    """The same numbers, one element past the start of the memory."""
    memory = value.new_empty(value.numel() + 1)
    return memory[1:].view(value.shape).copy_(value)
