"""Comparison with torch.nn.LSTM: names, shapes, layouts, and results where both agree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import rbn

LAYERS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
LSTMS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM]


def states_of(hx):
    return hx if isinstance(hx, tuple) else (hx,)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("batch_first", [False, True])
def test_shapes_are_those_of_torch(layer, bidirectional, layers, batch_first):
    peer_class = {rbn.BatchNormRNN: nn.RNN, rbn.BatchNormGRU: nn.GRU}.get(layer, nn.LSTM)
    options = {"num_layers": layers, "batch_first": batch_first, "bidirectional": bidirectional}
    ours, peer = layer(3, 5, **options), peer_class(3, 5, **options)
    x = torch.randn(4, 7, 3)
    output, hx = ours(x)
    expected, expected_hx = peer(x)
    assert output.shape == expected.shape
    assert [s.shape for s in states_of(hx)] == [s.shape for s in states_of(expected_hx)]
    again, _ = ours(x, hx)
    assert again.shape == expected.shape


@pytest.mark.parametrize("layer", LSTMS)
def test_weights_are_named_and_shaped_as_in_torch(layer):
    ours = dict(layer(3, 5, 2, bidirectional=True).named_parameters())
    peer = dict(nn.LSTM(3, 5, 2, bidirectional=True).named_parameters())
    for name, weight in peer.items():
        if name.startswith("weight"):
            assert ours[name].shape == weight.shape
    for suffix in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        assert ours["bias" + suffix].shape == (20,)
        assert ours["h0" + suffix].shape == ours["c0" + suffix].shape == (5,)
        assert ours["beta_c" + suffix].shape == (5,)
        if layer is not rbn.LSTM:
            assert ours["gamma_x" + suffix].shape == ours["gamma_h" + suffix].shape == (20,)
            assert ours["gamma_c" + suffix].shape == (5,)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_sequence_without_a_batch_is_a_batch_of_one(layer):
    ours = layer(3, 5, 2, bidirectional=True)
    ours(torch.randn(6, 4, 3))  # statistics to evaluate with
    ours.eval()
    x = torch.randn(6, 3)
    output, hx = ours(x)
    batched, batched_hx = ours(x[:, None])
    torch.testing.assert_close(output, batched[:, 0], rtol=0, atol=0)
    for one, many in zip(states_of(hx), states_of(batched_hx), strict=True):
        assert one.shape == (4, 5)
        torch.testing.assert_close(one, many[:, 0], rtol=0, atol=0)
    restarted, _ = ours(x, hx)
    rebatched, _ = ours(x[:, None], batched_hx)
    torch.testing.assert_close(restarted, rebatched[:, 0], rtol=0, atol=0)


@pytest.mark.parametrize("layer", LAYERS)
def test_batch_first_only_changes_the_layout(layer):
    torch.manual_seed(0)
    time_first = layer(3, 5)
    batch_first = layer(3, 5, batch_first=True)
    batch_first.load_state_dict(time_first.state_dict())
    x, lengths = torch.randn(6, 4, 3), torch.tensor([6, 2, 5, 6])
    a, _ = time_first(x, lengths=lengths)
    b, _ = batch_first(x.transpose(0, 1), lengths=lengths)
    torch.testing.assert_close(a, b.transpose(0, 1), rtol=0, atol=0)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    steps=st.integers(1, 6),
    batch=st.integers(1, 5),
    inputs=st.integers(1, 4),
    hidden=st.integers(1, 5),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_lstm_is_torchs_lstm(steps, batch, inputs, hidden, layers, bidirectional, bias, seed):
    """Outputs, states and gradients, in float64 up to rounding: the order of sums differs."""
    torch.manual_seed(seed)
    peer = nn.LSTM(inputs, hidden, layers, bias, bidirectional=bidirectional, dtype=torch.float64)
    ours = rbn.LSTM.from_lstm(peer)
    x = torch.randn(steps, batch, inputs, dtype=torch.float64, requires_grad=True)
    rows = layers * (2 if bidirectional else 1)
    hx = tuple(torch.randn(rows, batch, hidden, dtype=torch.float64) for _ in range(2))
    for states in (None, hx):
        y, (h, c) = ours(x, states)
        expected, (h_expected, c_expected) = peer(x, states)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(h, h_expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(c, c_expected, rtol=1e-12, atol=1e-13)
        weight = torch.randn_like(y)
        found = torch.autograd.grad((y * weight).sum() + c.sum(), [x, ours.weight_hh_l0])
        wanted = torch.autograd.grad(
            (expected * weight).sum() + c_expected.sum(), [x, peer.weight_hh_l0]
        )
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences_in_and_out(enforce_sorted, bidirectional):
    torch.manual_seed(1)
    peer = nn.LSTM(3, 5, 2, bidirectional=bidirectional, dtype=torch.float64)
    ours = rbn.LSTM.from_lstm(peer)
    lengths = torch.tensor([6, 5, 5, 1] if enforce_sorted else [5, 1, 6, 5])
    packed = pack_padded_sequence(
        torch.randn(6, 4, 3, dtype=torch.float64), lengths, enforce_sorted=enforce_sorted
    )
    rows = 4 if bidirectional else 2
    hx = tuple(torch.randn(rows, 4, 5, dtype=torch.float64) for _ in range(2))
    for states in (None, hx):
        found, found_hx = ours(packed, states)
        wanted, wanted_hx = peer(packed, states)
        assert isinstance(found, PackedSequence)
        assert torch.equal(found.batch_sizes, wanted.batch_sizes)
        if enforce_sorted:
            assert found.sorted_indices is None
        else:
            assert torch.equal(found.sorted_indices, wanted.sorted_indices)
            assert torch.equal(found.unsorted_indices, wanted.unsorted_indices)
        torch.testing.assert_close(found.data, wanted.data, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found_hx, wanted_hx, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_packed_sequence_is_a_padded_one_with_lengths(layer):
    ours = layer(3, 5)
    x, lengths = torch.randn(6, 4, 3), torch.tensor([2, 6, 1, 4])
    output, hx = ours(x, lengths=lengths)
    packed, packed_hx = ours(pack_padded_sequence(x, lengths, enforce_sorted=False))
    repacked = pack_padded_sequence(output, lengths, enforce_sorted=False)
    torch.testing.assert_close(packed.data, repacked.data, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(packed_hx, hx, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layer", LSTMS)
@pytest.mark.parametrize("bias", [True, False])
def test_from_lstm_starts_from_its_weights(layer, bias):
    peer = nn.LSTM(3, 5, 2, bias=bias, batch_first=True, dropout=0.25, bidirectional=True).eval()
    ours = layer.from_lstm(peer)
    assert (ours.num_layers, ours.batch_first, ours.dropout, ours.bidirectional) == (
        2,
        True,
        0.25,
        True,
    )
    assert not ours.training
    for suffix in ("_l0", "_l0_reverse", "_l1", "_l1_reverse"):
        for name in ("weight_ih", "weight_hh"):
            assert torch.equal(getattr(ours, name + suffix), getattr(peer, name + suffix))
        if bias:
            both = getattr(peer, "bias_ih" + suffix) + getattr(peer, "bias_hh" + suffix)
            assert torch.equal(getattr(ours, "bias" + suffix), both)


def test_from_lstm_takes_options_and_refuses_what_it_cannot_copy():
    ours = rbn.BatchNormLSTM.from_lstm(nn.LSTM(3, 5), gamma=0.3, max_length=9)
    assert torch.equal(ours.gamma_h_l0, torch.full((20,), 0.3))
    assert ours.max_length == 9
    with pytest.raises(ValueError, match="proj_size=2"):
        rbn.LSTM.from_lstm(nn.LSTM(3, 5, proj_size=2))
    with pytest.raises(TypeError, match=r"torch\.nn\.LSTM, got GRU"):
        rbn.LSTM.from_lstm(nn.GRU(3, 5))


@pytest.mark.parametrize("layer_class", [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM])
def test_proj_size_may_be_given_as_0_only(layer_class):
    assert layer_class(3, 5, proj_size=0).proj_size == 0
    with pytest.raises(ValueError, match=r"proj_size must be 0, got 2.*" + layer_class.__name__):
        layer_class(3, 5, proj_size=2)


@pytest.mark.parametrize("bias", [True, False])
def test_to_lstm_is_the_same_network(bias):
    torch.manual_seed(2)
    ours = rbn.LSTM(3, 5, 2, bias, bidirectional=True, dtype=torch.float64)
    if bias:
        nn.init.normal_(ours.bias_l1_reverse)
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    peer = ours.to_lstm()
    torch.testing.assert_close(peer(x)[0], ours(x)[0], rtol=1e-12, atol=1e-13)
    back = rbn.LSTM.from_lstm(peer)
    torch.testing.assert_close(back(x)[0], ours(x)[0], rtol=1e-12, atol=1e-13)


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


@pytest.mark.parametrize(
    ("name", "message"),
    [("beta_c_l0", "cell bias, but beta_c_l0"), ("c0_l0", "learned initial state, but c0_l0")],
)
def test_to_lstm_refuses_what_torch_has_not(name, message):
    ours = rbn.LSTM(3, 5)
    ours.get_parameter(name).data.fill_(0.1)
    with pytest.raises(ValueError, match=message):
        ours.to_lstm()
    with pytest.raises(ValueError, match="zoneout"):
        rbn.LSTM(3, 5, zoneout=(0.1, 0.0)).to_lstm()
    ours = rbn.LSTM(3, 5)
    torch.nn.utils.parametrize.register_parametrization(ours, name, Doubled())
    ours.to_lstm()
    setattr(ours, name, torch.ones(5))
    with pytest.raises(ValueError, match=message):
        ours.to_lstm()


@pytest.mark.parametrize("layer", LAYERS)
def test_given_states_override_the_learned_ones(layer):
    ours = layer(3, 5, hidden_noise=1.0)  # noise only affects the layer's own initial state
    x = torch.randn(6, 4, 3)
    _, given = ours(x)
    a, _ = ours(x, given)
    for name, parameter in ours.named_parameters():
        if name.startswith(("h0", "c0")):
            parameter.data.normal_()
    b, _ = ours(x, given)
    assert torch.equal(a, b)
    c, _ = ours(x)
    assert not torch.allclose(a, c)


def test_given_states_are_given_in_torchs_order_of_layers_and_directions():
    torch.manual_seed(3)
    peer = nn.LSTM(3, 5, 3, bidirectional=True, dtype=torch.float64)
    ours = rbn.LSTM.from_lstm(peer)
    hx = tuple(torch.randn(6, 4, 5, dtype=torch.float64) for _ in range(2))
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x, hx), peer(x, hx), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layer", LAYERS)
def test_code_for_torch_can_call_flatten_parameters_and_print(layer):
    ours = layer(3, 5, num_layers=2, batch_first=True, dropout=0.5, bidirectional=True)
    assert ours.flatten_parameters() is None
    options = "3, 5, num_layers=2, batch_first=True, dropout=0.5, bidirectional=True"
    assert repr(ours) == f"{layer.__name__}({options})"


@pytest.mark.parametrize("layer", LAYERS)
def test_an_empty_batch_gives_an_empty_output(layer):
    ours = layer(3, 5, 2)
    output, hx = ours(torch.randn(6, 0, 3))
    assert output.shape == (6, 0, 5)
    assert all(s.shape == (2, 0, 5) for s in states_of(hx))
    if layer in (rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU):
        assert not ours.stats_h_l0.estimated


@pytest.mark.parametrize("layer_class", [rbn.BatchNormLSTM, rbn.LSTM, rbn.LayerNormLSTM])
def test_last_states_may_be_changed_in_place(layer_class):
    """Users set the states of rows whose sequence has ended to zero."""
    layer, x = layer_class(3, 4), torch.randn(6, 5, 3)
    output, (h, c) = layer(x)
    h[:, 0] = 0
    c[:, 0].zero_()
    output.sum().backward()
    found = layer.weight_hh_l0.grad
    layer.zero_grad()
    layer(x)[0].sum().backward()
    torch.testing.assert_close(found, layer.weight_hh_l0.grad, rtol=0, atol=0)


@pytest.mark.parametrize(
    "layer_class", [torch.nn.LSTM, rbn.LSTM, rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
)
def test_an_empty_batch_has_gradients_of_zero(layer_class):
    layer = layer_class(3, 4)
    output, _ = layer(torch.randn(6, 0, 3))
    output.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() == 0, name


CELLS = [
    rbn.BatchNormLSTMCell,
    rbn.LSTMCell,
    rbn.LayerNormLSTMCell,
    rbn.BatchNormRNNCell,
    rbn.BatchNormGRUCell,
]


@pytest.mark.parametrize("looked_at", ["output", "states"])
@pytest.mark.parametrize("initial_state", ["learned", "zeros"])
@pytest.mark.parametrize("make", [*LAYERS, *CELLS])
def test_the_graph_goes_through_an_empty_batch(make, initial_state, looked_at):
    """As with torch's: inputs and states get gradients, whatever the loss uses."""
    layer, below = make(3, 4, initial_state=initial_state), torch.nn.Linear(2, 3)
    cell = make in CELLS
    x = below(torch.zeros((0, 2) if cell else (6, 0, 2)))
    shape = (0, 4) if cell else (1, 0, 4)
    hx = tuple(torch.zeros(shape, requires_grad=True) for _ in layer.states)
    found = layer(x, hx if len(hx) > 1 else hx[0])
    output, states = (found, found) if cell else found
    of = states_of(output if looked_at == "output" else states)[-1]
    of.sum().backward(retain_graph=True)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    assert all(not tensor.grad.any() for tensor in (*below.parameters(), *hx))
    layer.requires_grad_(False)
    below.zero_grad()
    found = layer(below(torch.zeros((0, 2) if cell else (6, 0, 2))))
    states_of(found if cell else found[0])[0].sum().backward()
    assert not below.weight.grad.any()


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (rbn.LSTM(3, 4), "LSTM(3, 4)"),
        (
            rbn.LSTM(3, 4, 2, bias=False, dropout=0.1),
            "LSTM(3, 4, num_layers=2, bias=False, dropout=0.1)",
        ),
        (rbn.LSTM(3, 4, zoneout=(0.5, 0.05)), "LSTM(3, 4, zoneout=(0.5, 0.05))"),
        (rbn.LSTMCell(3, 4, initial_state="zeros"), "LSTMCell(3, 4, initial_state='zeros')"),
        (rbn.LayerNormLSTM(3, 4, batch_first=True), "LayerNormLSTM(3, 4, batch_first=True)"),
    ],
)
def test_what_is_printed_of_a_layer(layer, expected):
    assert str(layer) == expected


@pytest.mark.parametrize(
    "layer_class",
    [rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU, rbn.BatchNormLSTMCell],
)
def test_what_is_printed_of_a_normalized_layer(layer_class):
    name = layer_class.__name__
    assert str(layer_class(3, 4)) == f"{name}(3, 4)"
    options = {"eps": 0.001, "momentum": None, "ablations": ["shared_stats"]}
    shown = "3, 4, eps=0.001, momentum=None, ablations=('shared_stats',)"
    assert str(layer_class(3, 4, **options)) == f"{name}({shown})"


def test_another_default_device():
    """Tensors of a layer on the CPU stay there, whatever the default device is."""
    x, lengths = torch.randn(6, 5, 3), [6, 5, 4, 3, 2]
    layer = rbn.LSTM(3, 4)
    expected = layer(x, lengths=lengths)[0]
    with torch.device("meta"):
        found = layer(x, lengths=lengths)[0]
    assert torch.equal(found, expected)


def test_states_of_an_empty_batch_under_autocast():
    for rows in (0, 2):
        with torch.autocast("cpu", torch.bfloat16):
            output, states = rbn.LSTM(3, 4)(torch.randn(6, rows, 3))
        assert {t.dtype for t in (output, *states)} == {torch.bfloat16}
