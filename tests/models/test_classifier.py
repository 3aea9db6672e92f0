"""The sequence classifier."""

import pytest
import torch
from torch import nn

import rbn
from rbn.models import SequenceClassifier

LAYERS = [
    rbn.LSTM,
    rbn.BatchNormLSTM,
    rbn.LayerNormLSTM,
    rbn.BatchNormRNN,
    rbn.BatchNormGRU,
    nn.LSTM,
    nn.GRU,
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.__module__}.{layer.__name__}")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_logits_come_from_the_last_layers_final_state(layer: type, bidirectional: bool) -> None:
    torch.manual_seed(0)
    recurrent = layer(3, 5, num_layers=2, bidirectional=bidirectional)
    model = SequenceClassifier(recurrent, 4)
    x = torch.randn(7, 6, 3)
    logits = model(x)
    assert logits.shape == (6, 4)
    output, _ = recurrent(x)
    # The final step is the last one forward, the first one backward.
    final = output[-1]
    if bidirectional:
        final = torch.cat([output[-1, :, :5], output[0, :, 5:]], dim=-1)
    torch.testing.assert_close(logits, model.classifier(final), rtol=0, atol=0)


def test_lengths_choose_each_rows_final_state() -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(rbn.LSTM(3, 5), 4)
    x = torch.randn(7, 2, 3)
    logits = model(x, lengths=torch.tensor([7, 3]))
    torch.testing.assert_close(logits[0], model(x[:, :1])[0])
    torch.testing.assert_close(logits[1], model(x[:3, 1:])[0])


def test_start_of_the_classifier() -> None:
    model = SequenceClassifier(rbn.LSTM(3, 8), 4)
    weight = model.classifier.weight
    # float32: a product of orthonormal rows is the identity to a few ulps.
    torch.testing.assert_close(weight @ weight.T, torch.eye(4), rtol=0, atol=1e-5)
    assert not model.classifier.bias.any()


def test_gradients_reach_every_parameter() -> None:
    model = SequenceClassifier(rbn.LSTM(3, 5), 4)
    model(torch.randn(7, 6, 3)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"layer.*hidden_size.* got Linear"):
        SequenceClassifier(nn.Linear(3, 5), 4)
    with pytest.raises(ValueError, match=r"classes.* 2, got 1"):
        SequenceClassifier(rbn.LSTM(3, 5), 1)
    with pytest.raises(TypeError, match=r"classes.*integer, got float"):
        SequenceClassifier(rbn.LSTM(3, 5), 2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_classifier_has_the_layers_type_and_device(dtype: torch.dtype) -> None:
    model = SequenceClassifier(rbn.LSTM(3, 5, dtype=dtype), 4)
    assert model(torch.randn(6, 2, 3, dtype=dtype)).dtype == dtype
    assert SequenceClassifier(rbn.LSTM(3, 5, device="meta"), 4).classifier.weight.is_meta


def test_dropout_of_the_final_state() -> None:
    model = SequenceClassifier(rbn.LSTM(1, 64), 3, dropout=0.5)
    x = torch.randn(4, 2, 1)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model.classifier(model.recurrent(x)[1][0][-1]))
