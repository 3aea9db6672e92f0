"""The language model: a text in pieces gives the same results as in one piece."""

import pytest
import torch
import torch.nn.functional as F

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
    with pytest.raises(TypeError, match=r"layer.*input_size.*hidden_size"):
        LanguageModel(torch.nn.ReLU())
    with pytest.raises(ValueError, match="one direction"):
        LanguageModel(rbn.LSTM(7, 5, bidirectional=True))


@pytest.mark.parametrize("hooked", [False, True])
def test_targets_of_any_integers_that_are_symbols(hooked):
    model = LanguageModel(rbn.LSTM(7, 5, dtype=torch.float64))
    if hooked:
        model.softmax.register_forward_hook(lambda *_: None)
    text = torch.randint(0, 7, (6, 3))
    expected, _ = model(text, targets=text)
    for dtype in (torch.int32, torch.uint8):
        torch.testing.assert_close(model(text, targets=text.to(dtype))[0], expected)
    text[2, 1] = -100
    with pytest.raises(ValueError, match=r"targets.* 0.* 6, got -100 to"):
        model(text.clamp(min=0), targets=text)


def test_dropout_between_layer_and_softmax():
    model = LanguageModel(rbn.LSTM(5, 64), dropout=0.5)
    symbols = torch.zeros(3, 2, dtype=torch.int64)
    one, other = model(symbols), model(symbols)
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1][0], other[1][0])  # the states do not change
    model.eval()
    assert torch.equal(model(symbols)[0], model.softmax(model.recurrent(symbols)[0]))


def old(model, symbols, targets, reduction):
    logits, states = model(symbols)
    loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction=reduction)
    return loss, states


def new(model, symbols, targets, reduction):
    return model(symbols, targets=targets, reduction=reduction)


def results_of(call, model, *args, backward=torch.Tensor.backward):
    torch.manual_seed(1)
    model.zero_grad()
    loss, states = call(model, *args)
    backward(loss)
    return loss, *states, *(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_loss_is_that_of_the_logits(precision, reduction):
    """Bit for bit, like Fabric wraps the model for training."""
    model = LanguageModel(rbn.BatchNormLSTM(7, 5, zoneout=(0.2, 0.2)), dropout=0.5)
    given = torch.randint(7, (20, 3)), torch.randint(7, (20, 3)), reduction
    lightning = pytest.importorskip("lightning.fabric")
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    wrapped = fabric.setup(model)
    expected, found = (
        results_of(call, wrapped, *given, backward=fabric.backward) for call in (old, new)
    )
    assert found[0].dtype == torch.float32
    assert all(map(torch.equal, found, expected))


def test_the_loss_of_other_shapes():
    one = LanguageModel(rbn.LSTM(7, 5))
    batch_first = LanguageModel(rbn.LSTM(7, 5, batch_first=True))
    for model, shape in ((one, (20,)), (batch_first, (3, 20))):
        given = torch.randint(7, shape), torch.randint(7, shape), "mean"
        assert torch.equal(old(model, *given)[0], new(model, *given)[0])
    with pytest.raises(ValueError, match=r"targets.*shape.*\[3, 20\]"):
        batch_first(torch.zeros(3, 20).long(), targets=torch.zeros(20, 3).long())


@pytest.mark.parametrize("change", ["hook", "weight norm", "another module"])
def test_the_loss_of_a_softmax_that_was_changed(change):
    model = LanguageModel(rbn.LSTM(7, 5))
    if change == "hook":
        model.softmax.register_forward_hook(lambda module, args, output: 2 * output)
    elif change == "weight norm":
        torch.nn.utils.parametrizations.weight_norm(model.softmax)
    else:
        model.softmax = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh())
    given = torch.randint(7, (9, 3)), torch.randint(7, (9, 3)), "mean"
    expected, found = (results_of(call, model, *given) for call in (old, new))
    assert all(map(torch.equal, found, expected))
