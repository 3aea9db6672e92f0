"""Initialization of the layers."""

import pytest
import torch

import rbn
from rbn import init


def test_layers_start_as_in_the_paper():
    layer = rbn.BatchNormLSTM(3, 4, 2, bidirectional=True)
    for suffix in ("_l0", "_l1_reverse"):
        weight = layer.get_parameter("weight_hh" + suffix)
        torch.testing.assert_close(weight.T @ weight, torch.eye(4), rtol=0, atol=1e-5)
        assert layer.get_parameter("bias" + suffix).tolist() == [0] * 4 + [1] * 4 + [0] * 8
        for name in ("gamma_x", "gamma_h", "gamma_c"):
            assert (layer.get_parameter(name + suffix) == 0.1).all()
        for name in ("beta_c", "h0", "c0"):
            assert (layer.get_parameter(name + suffix) == 0).all()
    assert (rbn.LayerNormLSTM(3, 4).gamma_h_l0 == 1).all()
    assert (rbn.BatchNormRNN(3, 4).bias_l0 == 0).all()
    gru = rbn.BatchNormGRU(3, 4)
    assert (torch.cat([gru.bias_l0, gru.beta_n_l0, gru.h0_l0]) == 0).all()
    assert (torch.cat([gru.gamma_x_l0, gru.gamma_h_l0]) == 0.1).all()
    assert rbn.LSTM(3, 4).bias_l0[4:8].tolist() == [1] * 4
    assert (rbn.BatchNormLSTM(3, 4, gamma=0.7).gamma_c_l0 == 0.7).all()


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (5, 5), (16, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_orthogonal(shape, dtype):
    weight = init.orthogonal_(torch.empty(shape, dtype=dtype), gain=2.0).float()
    gram = weight.T @ weight if shape[0] >= shape[1] else weight @ weight.T
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gram, 4 * torch.eye(min(shape)), rtol=0, atol=tolerance)


def test_identity_recurrent():
    layer = rbn.BatchNormLSTM(3, 4)
    init.identity_recurrent_(layer)
    i, f, g, o = layer.weight_hh_l0.split(4)
    assert torch.equal(g, torch.eye(4))
    gates = torch.cat([i, f, o])
    torch.testing.assert_close(gates.T @ gates, torch.eye(4), rtol=0, atol=1e-5)
    init.identity_recurrent_(layer, "all")
    assert all(torch.equal(block, torch.eye(4)) for block in layer.weight_hh_l0.split(4))
    rnn = rbn.BatchNormRNN(3, 4)
    init.identity_recurrent_(rnn)
    assert torch.equal(rnn.weight_hh_l0, torch.eye(4))
    gru = rbn.BatchNormGRU(3, 4)
    init.identity_recurrent_(gru)
    gates, n = gru.weight_hh_l0.split([8, 4])
    assert torch.equal(n, torch.eye(4))
    torch.testing.assert_close(gates.T @ gates, torch.eye(4), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"blocks.*'candidate'.*'all', got 'f'"):
        init.identity_recurrent_(layer, "f")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_repeated_gates(dtype):
    layer = rbn.LSTM(3, 4, 2, bidirectional=True, dtype=dtype)
    init.repeated_gates_(layer, scale=0.2)
    recurrent = [b for n, p in layer.named_parameters() if "weight_hh" in n for b in p.split(4)]
    assert len(recurrent) == 16
    assert all(torch.equal(block, recurrent[0]) for block in recurrent)
    gram = (recurrent[0] @ recurrent[0].T).double()
    tolerance = 1e-3 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(gram, 0.04 * torch.eye(4).double(), rtol=0, atol=tolerance)
    inputs = [*layer.weight_ih_l0.split(4), *layer.weight_ih_l0_reverse.split(4)]
    assert all(torch.equal(block, inputs[0]) for block in inputs)
    bound = (6 / (3 + 4 + 1)) ** 0.5
    assert 0.5 * bound < inputs[0].abs().max() <= bound
    rnn = rbn.BatchNormRNN(1, 1)
    init.repeated_gates_(rnn)
    torch.testing.assert_close(rnn.weight_hh_l0.abs(), torch.full((1, 1), 0.05))


def test_helpers_reach_into_models_and_leave_other_modules_alone():
    model = torch.nn.Sequential(rbn.LSTM(3, 4), torch.nn.Linear(4, 8), rbn.BatchNormRNN(3, 4))
    before = model[1].bias.detach().clone()
    init.forget_bias_(model, 5.0)
    assert model[0].bias_l0.tolist() == [0] * 4 + [5] * 4 + [0] * 8
    assert torch.equal(model[1].bias, before)
    assert (model[2].bias_l0 == 0).all()
    init.gamma_(model, 0.4)
    assert (model[2].gamma_x_l0 == 0.4).all()
    init.orthogonal_weights_(model)
    assert model[0].weight_hh_l0.requires_grad is not False


def test_cells_start_alike():
    cell = rbn.BatchNormLSTMCell(3, 4)
    assert cell.bias.tolist() == [0] * 4 + [1] * 4 + [0] * 8
    assert (cell.gamma_h == 0.1).all()


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_weights_start_again(how):
    layer = rbn.BatchNormLSTM(3, 4)
    getattr(torch.nn.utils.parametrizations, how)(layer, "weight_hh_l0")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    layer.reset_parameters()
    weight = layer.weight_hh_l0
    torch.testing.assert_close(weight.T @ weight, torch.eye(4), rtol=1e-4, atol=1e-4)
    assert layer(torch.randn(5, 6, 3))[0].isfinite().all()
    assert layer.gamma_h_l0.unique().tolist() == pytest.approx([0.1])
    rbn.init.gamma_(layer, 0.5)
    assert layer.gamma_h_l0.unique().tolist() == [0.5]
