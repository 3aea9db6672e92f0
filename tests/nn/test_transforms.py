"""torch.compile, autocast, torch.func, higher derivatives."""

import copy
import importlib.util
import shutil

import pytest
import torch
from torch.func import functional_call

import rbn
from rbn.ops import compiling

LAYERS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
need_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the GPU's kernels need triton"
)
BACKENDS = [
    pytest.param(name, marks=need_triton if name == "gpu" else ()) for name in rbn.backends()
]


def need(compiler):
    if compiler == "inductor" and shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler, and there is none")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("layer_class", "compiler"),
    [*((layer, "aot_eager") for layer in LAYERS), (rbn.BatchNormLSTM, "inductor")],
)
def test_compiled_whole(layer_class, compiler):
    need(compiler)
    torch.manual_seed(0)
    both = layer_class is rbn.LayerNormLSTM
    layer = layer_class(3, 4, bidirectional=both, dtype=torch.float64)
    twin = layer_class(3, 4, bidirectional=both, dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    calls = [(4, None), (6, None), (6, torch.tensor([6, 2, 3, 6, 1]))]
    if compiler == "inductor":  # each also compiles C++
        calls = calls[2:]
    elif layer_class is not rbn.BatchNormLSTM:
        # Each is a compilation. One layer suffices to show independence of the number of steps.
        calls = calls[::2]
    for steps, lengths in calls:
        x = torch.randn(steps, 5, 3, dtype=torch.float64)
        y, _ = compiled(x, lengths=lengths)
        expected, _ = twin(x, lengths=lengths)
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
    for name, parameter in layer.named_parameters():
        wanted = twin.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-7, atol=1e-10)
    for name, buffer in layer.named_buffers():  # statistics are kept and grow in compiled code, too
        torch.testing.assert_close(buffer, twin.get_buffer(name))
    x = torch.randn(9, 5, 3, dtype=torch.float64)
    compiled.eval(), twin.eval()
    torch.testing.assert_close(compiled(x)[0], twin(x)[0])


