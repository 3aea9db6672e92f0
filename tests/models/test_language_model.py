"""The language model: a text in pieces is the text as a whole."""

import pytest
import torch

import rbn
from rbn.models import LanguageModel


@pytest.mark.parametrize("layer_class", [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM])
def test_a_text_in_pieces(layer_class):
    torch.manual_seed(0)
    model = LanguageModel(layer_class(7, 5, dtype=torch.float64)).double()
    text = torch.randint(7, (20, 3))
    model(text)  # statistics
    model.eval()
    whole, (h, c) = model(text)
    assert whole.shape == (20, 3, 7)
    first, states = model(text[:8])
    second, (h2, c2) = model(text[8:], states, start=8)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close((h2, c2), (h, c))


def test_refusals():
    with pytest.raises(TypeError, match="layer with an input_size and a hidden_size"):
        LanguageModel(torch.nn.ReLU())
    with pytest.raises(ValueError, match="one direction"):
        LanguageModel(rbn.LSTM(7, 5, bidirectional=True))


def test_dropout_between_layer_and_softmax():
    model = LanguageModel(rbn.LSTM(5, 64), dropout=0.5)
    symbols = torch.zeros(3, 2, dtype=torch.int64)
    one, other = model(symbols), model(symbols)
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1][0], other[1][0])  # the states are as they were
    model.eval()
    assert torch.equal(model(symbols)[0], model.softmax(model.recurrent(symbols)[0]))
