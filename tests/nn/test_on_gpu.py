"""The layers on a CUDA device match the CPU."""

import copy

import pytest
import torch

import rbn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("padded", [False, True])
def test_the_same_numbers_as_on_the_cpu(layer_class, padded):
    torch.manual_seed(0)
    layer = layer_class(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64)
    twin = copy.deepcopy(layer).cuda()
    x = torch.randn(6, 5, 3, dtype=torch.float64)
    lengths = torch.tensor([6, 1, 4, 6, 2]) if padded else None
    for given in (lengths, None if lengths is None else lengths.cuda()):
        layer.zero_grad()
        twin.zero_grad()
        expected, _ = layer(x, lengths=lengths)
        found, _ = twin(x.cuda(), lengths=given)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-11)
        expected.square().sum().backward()
        found.square().sum().backward()
        for name, parameter in layer.named_parameters():
            wanted = twin.get_parameter(name).grad.cpu()
            torch.testing.assert_close(wanted, parameter.grad, rtol=1e-7, atol=1e-9)
    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(twin.get_buffer(name).cpu(), buffer, rtol=1e-9, atol=1e-11)
    expected, found = layer.eval()(x)[0], twin.eval()(x.cuda())[0]
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", [1, 3, 8, 9, 27])
def test_rows_of_the_input_that_are_no_multiple_of_16_bytes(features, dtype):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(features, 8, dtype=torch.float64)
    twin = copy.deepcopy(layer).to("cuda", dtype)
    x = torch.randn(6, 33, features, dtype=torch.float64).to(dtype).double()
    ours, theirs = x.to("cuda", dtype).requires_grad_(), x.requires_grad_()
    expected, found = layer(theirs)[0], twin(ours)[0]
    assert found.dtype == dtype
    expected.square().sum().backward()
    found.float().square().sum().backward()
    # Some tens of roundings in `dtype` lie between the two; gradients are compared as vectors.
    unit = torch.finfo(dtype).eps
    assert (found.double().cpu() - expected).abs().max() < 16 * unit
    pairs = [(ours.grad, theirs.grad)]
    pairs += [(twin.get_parameter(n).grad, p.grad) for n, p in layer.named_parameters()]
    for one, other in pairs:
        assert one.shape == other.shape
        assert (one.double().cpu() - other).norm() < 32 * unit * max(1.0, other.norm().item())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("layer_class", LAYERS)
def test_no_call_makes_the_host_wait(layer_class):
    zoneout = 0.1 if len(layer_class.states) == 1 else (0.1, 0.1)
    layer = layer_class(3, 4, num_layers=2, zoneout=zoneout).cuda()
    x, lengths = torch.randn(6, 5, 3, device="cuda"), torch.tensor([6, 1, 4, 5, 2])
    layer(x)  # grows the statistics
    for training in (True, False):
        layer.train(training)  # eval() waits once after training: it refreshes the statistics
        given = lengths if training else lengths.cuda()  # in training the host reads them
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x, lengths=given)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layer_class", LAYERS)
def test_one_graph_takes_lengths_from_the_cpu(layer_class):
    layer = layer_class(3, 4).cuda()
    x, lengths = torch.randn(6, 5, 3, device="cuda"), torch.tensor([6, 1, 4, 5, 2])
    layer(x)
    layer.eval()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected, found = layer(x, lengths=lengths)[0], compiled(x, lengths=lengths)[0]
    torch.testing.assert_close(found, expected)


