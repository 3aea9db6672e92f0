"""Numbers of symbols in place of one-hot vectors."""

import pytest
import torch
import torch.nn.functional as F

import rbn

LAYERS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN]


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
    with pytest.raises(TypeError, match=r"parameters' type torch.float32, got torch.int64"):
        rbn.LSTM(5, 4)(torch.zeros(7, 3, 5, dtype=torch.int64))
