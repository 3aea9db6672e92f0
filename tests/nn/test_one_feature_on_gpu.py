"""Layers with one input feature on a GPU, whose kernels read the input directly."""

import copy

import pytest
import torch

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.cluster import cluster_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="there are clusters of blocks from Hopper on",
    ),
]

# As in cuda_cases.py. Gradients may differ by twice as much as there: steps in which all rows are
# identical leave little of c0's gradient, for example.
UNITS = {torch.float32: 2**-11, torch.float16: 2**-11, torch.bfloat16: 2**-8}
NORMALIZED = {
    "plain": {},
    "no bias": {"bias": False, "initial_state": "zeros"},
    "sequencewise": {"input_stats": "sequence"},
    "both directions": {"bidirectional": True},
    "two layers": {"num_layers": 2},
}


@pytest.fixture
def ran(monkeypatch):
    """Launches of the single-cluster kernels: the direction, and whether without an input term."""
    found = []
    run = cuda_kernels.launch_for

    def counted(direction, call, *args):
        if call.plan.family == cuda_kernels.CLUSTER:
            found.append((direction, call.w is not None))
        return run(direction, call, *args)

    monkeypatch.setattr(cuda_kernels, "launch_for", counted)
    monkeypatch.setattr(cluster_kernels, "ONE_FEATURE", tuple(UNITS))
    return found


def make(layer_class, hidden, dtype, **options):
    """A layer with parameters of all sizes and some zero input weights, and its float64 copy."""
    torch.manual_seed(0)
    layer = layer_class(1, hidden, **options)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.startswith("gamma"):
                p.copy_(torch.rand_like(p) + 0.25)
            else:
                scale = hidden**-0.5 if name.startswith("weight_hh") else 0.5
                p.copy_(torch.randn_like(p) * scale)
            if name.startswith("weight_ih"):
                p[::5] = 0
    layer = layer.to("cuda", dtype)
    return layer, copy.deepcopy(layer).cpu().double()


