"""Padding: every sequence gets the same results as if it were alone."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import rbn
from rbn.nn import checks
from rbn.nn.layers import padded_sequence, reverse
from rbn.ops.types import to_device

LAYERS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
GPU = torch.device("cuda")


def finals(hx):
    return hx if isinstance(hx, tuple) else (hx,)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("padding", ["exclude", "include"])
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 6), min_size=2, max_size=5), seed=st.integers(0, 2**16))
def test_evaluation_equals_the_sequences_one_by_one(layer_class, padding, lengths, seed):
    torch.manual_seed(seed)
    normalized = layer_class in (rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU)
    options = {"padding": padding} if normalized else {}
    layer = layer_class(3, 4, num_layers=2, bidirectional=True, dtype=torch.float64, **options)
    layer(torch.randn(4, 5, 3, dtype=torch.float64))  # shorter than the longest: beyond T_max
    layer.eval()
    x = torch.randn(6, len(lengths), 3, dtype=torch.float64)
    output, hx = layer(x, lengths=lengths)
    for b, n in enumerate(lengths):
        alone, alone_hx = layer(x[:n, b : b + 1])
        torch.testing.assert_close(output[:n, b], alone[:, 0], **CLOSE)
        assert (output[n:, b] == 0).all()
        for together, single in zip(finals(hx), finals(alone_hx), strict=True):
            torch.testing.assert_close(together[:, b], single[:, 0], **CLOSE)


@pytest.mark.parametrize("layer_class", LAYERS)
def test_what_the_padding_holds_does_not_matter(layer_class):
    torch.manual_seed(0)
    layer = layer_class(3, 4, num_layers=2, bidirectional=True)
    x, lengths = torch.randn(6, 4, 3), torch.tensor([6, 2, 1, 5])
    padded = torch.arange(6)[:, None] >= lengths
    results = []
    for filler in (0.0, 1e30, float("nan"), float("inf")):
        filled = x.masked_fill(padded[:, :, None], filler).requires_grad_()
        layer.zero_grad()
        output, hx = layer(filled, lengths=lengths)
        (output.square().sum() + finals(hx)[-1].sum()).backward()
        grads = [p.grad for p in layer.parameters()]
        assert (filled.grad[padded] == 0).all()
        results.append([output.detach(), *(s.detach() for s in finals(hx)), filled.grad, *grads])
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("layer_class", [rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU])
def test_excluding_and_including_padded_rows(layer_class):
    """Included rows carry their state: step 1 has new states in rows 0 and 1, row 2's is old."""
    layers = {}
    for padding in ("exclude", "include"):
        torch.manual_seed(0)
        layers[padding] = layer_class(3, 4, padding=padding)
    x = torch.randn(2, 3, 3)
    for layer in layers.values():
        layer(x, lengths=[2, 2, 1])
    wx = x[1] @ layers["include"].weight_ih_l0.T
    everyone, valid = layers["include"].stats_x_l0.mean[1], layers["exclude"].stats_x_l0.mean[1]
    torch.testing.assert_close(everyone, wx.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(valid, wx[:2].mean(0), rtol=1e-5, atol=1e-6)
    h = layers["include"](x[:1])[0][0]
    recurrent = h @ layers["include"].weight_hh_l0.T
    for padding, rows in (("include", recurrent), ("exclude", recurrent[:2])):
        found = layers[padding].stats_h_l0.mean[1]
        torch.testing.assert_close(found, rows.mean(0), rtol=1e-4, atol=1e-6)


def test_without_padding_both_ways_are_the_same():
    torch.manual_seed(0)
    a = rbn.BatchNormLSTM(3, 4, padding="include")
    b = rbn.BatchNormLSTM(3, 4)
    b.load_state_dict(a.state_dict())
    x = torch.randn(5, 4, 3)
    found = a(x, lengths=[5] * 4)[0]
    torch.testing.assert_close(found, b(x)[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(b(x, lengths=[5] * 4)[0], b(x)[0], rtol=1e-6, atol=1e-7)


def test_the_order_of_the_rows_does_not_matter():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 4, 2, bidirectional=True, dtype=torch.float64)
    x, lengths = torch.randn(6, 5, 3, dtype=torch.float64), torch.tensor([3, 6, 1, 6, 2])
    order = torch.tensor([4, 2, 0, 3, 1])
    a, a_hx = layer(x, lengths=lengths)
    b, b_hx = layer(x[:, order], lengths=lengths[order])
    torch.testing.assert_close(a[:, order], b, **CLOSE)
    for first, second in zip(a_hx, b_hx, strict=True):
        torch.testing.assert_close(first[:, order], second, **CLOSE)


@pytest.mark.parametrize("lengths", [[4, 2], (4, 2), torch.tensor([4, 2], dtype=torch.int32)])
def test_lengths_may_be_any_integers(lengths):
    layer = rbn.BatchNormLSTM(3, 4)
    expected, _ = layer(torch.ones(4, 2, 3), lengths=torch.tensor([4, 2]))
    assert torch.equal(layer(torch.ones(4, 2, 3), lengths=lengths)[0], expected)


def test_lengths_on_the_cpu_can_be_traced_for_a_gpu(monkeypatch):
    """Tracers have no `pin_memory`."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *to, **options: (*to, options))
    assert to_device(torch.tensor([4, 2]), GPU) == (GPU, {})


def test_only_the_unpadded_part_is_reversed():
    x = torch.tensor([[1, 4], [2, 5], [3, 0]]).float()[:, :, None]
    assert reverse(x, torch.tensor([3, 2]))[:, :, 0].tolist() == [[3, 5], [2, 4], [1, 0]]
    assert reverse(x, None)[:, :, 0].tolist() == [[3, 0], [2, 5], [1, 4]]


def test_the_backward_direction_is_the_forward_one_on_reversed_sequences():
    torch.manual_seed(0)
    both = rbn.BatchNormLSTM(3, 4, bidirectional=True, dtype=torch.float64)
    one = rbn.BatchNormLSTM(3, 4, dtype=torch.float64)
    for name, parameter in one.named_parameters():
        parameter.data.copy_(both.get_parameter(name + "_reverse"))
    x, lengths = torch.randn(6, 4, 3, dtype=torch.float64), torch.tensor([6, 2, 3, 6])
    output, (h, _) = both(x, lengths=lengths)
    expected, (h_one, _) = one(reverse(x, lengths), lengths=lengths)
    torch.testing.assert_close(output[:, :, 4:], reverse(expected, lengths), **CLOSE)
    torch.testing.assert_close(h[1], h_one[0], **CLOSE)
    torch.testing.assert_close(both.stats_h_l0_reverse.mean, one.stats_h_l0.mean, **CLOSE)


@pytest.mark.parametrize("sizes", [[4, 3, 3, 1], [2, 2], [1], [3]])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_packed_data_are_padded_and_packed_like_torchs(sizes, shape):
    data = torch.randn(sum(sizes), *shape, dtype=torch.float64, requires_grad=True)
    peer = data.detach().clone().requires_grad_()
    padded, lengths, pack = padded_sequence(data, torch.tensor(sizes))
    wanted, wanted_lengths = pad_packed_sequence(PackedSequence(peer, torch.tensor(sizes)))
    assert torch.equal(padded, wanted)
    assert torch.equal(lengths, wanted_lengths)
    factor = torch.randn_like(wanted)
    again = pack(padded * factor)
    assert torch.equal(again, pack_padded_sequence(wanted * factor, lengths).data)
    (again**2).sum().backward()
    (pack_padded_sequence(wanted * factor, lengths).data ** 2).sum().backward()
    torch.testing.assert_close(data.grad, peer.grad)


@pytest.mark.parametrize("layer", [rbn.BatchNormLSTM, rbn.BatchNormRNN])
@pytest.mark.parametrize("lengths", [[5, 2, 4], [3, 3, 3], [5, 1, 1], [1, 1, 1]])
@pytest.mark.parametrize("options", [{}, {"max_length": 3}, {"padding": "include"}])
def test_lengths_that_the_host_knows_record_the_same_statistics(
    layer, lengths, options, monkeypatch
):
    torch.manual_seed(1)
    ours = layer(2, 3, 2, **options).double()
    peer = copy.deepcopy(ours)
    for _ in range(3):
        x = torch.randn(5, 3, 2, dtype=torch.float64)
        ours(x, lengths=lengths)
        with monkeypatch.context() as patch:
            patch.setattr(checks, "known_lengths", lambda *_: None)
            peer(x, lengths=torch.tensor(lengths))
    found, wanted = ours.state_dict(), peer.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


def test_lengths_of_numpy_are_copied():
    torch.manual_seed(0)
    layer, x, lengths = rbn.BatchNormLSTM(2, 3), torch.randn(4, 3, 2), np.array([4, 2, 3])
    (expected,) = torch.autograd.grad(layer(x, lengths=[4, 2, 3])[0].sum(), layer.weight_hh_l0)
    output, _ = layer(x, lengths=lengths)
    lengths[:] = 4
    (found,) = torch.autograd.grad(output.sum(), layer.weight_hh_l0)
    torch.testing.assert_close(found, expected)


def test_lengths_are_read_again_after_a_change_in_place():
    lengths = torch.tensor([4, 4, 4])
    layer = rbn.BatchNormLSTM(2, 3)
    layer(torch.randn(4, 3, 2), lengths=lengths)
    lengths.fill_(2)
    layer(torch.randn(4, 3, 2), lengths=lengths)
    assert layer.stats_h_l0.count.tolist() == [2, 2, 1, 1]
    assert not lengths.__dict__  # the caller's tensor does not change
