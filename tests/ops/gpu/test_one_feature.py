"""Inputs of one feature on the GPU, the host's side: which are supported, and kernel arguments."""

import ctypes

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.bn_rnn import rnn_steps
from rbn.ops.gpu.ln_lstm import ln_steps
from rbn.ops.gpu.lstm import cuda_kernels, joined, plan
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.input_moments import feature_moments
from rbn.ops.reference import call as reference_call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_the_host = pytest.mark.skipif(torch.cuda.is_available(), reason="stand-ins for kernels")


@pytest.mark.parametrize(("batch", "padded"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_as_kernels_take_them(batch, padded, dtype):
    R, T, B, F, S = 2, 5, 7, 24, 8
    torch.manual_seed(0)
    x = (torch.randn(T, R, B, device=DEVICE) + 3).to(dtype).transpose(0, 1)
    x[:, 1] = 0  # all rows identical
    w = torch.randn(R, F, device=DEVICE)
    w[:, 0] = 0
    lengths = torch.tensor([3, 1, 4, 4, 2, 1, 3] if padded else [T] * B, device=DEVICE)
    valid = (torch.arange(T, device=DEVICE)[:, None] < lengths)[None]
    memory = torch.full((R * T * S + R * T,), torch.nan, device=DEVICE)
    mean, var = torch.full((2, R, T, F), torch.nan, device=DEVICE)
    feature_moments[(R * T, 1)](
        *(x, w, memory, mean, var, lengths.to(torch.int32), T, B, *x.stride(), R * T * S),
        F=F,
        S=S,
        ROWS=8,
        COLUMNS=32,
        BATCH=batch,
        LENGTHS=padded,
    )
    rows = memory[: R * T * S].view(R, T, S)
    kept = torch.where(valid, x.double(), 0)
    if not batch:
        assert torch.equal(rows[..., :B].double(), kept)
        assert not rows[..., B:].any()
        assert mean.isnan().all()
        return
    m = x.double().mean(-1)
    centered = x.double() - m[..., None]
    v = centered.square().mean(-1)
    torch.testing.assert_close(rows[..., :B].double(), centered, rtol=0, atol=1e-6)
    torch.testing.assert_close(memory[R * T * S :].view(R, T).double(), v, rtol=1e-5, atol=1e-12)
    assert not rows[..., B:].any()
    assert not rows[:, 1].any()
    assert not var[:, 1].any()
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(mean.double(), m[..., None] * w[:, None].double(), **close)
    torch.testing.assert_close(var.double(), v[..., None] * w[:, None].double().square(), **close)


TYPES = (torch.float32, torch.bfloat16, torch.float16)


class Taken(Exception):
    """The kernels run without an input term."""


class Made(Exception):
    """The input term is computed."""


def fits_a_cluster(term):
    return cluster_kernels.cluster_tiling(term.dtype, *(term.shape[-2], term.shape[-1] // 4))


def covered(term, a):
    return cuda_kernels.CLUSTER if cuda_kernels.supports_options(term, a) else None


@pytest.fixture
def stand_ins(monkeypatch):
    """Kernel selection of the single-cluster kernels as on a GPU."""
    monkeypatch.setattr(cluster_kernels, "ONE_FEATURE", TYPES)
    monkeypatch.setattr(cuda_kernels, "family", covered)
    monkeypatch.setattr(cluster_kernels, "choose", fits_a_cluster)
    monkeypatch.setattr(plan, "_fits_side_by_side", lambda a, count: True)
    with rbn.backend("gpu"):
        yield


def make_term(*factors):
    raise Made


@pytest.fixture
def which(monkeypatch, stand_ins):
    """Both backward passes work: the plan decides, or another operator computed the term."""

    def end(a, term, one_feature, family):
        raise Taken if one_feature else Made

    monkeypatch.setattr(plan, "Plan", end)
    monkeypatch.setattr(grid_kernels, "fits", lambda term: True)  # zoneout
    for module in (ln_steps, rnn_steps):
        monkeypatch.setattr(module, "padded_factors", make_term)
    monkeypatch.setattr(reference_call, "input_product", make_term)


class Watching(TorchDispatchMode):
    """Sees every operator, like compilers."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@on_the_host
@pytest.mark.usefixtures("which")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True},
        {"num_layers": 2},
        {"batch_first": True},
        {"initial_state": "zeros", "bias": False},
        {"hidden_noise": 0.1, "weight_dropout": 0.3},
    ],
)
@pytest.mark.parametrize("layer", [rbn.BatchNormLSTM, rbn.LSTM])
@pytest.mark.parametrize("lengths", [None, [3, 1, 2, 3, 2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_calls_that_are_taken(layer, options, lengths, dtype):
    x = torch.randn(3, 5, 1, dtype=dtype)
    if options.get("batch_first"):
        x = x.transpose(0, 1).contiguous()
    constants = lengths is not None and layer is rbn.BatchNormLSTM
    with pytest.raises(Made if constants else Taken):
        layer(1, 6, **options).to(dtype)(x, lengths=lengths)


@on_the_host
@pytest.mark.usefixtures("which")
def test_more_calls_that_are_taken():
    layer = rbn.BatchNormLSTM(1, 6, input_stats="sequence")
    for x in (torch.randn(3, 5, 1), torch.randn(1, 2, 1), torch.randn(3, 10, 1)[:, ::2]):
        with pytest.raises(Taken):
            layer(x)
    with pytest.raises(Taken):
        layer(torch.randn(3, 5, 1), (torch.zeros(1, 5, 6), torch.zeros(1, 5, 6)))
    with pytest.raises(Taken), torch.no_grad():
        layer(torch.randn(3, 5, 1, requires_grad=True))
    with pytest.raises(Taken), torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(3, 5, 1))
    with pytest.raises(Taken):
        rbn.BatchNormLSTMCell(1, 6)(torch.randn(5, 1))
    for statistics in layer._all_statistics():
        statistics.update(torch.zeros(1, statistics.features), torch.ones(1, statistics.features))
    with pytest.raises(Taken):
        layer.eval()(torch.randn(3, 5, 1))


@on_the_host
@pytest.mark.usefixtures("which")
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: rbn.BatchNormLSTM(2, 6), torch.randn(3, 5, 2)),
        (lambda: rbn.BatchNormLSTM(1, 6), torch.randn(3, 5, 1, requires_grad=True)),
        (lambda: rbn.BatchNormLSTM(1, 7), torch.randn(3, 5, 1)),
        (lambda: rbn.BatchNormLSTM(1, 130), torch.randn(3, 5, 1)),
        (lambda: rbn.BatchNormLSTM(1, 6), torch.randn(3, 129, 1)),
        (lambda: rbn.BatchNormLSTM(1, 6, zoneout=(0.1, 0.0)), torch.randn(3, 5, 1)),
        (lambda: rbn.LSTM(1, 6, zoneout=(0.0, 0.1)).eval(), torch.randn(3, 5, 1)),
        (lambda: rbn.BatchNormLSTM(1, 6, ablations=["joint_terms"]), torch.randn(3, 5, 1)),
        (lambda: rbn.BatchNormLSTM(1, 6, ablations=["raw_output"]), torch.randn(3, 5, 1)),
        (lambda: rbn.BatchNormLSTM(1, 6, ablations=["pass_normalized_cell"]), torch.randn(3, 5, 1)),
        (lambda: rbn.LSTM(1, 6, dtype=torch.float64), torch.randn(3, 5, 1).double()),
        (lambda: rbn.LayerNormLSTM(1, 6), torch.randn(3, 5, 1)),
        (lambda: rbn.BatchNormRNN(1, 6), torch.randn(3, 5, 1)),
        (lambda: rbn.BatchNormGRU(1, 6), torch.randn(3, 5, 1)),
    ],
)
def test_calls_whose_input_term_is_made(make, x):
    with pytest.raises(Made):
        make()(x)


@on_the_host
@pytest.mark.usefixtures("which")
def test_more_calls_whose_input_term_is_made(monkeypatch):
    x, lengths = torch.randn(3, 5, 1), [3, 1, 2, 3, 2]
    layer = rbn.BatchNormLSTM(1, 6)
    with pytest.raises(Made):
        rbn.BatchNormLSTM(1, 6, padding="include")(x, lengths=lengths)
    for watching in (Watching(), rbn.backend("reference")):
        with pytest.raises(Made), watching:
            layer(x)
    monkeypatch.setattr(cluster_kernels, "ONE_FEATURE", ())
    with pytest.raises(Made):
        layer(x)


@on_the_host
@pytest.mark.usefixtures("which")
@pytest.mark.parametrize("dtype", TYPES)
def test_types_are_asked_for_by_name(dtype, monkeypatch):
    monkeypatch.setattr(cluster_kernels, "ONE_FEATURE", (torch.float32,))
    with pytest.raises(Taken if dtype == torch.float32 else Made):
        rbn.BatchNormLSTM(1, 6).to(dtype)(torch.randn(3, 5, 1, dtype=dtype))


@on_the_host
@pytest.mark.usefixtures("stand_ins")
def test_no_rows():
    assert rbn.LSTM(1, 6)(torch.randn(3, 0, 1))[0].shape == (3, 0, 6)


class Card:
    """Stands in for a kernel: keeps its input arguments, and writes a pattern."""

    at_once, cluster, together = 1000, 0, True
    pattern = torch.tensor([0x3F3F3F3F], dtype=torch.int32).view(torch.float32).item()

    def __init__(self, numbers, weights, itemsize=4):
        self.numbers, self.weights, self.itemsize = numbers, weights, itemsize
        self.seen, self.defines = [], []

    def __call__(self, direction, cut, cluster, device, defines):
        self.defines.append(dict(defines))
        return self

    def launch(self, grid, packed):
        both = (cuda_kernels.ForwardArguments, cuda_kernels.BackwardArguments)
        (struct,) = [s for s in both if ctypes.sizeof(s) == len(packed)]
        a = struct.from_buffer_copy(packed)
        assert all(getattr(a, name) % 16 == 0 for name in ("wx", "w", "weight"))
        sizes = {
            "wx": self.numbers,
            "w": self.weights,
            "var_x": a.rows_x * (grid[1] if a.var_x else 0),
        }
        found = {"rows_x": a.rows_x}
        for name, count in sizes.items():
            raw = ctypes.string_at(getattr(a, name), 4 * count) if count else b""
            found[name] = torch.frombuffer(bytearray(raw), dtype=torch.float32) if raw else None
        self.seen.append(found)
        if "dwx" in a.pointers:
            ctypes.memset(a.dwx, 0x3F, 4 * self.weights)
            ctypes.memset(a.da, 0, a.T * a.B * self.weights * self.itemsize)


@on_the_host
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", ["step", "sequence", "population", "none"])
def test_what_kernels_are_given(monkeypatch, dtype, directions, kind):
    T, B, H, S = 3, 5, 6, 8
    card = Card(directions * T * S, directions * 4 * H, dtype.itemsize)
    monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *sizes: 1)
    monkeypatch.setattr(cluster_kernels, "kernel", card)
    monkeypatch.setattr(joined, "padded_factors", make_term)
    options = (
        {} if kind == "none" else {"input_stats": "sequence" if kind == "sequence" else "step"}
    )
    make = rbn.LSTM if kind == "none" else rbn.BatchNormLSTM
    layer = make(1, H, bidirectional=directions == 2, **options).to(dtype)
    if kind == "population":
        for statistics in layer._all_statistics():
            statistics.update(
                torch.zeros(2, statistics.features), torch.ones(2, statistics.features)
            )
        layer.eval()
    x = torch.randn(T, B, 1).to(dtype)
    output, _ = layer(x)
    output.backward(torch.ones_like(output))
    modes = {"step": 1, "sequence": 1, "population": 2, "none": 0}
    assert [(d["SCALAR"], d["MODE_X"]) for d in card.defines] == [(1, modes[kind])] * 2
    dims = {"step": (1,), "sequence": (0, 1)}.get(kind)
    inputs = torch.stack([x[..., 0].float(), x[..., 0].float().flip(0)][:directions])
    if dims is not None:
        var, mean = torch.var_mean(
            inputs, [d + 1 if kind == "sequence" else 2 for d in dims], correction=0, keepdim=True
        )
        inputs = inputs - mean
    for seen in card.seen:
        rows = seen["wx"].view(directions, T, S)
        torch.testing.assert_close(rows[..., :B], inputs)
        assert not rows[..., B:].any()
        if dims is not None:
            assert seen["rows_x"] == (1 if kind == "sequence" else T)
            torch.testing.assert_close(seen["var_x"], var.flatten())
    suffixes = ("_l0", "_l0_reverse")[:directions]
    own = torch.cat([layer.get_parameter(f"weight_ih{s}").flatten() for s in suffixes])
    assert torch.equal(card.seen[0]["w"], own.detach().float())
    for r, suffix in enumerate(suffixes):
        weight = layer.get_parameter(f"weight_ih{suffix}")
        assert weight.grad.shape == weight.shape
        assert weight.grad.dtype == dtype
        assert (weight.grad.float() - Card.pattern).abs().max() < 4e-3
        if dims is not None:
            found = getattr(layer, f"stats_x{suffix}")
            shape = (-1, 1)
            w = weight.detach().float().view(1, -1)
            torch.testing.assert_close(found.mean, mean[r].view(shape) * w)
            torch.testing.assert_close(found.var, var[r].view(shape) * w.square())


@on_the_host
@pytest.mark.usefixtures("stand_ins")
def test_a_graph_that_is_kept_and_one_that_is_differentiated(monkeypatch):
    card = Card(3 * 8, 24)
    monkeypatch.setattr(cluster_kernels, "cluster_of", lambda *sizes: 1)
    monkeypatch.setattr(cluster_kernels, "kernel", card)
    layer = rbn.BatchNormLSTM(1, 6)
    output, _ = layer(torch.randn(3, 5, 1))
    for _ in range(2):
        output.sum().backward(retain_graph=True)
    assert len(card.seen) == 3
    weight = layer.weight_ih_l0
    (grad,) = torch.autograd.grad(output.sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    output.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()
