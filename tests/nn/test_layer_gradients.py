"""gradcheck of every layer in float64, over all its parameters and its input."""

import pytest
import torch
from torch.func import functional_call

import rbn

CASES = {
    "bn-lstm": (rbn.BatchNormLSTM, {}, False, "train"),
    "bn-lstm-lengths": (rbn.BatchNormLSTM, {}, True, "train"),
    "bn-lstm-include": (rbn.BatchNormLSTM, {"padding": "include"}, True, "train"),
    "bn-lstm-sequence": (rbn.BatchNormLSTM, {"input_stats": "sequence"}, True, "train"),
    "bn-lstm-stack": (rbn.BatchNormLSTM, {"num_layers": 2, "bidirectional": True}, True, "train"),
    "bn-lstm-eval": (rbn.BatchNormLSTM, {"zoneout": (0.2, 0.1)}, True, "eval"),
    "bn-lstm-batch": (rbn.BatchNormLSTM, {"zoneout": (0.2, 0.1)}, True, "batch"),
    "bn-lstm-joint": (rbn.BatchNormLSTM, {"ablations": ["joint_terms"]}, False, "train"),
    "bn-lstm-passed": (rbn.BatchNormLSTM, {"ablations": ["pass_normalized_cell"]}, False, "train"),
    "bn-lstm-raw": (rbn.BatchNormLSTM, {"ablations": ["raw_output"]}, False, "train"),
    "lstm": (rbn.LSTM, {"num_layers": 2}, True, "train"),
    "ln-lstm": (rbn.LayerNormLSTM, {"bidirectional": True}, True, "train"),
    "bn-rnn-tanh": (rbn.BatchNormRNN, {"num_layers": 2}, True, "train"),
    "bn-gru": (rbn.BatchNormGRU, {"bidirectional": True}, True, "train"),
    "bn-gru-eval": (rbn.BatchNormGRU, {"zoneout": 0.2}, True, "eval"),
    "bn-rnn-relu": (rbn.BatchNormRNN, {"nonlinearity": "relu"}, True, "train"),
}


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    layer_class, options, padded, mode = CASES[case]
    torch.manual_seed(0)
    units = 1 if case == "bn-lstm-stack" else 2  # it has four times as many parameters
    layer = layer_class(2, units, dtype=torch.float64, **options)
    for name, parameter in layer.named_parameters():
        if not name.startswith("weight"):
            parameter.data.uniform_(0.3, 1.0)
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([3, 1, 3, 2]) if padded else None
    layer(x.detach(), lengths=lengths)
    if mode != "train":
        layer.eval()
    names = [name for name, _ in layer.named_parameters()]
    parameters = [p.detach().requires_grad_() for p in layer.parameters()]

    def run(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        output, states = functional_call(layer, given, (x,), {"lengths": lengths})
        return (output, *(states if isinstance(states, tuple) else (states,)))

    if mode == "batch":
        with rbn.batch_statistics(layer):
            assert torch.autograd.gradcheck(run, (x, *parameters))
    else:
        assert torch.autograd.gradcheck(run, (x, *parameters))


def test_a_shared_initial_state_has_no_effect_under_batch_statistics():
    """W_h h0 is constant over the batch, so its normalization removes it; c0 stays."""
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(2, 4, dtype=torch.float64)
    x = torch.randn(5, 6, 2, dtype=torch.float64)
    before, _ = layer(x)
    layer.h0_l0.data.normal_()
    after, _ = layer(x)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-14)
    after.square().sum().backward()
    assert layer.h0_l0.grad.abs().max() < 1e-14
    assert layer.c0_l0.grad.abs().max() > 1e-6
    layer.c0_l0.data.normal_()
    moved, _ = layer(x)
    assert not torch.allclose(moved, before)
    layer.eval()  # with population statistics, h0 does matter
    a, _ = layer(x)
    layer.h0_l0.data.normal_()
    b, _ = layer(x)
    assert not torch.allclose(a, b)