@pytest.mark.slow
@pytest.mark.no_cover
def test_compiled_with_regularisation():
    layer = rbn.BatchNormLSTM(
        3, 4, 2, dropout=0.5, zoneout=(0.2, 0.1), hidden_noise=0.1, weight_dropout=0.3
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    a, b = compiled(torch.randn(5, 6, 3))[0], compiled(torch.randn(5, 6, 3))[0]
    assert a.isfinite().all()
    assert not torch.equal(a, b)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("fullgraph", "allow_rnn", "traced"),
    [(False, False, False), (False, True, True), (True, False, True)],
)
def test_compiled_models_run_their_layers_eagerly(fullgraph, allow_rnn, traced):
    """Except if they must be one graph, or torch.compile is asked to trace recurrent layers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), rbn.BatchNormLSTM(3, 4, max_length=5))
    twin, x = copy.deepcopy(model), torch.randn(5, 6, 3)
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    with torch._dynamo.config.patch(allow_rnn=allow_rnn):
        for each in (compiled, twin):
            output, _ = each(x)
            output.square().sum().backward()
    assert any("rbn.cpu_lstm" in name for graph in graphs for name in graph) == traced
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)
    for buffer, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)
    torch._dynamo.reset()


@pytest.mark.no_cover
def test_compiled_layers_are_not_compiled_again():
    """Neither for new shapes nor without gradients; and one graph is still one graph afterwards."""
    torch._dynamo.reset()
    layer, graphs = rbn.BatchNormLSTM(3, 4, max_length=9), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=backend)
    compiled(torch.randn(5, 6, 3))
    frames = torch._dynamo.utils.counters["frames"]["total"]
    for steps in range(5, 9):
        compiled(torch.randn(steps, 6, 3))
    with torch.no_grad():
        compiled(torch.randn(5, 6, 3))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.randn(5, 6, 3))
    assert torch._dynamo.utils.counters["frames"]["total"] == frames
    assert not graphs
    x = torch.randn(5, 6, 3)
    expected = copy.deepcopy(layer)(x)[0]
    found = torch.compile(layer, backend=backend, fullgraph=True)(x)[0]
    assert len(graphs) == 1
    torch.testing.assert_close(found, expected)
    with torch._dynamo.config.patch(allow_rnn=True):
        torch.compile(layer, backend=lambda *args: backend(*args))(x)
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.no_cover
def test_torch_is_asked_once_how_layers_are_compiled(monkeypatch):
    """Reading its configuration takes as long as the rest of what a layer does in compiled code."""
    asked, traces_layers = [], compiling.traces_layers
    monkeypatch.setattr(compiling, "traces_layers", lambda: asked.append(1) or traces_layers())
    layer, x = rbn.BatchNormLSTM(3, 4, max_length=5), torch.randn(5, 6, 3)
    compiled = torch.compile(layer, backend="eager")
    compiled(x)
    asked.clear()
    for _ in range(3):
        compiled(x)
    assert len(asked) <= 1
    other = torch.compile(layer, backend=lambda graph, inputs: graph.forward)
    for _ in range(3):
        other(x)
    assert len(asked) <= 2


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("fullgraph", "allow_rnn", "graphs"), [(False, False, 0), (False, True, 1), (True, False, 1)]
)
def test_a_layer_compiled_by_itself(monkeypatch, fullgraph, allow_rnn, graphs):
    """`layer.compile()` leaves a layer alone that `torch.compile` would run eagerly."""
    torch._dynamo.reset()
    asked, compile_ = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: asked.append(1) or compile_(*a, **k))
    layer, x, made = rbn.BatchNormLSTM(3, 4, max_length=5), torch.randn(5, 6, 3), []
    expected = copy.deepcopy(layer)(x)[0]

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    with torch._dynamo.config.patch(allow_rnn=allow_rnn):
        layer.compile(backend=backend, fullgraph=fullgraph)
        torch.testing.assert_close(layer(x)[0], expected)
    assert len(made) == len(asked) == graphs
    torch._dynamo.reset()


@pytest.mark.no_cover
def test_a_compiled_subclass_with_its_own_forward():
    class Scaled(rbn.BatchNormLSTM):
        def forward(self, x):
            output, states = super().forward(2 * x)
            return output + 1, states

    layer, x = Scaled(3, 4), torch.randn(5, 6, 3)
    compiled = torch.compile(layer, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x)[0], layer(x)[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:BatchNormLSTM was not trained")
def test_a_compiled_evaluation_without_statistics_uses_the_batch():
    layer, x = rbn.BatchNormLSTM(3, 4).eval(), torch.randn(5, 6, 3)
    with torch.no_grad():
        found = torch.compile(layer, backend="aot_eager")(x)[0]
    with rbn.batch_statistics(layer):
        torch.testing.assert_close(found, layer(x)[0])


@pytest.mark.no_cover
@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(layer_class, backend):
    torch.manual_seed(0)
    # Four features may be nearly equal, and their normalization then magnifies rounding a
    # hundredfold; this eps limits that to a few times.
    calm = {"eps": 0.1} if layer_class is rbn.LayerNormLSTM else {}
    layer = layer_class(3, 4, num_layers=2, bidirectional=True, **calm)
    x = torch.randn(5, 6, 3)
    expected, _ = layer(x)
    with rbn.backend(backend), torch.autocast("cpu", dtype=torch.bfloat16):
        y, hx = layer(x)
        again, _ = layer(x.bfloat16(), hx)  # 16-bit inputs and states are fine under autocast
    assert y.dtype == again.dtype == torch.bfloat16
    assert all(s.dtype == torch.bfloat16 for s in (hx if isinstance(hx, tuple) else (hx,)))
    # bfloat16 has 8 bits: the layer's rounded inputs and weights move its outputs about as much
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=0.02 if calm else 0.1)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    if layer_class in (rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU):
        assert layer.stats_h_l0.mean.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_a_double_module_alone(backend):
    """Like PyTorch."""
    theirs = torch.nn.LSTM(3, 4, dtype=torch.float64)
    ours, cell = rbn.LSTM.from_lstm(theirs), rbn.LSTMCell(3, 4, dtype=torch.float64)
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16), rbn.backend(backend):
        torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-12, atol=1e-12)
        assert rbn.BatchNormLSTM(3, 4, dtype=torch.float64)(x)[0].dtype == torch.float64
        assert ours(torch.randint(0, 3, (5, 6)))[0].dtype == torch.float64
        with pytest.raises(ValueError, match=r"\(torch\.float32\) .* \(torch\.float64\)"):
            ours(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cell(x[0])[0].dtype == torch.float64


@pytest.mark.parametrize("layer_class", LAYERS)
def test_torch_func_gradients(layer_class):
    layer = layer_class(3, 4, dtype=torch.float64)
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters):
        return functional_call(layer, parameters, (x,))[0].square().sum()

    with rbn.batch_statistics(layer):  # a transform cannot write into the running averages
        found = torch.func.grad(loss)(parameters)
        with pytest.raises(RuntimeError, match=r"only rbn\.backend"), rbn.backend("cpu"):
            torch.func.grad(loss)(parameters)
    layer(x)[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12)


def test_double_backward():
    layer = rbn.BatchNormLSTM(2, 3, dtype=torch.float64)
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    with rbn.backend("reference"):
        (g,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
        g.square().sum().backward()
    assert layer.weight_hh_l0.grad.abs().max() > 0
    (g,) = torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r'second derivative.*rbn.backend\("reference"\)'):
        g.square().sum().backward()


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_agree(layer_class, backend):
    torch.manual_seed(0)
    layer = layer_class(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64)
    x, lengths = torch.randn(5, 6, 3, dtype=torch.float64), torch.tensor([5, 1, 2, 5, 3, 4])
    with rbn.backend("reference"):
        expected = layer(x, lengths=lengths)[0]
    with rbn.backend(backend):
        found = layer(x, lengths=lengths)[0]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def replica(module):
    """As made by `torch.nn.parallel.replicate`, on the same device."""
    modules = list(module.modules())
    copies = [each._replicate_for_data_parallel() for each in modules]
    for each, replica in zip(modules, copies, strict=True):
        for name, child in each._modules.items():
            setattr(replica, name, copies[modules.index(child)])
        for name, parameter in each._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.view_as(parameter))
        for name, buffer in each._buffers.items():
            setattr(replica, name, buffer.clone())
    return copies[0]


@pytest.mark.parametrize(
    "layer_class",
    [rbn.BatchNormLSTM, rbn.LSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU],
)
def test_replicas_of_data_parallel(layer_class):
    layer, x = layer_class(5, 8), torch.randn(4, 3, 5)
    output, _ = replica(layer)(x)
    torch.testing.assert_close(output, layer(x)[0], rtol=0, atol=0)
    output.sum().backward()
    assert layer.weight_hh_l0.grad.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.no_cover
def test_pieces_of_a_sequence_are_not_compiled_one_by_one():
    """With a fixed max_length, a graph does not depend on how many steps have statistics."""
    layer = rbn.BatchNormLSTM(3, 4, max_length=60)
    other = rbn.BatchNormLSTM(3, 4, max_length=60)
    other.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    states = [None, None]
    torch._dynamo.reset()
    for start in range(0, 60, 5):  # twelve pieces; PyTorch gives up at eight graphs
        x = torch.randn(5, 6, 3)
        for k, run in enumerate((compiled, other)):
            _, found = run(x, states[k], start=start)
            states[k] = tuple(state.detach() for state in found)
    torch.testing.assert_close(layer.stats_c_l0.var, other.stats_c_l0.var)
    assert layer.stats_c_l0.count.tolist() == [1] * 60


def test_vmap_of_symbols():
    layer, symbols = rbn.LSTM(3, 4), torch.randint(0, 3, (5, 6))
    found = torch.func.vmap(lambda s: layer(s[:, None])[0][:, 0], in_dims=1, out_dims=1)(symbols)
    torch.testing.assert_close(found, layer(symbols)[0])


def test_vmap_with_lengths():
    layer, x = rbn.LSTM(3, 4), torch.randn(2, 5, 3, 3)
    lengths = torch.tensor([[5, 2, 1], [3, 4, 5]])
    parameters = dict(layer.named_parameters())

    def run(x, lengths):
        return functional_call(layer, parameters, (x,), {"lengths": lengths})[0]

    found = torch.func.vmap(run)(x, lengths)
    for each, one, n in zip(found, x, lengths, strict=True):
        torch.testing.assert_close(each, layer(one, lengths=n)[0])


@pytest.mark.parametrize(
    "layer_class",
    [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU],
)
def test_shapes_on_the_meta_device(layer_class):
    layer = layer_class(3, 4, device="meta")
    output, _ = layer(torch.randn(5, 6, 3, device="meta"))
    assert output.shape == (5, 6, 4)
    output.sum().backward()
    assert layer.weight_hh_l0.grad.shape == layer.weight_hh_l0.shape


@pytest.mark.parametrize(
    ("layer_class", "training", "backend"),
    [
        *((layer, training, "cpu") for layer in LAYERS for training in (True, False)),
        (rbn.BatchNormLSTM, True, "reference"),
        pytest.param(rbn.BatchNormRNN, True, "gpu", marks=need_triton),
        pytest.param(rbn.BatchNormGRU, True, "gpu", marks=need_triton),
    ],
)
def test_batches_of_gradients(layer_class, training, backend):
    """One after another and nested; the graph is freed afterwards, and not before."""
    torch.manual_seed(0)
    layer = layer_class(2, 3, bidirectional=backend == "cpu")
    x = torch.randn(3, 4, 2)
    layer(x)
    layer.train(training)

    def run(x):
        output, states = layer(x)
        return output.sum(2)[1:], states[0]

    with rbn.backend(backend):
        if backend != "gpu":  # which may be interpreted
            found = torch.autograd.functional.jacobian(run, x, vectorize=True)
            torch.testing.assert_close(found, torch.autograd.functional.jacobian(run, x))
        inputs = [x.requires_grad_(), *layer.parameters()]
        output, _ = layer(x)
        given = torch.randn(2, *output.shape)
        expected = [torch.autograd.grad(output, inputs, one, retain_graph=True) for one in given]
        found = torch.autograd.grad(output, inputs, given, is_grads_batched=True)
        for one, other in zip(found, zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(one, torch.stack(other))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output, inputs, given[0])


@pytest.mark.parametrize("layer_class", [rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU])
def test_vmap_in_training(layer_class):
    """With minibatch statistics that are not kept; otherwise the error says how."""
    torch.manual_seed(0)
    layer = layer_class(2, 3, dtype=torch.float64)
    x = torch.randn(5, 4, 6, 2, dtype=torch.float64)
    layer(x[0])
    before = layer.stats_h_l0.mean.clone(), layer.stats_h_l0.count.clone()

    def run(x):
        return layer(x)[0].square().sum()

    for transform in (torch.func.vmap(run), torch.func.vmap(torch.func.grad(run))):
        with pytest.raises(RuntimeError, match=r"inside rbn\.batch_statistics\(model\)"):
            transform(x)
    with rbn.batch_statistics(layer):
        found = torch.func.vmap(torch.func.grad(run))(x)
        for one, each in zip(found, x, strict=True):
            each = each.clone().requires_grad_()
            (expected,) = torch.autograd.grad(run(each), each)
            torch.testing.assert_close(one, expected)
    torch.testing.assert_close((layer.stats_h_l0.mean, layer.stats_h_l0.count), before)