def digits(steps, batch, dtype):
    """Inputs whose first steps are all 0, and a later step that is the same in all rows."""
    x = torch.randn(steps, batch, 1) + 0.3
    x[: steps // 3] = 0
    x[-2:] = 0.7
    return x.to(dtype)


def differentiated(layer, x, lengths, grads):
    output, states = layer(x, lengths=lengths)
    torch.autograd.backward([output, *states], grads)
    results = {"output": output.detach(), "h_n": states[0].detach(), "c_n": states[1].detach()}
    statistics = {n: b.clone() for n, b in layer.named_buffers() if not n.endswith("count")}
    return results | statistics, {n: p.grad for n, p in layer.named_parameters()}


def compare(layer, twin, x, lengths, unit):
    directions = 2 if layer.bidirectional else 1
    rows = (layer.num_layers * directions, x.shape[1], layer.hidden_size)
    grads = [torch.randn(*x.shape[:2], rows[2] * directions), torch.randn(rows), torch.randn(rows)]
    on_card = [g.to(x.dtype).cuda() for g in grads]
    found = differentiated(layer, x.cuda(), None if lengths is None else lengths.cuda(), on_card)
    grads = [g.double().cpu() for g in on_card]
    with rbn.backend("reference"):
        expected = differentiated(twin, x.double(), lengths, grads)
    for name, want in expected[0].items():
        assert found[0][name].shape == want.shape, name
        error = (found[0][name].double().cpu() - want).abs().max()
        assert error <= 16 * unit * max(1, want.abs().max()), name
    for name, want in expected[1].items():
        error = (found[1][name].double().cpu() - want).norm() / want.norm().clamp(min=1)
        assert error <= 16 * unit, f"gradient of {name}: {error:.2g}"


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("name", NORMALIZED)
@pytest.mark.parametrize("padded", [False, True])
def test_against_the_reference(name, padded, dtype, ran):
    layer, twin = make(rbn.BatchNormLSTM, 30, dtype, eps=0.1, **NORMALIZED[name])
    x = digits(7, 17, dtype)
    compare(layer, twin, x, torch.randint(1, 8, (17,)) if padded else None, UNITS[dtype])
    taken = not padded or name == "sequencewise"
    assert ran[0] == ("forward", taken)
    assert ran[-1] == ("backward", taken)
    assert len(ran) == (4 if name == "two layers" else 2)


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(("batch", "hidden"), [(100, 100), (128, 128), (2, 2), (2, 8), (7, 30)])
def test_shapes(batch, hidden, dtype, ran):
    layer, twin = make(rbn.BatchNormLSTM, hidden, dtype, eps=0.1)
    compare(layer, twin, digits(7, batch, dtype), None, UNITS[dtype])
    assert ran == [("forward", True), ("backward", True)]


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("directions", [1, 2])
def test_without_normalization(padded, directions, dtype, ran):
    layer, twin = make(rbn.LSTM, 30, dtype, bidirectional=directions == 2)
    x = digits(7, 17, dtype)
    compare(layer, twin, x, torch.randint(1, 8, (17,)) if padded else None, UNITS[dtype])
    assert ran == [("forward", True), ("backward", True)]


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("padded", [False, True])
def test_given_statistics(padded, dtype, ran):
    layer, twin = make(rbn.BatchNormLSTM, 30, dtype, eps=0.1)
    for ours, theirs in zip(layer._all_statistics(), twin._all_statistics(), strict=True):
        mean, var = torch.randn(6, ours.features) * 0.3, torch.rand(6, ours.features) + 0.25
        ours.update(mean.cuda(), var.cuda())
        theirs.update(mean.double(), var.double())
    layer.eval()
    twin.eval()
    x = digits(7, 17, dtype)
    compare(layer, twin, x, torch.randint(1, 8, (17,)) if padded else None, UNITS[dtype])
    assert ran == [("forward", True), ("backward", True)]
    with torch.no_grad():
        inferred = layer(x.cuda())[0]
    assert torch.equal(inferred, layer(x.cuda())[0].detach())


@pytest.mark.parametrize("units_of_16", [False, True])
@pytest.mark.parametrize("switches", [{}, {"ALL_WAIT": 1}])
def test_other_ways_to_compile_them(units_of_16, switches, ran, monkeypatch):
    if units_of_16:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("warps that give registers to others are of Hopper")
        monkeypatch.setattr(cluster_kernels, "SIXTEEN", tuple(UNITS))
    monkeypatch.setattr(cluster_kernels, "SWITCHES", switches)
    cluster_kernels.kernel.cache_clear()
    try:
        for dtype, unit in UNITS.items():
            layer, twin = make(rbn.BatchNormLSTM, 150 if units_of_16 else 30, dtype, eps=0.1)
            compare(layer, twin, digits(7, 20, dtype), None, unit)
    finally:
        cluster_kernels.kernel.cache_clear()
    assert ran == [("forward", True), ("backward", True)] * 3


def training_step(layer, x):
    layer.zero_grad(set_to_none=False)
    layer(x)[0].square().mean().backward()
    return [p.grad.clone() for p in layer.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_every_time(dtype, ran):
    layer, _ = make(rbn.BatchNormLSTM, 100, dtype)
    x = digits(60, 100, dtype).cuda()
    expected = training_step(layer, x)
    for _ in range(50):
        assert all(map(torch.equal, training_step(layer, x), expected))
    assert all(one for _, one in ran)


def test_the_same_as_with_an_input_term(ran, monkeypatch):
    """Without tiny variances, which would magnify tf32's rounding in both."""
    layer, _ = make(rbn.BatchNormLSTM, 100, torch.float32, eps=0.1)
    x = digits(30, 100, torch.float32).cuda()
    ours = training_step(layer, x)
    monkeypatch.setattr(cluster_kernels, "ONE_FEATURE", ())
    theirs = training_step(layer, x)
    assert [one for _, one in ran] == [True, True, False, False]
    assert_close_gradients(layer, ours, theirs)


def assert_close_gradients(layer, ours, theirs):
    for (name, _), one, other in zip(layer.named_parameters(), ours, theirs, strict=True):
        assert (one - other).norm() <= 2**-9 * other.norm().clamp(min=1e-3), name


def test_a_graph_of_a_training_step(ran, capture):
    layer, _ = make(rbn.BatchNormLSTM, 64, torch.float32, max_length=12)
    twin = copy.deepcopy(layer)
    x = torch.randn(12, 32, 1, device="cuda")
    for parameter in (*layer.parameters(), *twin.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    graph, _ = capture(lambda: training_step(layer, x))
    fresh = torch.randn_like(x)
    x.copy_(fresh)
    graph.replay()
    training_step(twin, fresh)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, twin.get_parameter(name).grad), name
    assert all(one for _, one in ran)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype, ran):
    layer, twin = make(rbn.BatchNormLSTM, 64, torch.float32, eps=0.1)
    x = torch.randn(12, 32, 1)
    with torch.autocast("cuda", dtype):
        output, _ = layer(x.cuda())
    assert output.dtype == dtype
    output.float().square().mean().backward()
    assert ran == [("forward", True), ("backward", True)]
    with rbn.backend("reference"):
        twin(x.double())[0].square().mean().backward()
    for name, parameter in layer.named_parameters():
        want = twin.get_parameter(name).grad
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad.double().cpu() - want).norm()
        assert error <= 16 * UNITS[dtype] * want.norm().clamp(min=1e-2), name


def test_a_graph_that_is_kept(ran):
    layer, _ = make(rbn.BatchNormLSTM, 30, torch.float32)
    loss = layer(torch.randn(6, 17, 1, device="cuda"))[0].square().sum()
    first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(layer.parameters()))
    assert all(map(torch.equal, first, again))
    assert ran == [("forward", True), ("backward", True), ("backward", True)]


def test_gradients_of_the_input(ran):
    layer, _ = make(rbn.BatchNormLSTM, 30, torch.float32)
    x = torch.randn(6, 17, 1, device="cuda", requires_grad=True)
    layer(x)[0].square().sum().backward()
    assert x.grad.shape == x.shape
    assert ran == [("forward", False), ("backward", False)]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # from the compiler
def test_compiled(ran):
    layer, _ = make(rbn.BatchNormLSTM, 64, torch.float32, eps=0.1, max_length=12)
    twin = copy.deepcopy(layer)
    x = torch.randn(12, 32, 1, device="cuda")
    torch.compile(lambda v: layer(v)[0].square().mean(), fullgraph=True)(x).backward()
    assert not any(one for _, one in ran)
    twin(x)[0].square().mean().backward()
    assert_close_gradients(layer, *([p.grad for p in each.parameters()] for each in (layer, twin)))
