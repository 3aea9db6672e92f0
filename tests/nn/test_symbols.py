"""Symbols instead of one-hot vectors."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rbn

LAYERS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
ON_GPU = torch.cuda.is_available()


def gradients(layer, x, **options):
    layer.zero_grad()
    output, _ = layer(x, **options)
    output.square().sum().backward()
    return output.detach(), [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_as_one_hot_vectors(layer_class, batch_first, padded):
    torch.manual_seed(0)
    layer = layer_class(
        5, 4, num_layers=2, bidirectional=True, batch_first=batch_first, dtype=torch.float64
    )
    shape = (3, 7) if batch_first else (7, 3)
    symbols = torch.randint(5, shape)
    options = {"lengths": torch.tensor([7, 2, 4])} if padded else {}
    found = gradients(layer, symbols, **options)
    expected = gradients(layer, F.one_hot(symbols, 5).double(), **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layer_class", LAYERS)
def test_packed(layer_class):
    torch.manual_seed(0)
    layer, symbols = layer_class(5, 4, bidirectional=True), torch.randint(5, (7, 3))
    lengths = torch.tensor([2, 7, 4])
    packed = pack_padded_sequence(symbols, lengths, enforce_sorted=False)
    output, states = layer(packed)
    found, kept = pad_packed_sequence(output)
    expected = layer(symbols, lengths=lengths)
    assert torch.equal(kept, lengths)
    torch.testing.assert_close((found, states), expected)
    packed = pack_padded_sequence(symbols + 1, lengths, enforce_sorted=False)
    with pytest.raises(ValueError, match="symbols from 0 to 4, got"):
        layer(packed._replace(data=packed.data + 4))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_as_one_hot_vectors_on_the_card(layer_class, padded, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    as_on_the_card(layer_class, padded, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_the_same_bits_every_time():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(27, 64, device="cuda")
    symbols = torch.randint(27, (60, 48), device="cuda")
    found = []
    for _ in range(20):
        with torch.autocast("cuda", torch.bfloat16):
            found.append(gradients(layer, symbols))
    for output, grads in found[1:]:
        assert torch.equal(output, found[0][0])
        assert all(map(torch.equal, grads, found[0][1]))


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.skipif(ON_GPU, reason="with a CUDA device the kernels run there")
@pytest.mark.parametrize("layer_class", LAYERS)
def test_as_one_hot_vectors_in_the_kernels(layer_class):
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    with rbn.backend("gpu"):
        as_on_the_card(layer_class, True, torch.uint8, "cpu")


def as_on_the_card(layer_class, padded, dtype, device):
    """Outputs and gradients in float32; the input terms of both are equal to the last bit."""
    torch.manual_seed(0)
    layer = layer_class(5, 4, bidirectional=True, batch_first=True, device=device)
    symbols = torch.randint(4, (3, 6), device=device)  # the last symbol never occurs
    options = {"lengths": torch.tensor([6, 2, 4])} if padded else {}
    found = gradients(layer, symbols.to(dtype), **options)
    expected = gradients(layer, F.one_hot(symbols, 5).float(), **options)
    # Sums of some twenty rows in another order; normalizing a batch of three may magnify earlier
    # rounding differences.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert layer.weight_ih_l0.grad[:, 4].eq(0).all()


def test_any_integers_and_no_batch():
    layer = rbn.LSTM(5, 4).eval()
    symbols = torch.randint(5, (7,))
    expected, _ = layer(F.one_hot(symbols, 5).float())
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        torch.testing.assert_close(layer(symbols.to(dtype))[0], expected)


def test_under_autocast():
    layer = rbn.BatchNormLSTM(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = layer(torch.randint(5, (7, 3)))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert layer.weight_ih_l0.grad.dtype == torch.float32


@pytest.mark.parametrize("bad", [-1, 5])
def test_unknown_symbols_are_named(bad):
    symbols = torch.tensor([[0, bad], [1, 2]])
    with pytest.raises(ValueError, match="symbols from 0 to 4, got"):
        rbn.LSTM(5, 4)(symbols)


def test_integers_with_features_are_refused():
    with pytest.raises(ValueError, match=r"dtype \(torch.int64\) .* \(torch.float32\)"):
        rbn.LSTM(5, 4)(torch.zeros(7, 3, 5, dtype=torch.int64))