def test_population_statistics_leave_the_random_state_alone():
    layer = rbn.BatchNormLSTM(3, 4, hidden_noise=0.1).cuda()
    state = torch.cuda.get_rng_state()
    rbn.update_population_stats(layer, [torch.randn(6, 5, 3)], device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_masks_of_an_estimate_leave_the_random_states_alone():
    layer = rbn.BatchNormLSTM(3, 4, zoneout=(0.5, 0.3)).cuda()
    x = torch.randn(6, 40, 3, device="cuda")
    found = []
    for seed in (1, 2):
        layer.train()
        layer.recent_calls.clear()
        layer(x)
        torch.manual_seed(seed)
        before = torch.get_rng_state(), torch.cuda.get_rng_state()
        layer.eval()
        after = torch.get_rng_state(), torch.cuda.get_rng_state()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        found.append(layer.stats_h_l0.var.clone())
    assert torch.equal(*found)


def test_the_wrong_device_is_named():
    with pytest.raises(RuntimeError, match=r"cuda:0.*cpu"):
        rbn.BatchNormLSTM(3, 4)(torch.randn(6, 5, 3, device="cuda"))
    with pytest.raises(RuntimeError, match=r"input .*cuda"), rbn.backend("cpu"):
        rbn.BatchNormLSTM(3, 4).cuda()(torch.randn(6, 5, 3, device="cuda"))


@pytest.mark.parametrize(
    ("cell_class", "options"),
    [
        (rbn.LSTMCell, {}),
        (rbn.LayerNormLSTMCell, {}),
        (rbn.BatchNormRNNCell, {"nonlinearity": "relu"}),
        (rbn.BatchNormGRUCell, {"zoneout": 0.2}),
        (rbn.BatchNormLSTMCell, {"zoneout": (0.1, 0.2)}),
        (rbn.BatchNormLSTMCell, {"ablations": ("joint_terms", "pass_normalized_cell")}),
        (rbn.BatchNormLSTMCell, {"ablations": ("raw_output", "shared_stats"), "bias": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 3])
def test_single_steps_are_those_of_the_cpu(cell_class, options, batch):
    torch.manual_seed(0)
    cell = cell_class(5, 7, dtype=torch.float64, **options)
    for step in range(4):
        cell(torch.randn(6, 5, dtype=torch.float64), None, step)
    cell.eval()
    twin = copy.deepcopy(cell).cuda()
    x = torch.randn(batch, 5, dtype=torch.float64)
    for mode in (torch.no_grad, torch.enable_grad):
        wanted = found = None
        with mode():
            for step in (0, 1, 3, 8):
                wanted = cell(x, wanted, step)
                found = twin(x.cuda(), found, step)
        pairs = zip(wanted, found, strict=True) if isinstance(wanted, tuple) else [(wanted, found)]
        for one, other in pairs:
            torch.testing.assert_close(other.cpu(), one, rtol=1e-9, atol=1e-11)
    for states in (wanted, found):
        (states[0] if isinstance(states, tuple) else states).square().sum().backward()
    for name, parameter in cell.named_parameters():
        if parameter.grad is not None:
            grad = twin.get_parameter(name).grad.cpu()
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("ablations", [(), ("shared_stats",), ("joint_terms",), ("raw_output",)])
@pytest.mark.parametrize("batch", [1, 9])
def test_a_folded_layer_is_the_layer(ablations, batch):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(5, 16, 2, bidirectional=True, ablations=ablations, device="cuda")
    layer(torch.randn(6, 20, 5, device="cuda"))
    folded = rbn.fold(layer.eval())
    x = torch.randn(9, batch, 5, device="cuda")
    lengths = torch.randint(1, 10, (batch,))
    with torch.no_grad():
        for given in (None, lengths):
            # Products may use tf32, with 10 bits, and scales reach 0.1 / sqrt(eps) = 32.
            wanted, found = layer(x, lengths=given)[0], folded(x, lengths=given)[0]
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        double = copy.deepcopy(layer).double()
        found = rbn.fold(double)(x.double(), lengths=lengths)[0]
        wanted = double(x.double(), lengths=lengths)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "make", [rbn.BatchNormLSTM, rbn.LSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
)
def test_batches_of_gradients(make):
    """All at once, although the backward pass runs in a separate thread."""
    layer, x = make(3, 64).cuda(), torch.randn(5, 6, 3, device="cuda", requires_grad=True)
    inputs = [x, *layer.parameters()]
    output, _ = layer(x)
    given = torch.randn(3, *output.shape, device="cuda")
    expected = [torch.autograd.grad(output, inputs, one, retain_graph=True) for one in given]
    found = torch.autograd.grad(output, inputs, given, is_grads_batched=True)
    for one, other in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(other))
