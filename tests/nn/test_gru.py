"""The batch-normalized GRU against torch's own, whose equations it normalizes."""

import pytest
import torch
from torch import nn

import rbn

OPTIONS = {"num_layers": 2, "bidirectional": True, "dtype": torch.float64}


def without_normalization(gru):
    """The layer with gru's weights, and population statistics and gammas that change nothing."""
    layer = rbn.BatchNormGRU.from_gru(gru, initial_state="zeros", gamma=1.0)
    layer(torch.randn(7, 4, 3, dtype=torch.float64))
    for module in layer.eval().modules():
        if isinstance(module, rbn.PopulationStatistics):
            module.mean.zero_()
            module.var.fill_(1 - layer.eps)
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_the_unnormalized_limit_is_torchs_gru(bias):
    torch.manual_seed(0)
    gru = nn.GRU(3, 5, bias=bias, **OPTIONS)
    layer = without_normalization(gru)
    x, h0 = torch.randn(7, 4, 3).double(), torch.randn(4, 4, 5).double()
    for hx in (None, h0):
        for found, expected in zip(layer(x, hx), gru(x, hx), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_the_unnormalized_limit_of_the_cell_is_torchs_cell():
    torch.manual_seed(0)
    cell, gru = nn.GRUCell(3, 5, dtype=torch.float64), nn.GRU(3, 5, dtype=torch.float64)
    gru.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    (ours,) = without_normalization(gru).to_cells()
    for module in ours.eval().modules():
        if isinstance(module, rbn.PopulationStatistics):
            module.var.fill_(1 - ours.eps)
    x, h = torch.randn(4, 3).double(), torch.randn(4, 5).double()
    for step in (0, 3):
        torch.testing.assert_close(ours(x, h, step), cell(x, h), rtol=1e-12, atol=1e-13)


def test_weights_of_torchs_gru():
    gru = nn.GRU(3, 5, **OPTIONS)
    layer = rbn.BatchNormGRU.from_gru(gru.eval(), gamma=0.3)
    assert not layer.training
    assert (layer.gamma_h_l1_reverse == 0.3).all()
    for found, expected in zip(layer.all_weights, gru.all_weights, strict=True):
        torch.testing.assert_close(found[:2], expected[:2])
        both = expected[2] + expected[3]  # only that of n stays separate
        torch.testing.assert_close((found[2] + found[3])[:10], both[:10])
        torch.testing.assert_close(found[3][10:], expected[3][10:])
        assert (found[3][:10] == 0).all()
    other = rbn.BatchNormGRU(3, 5, **OPTIONS)
    other.load_state_dict(gru.state_dict(), strict=False)
    assert torch.equal(other.beta_n_l0, gru.bias_hh_l0[10:])
    assert torch.equal(other.bias_l1, layer.bias_l1)


def test_only_a_gru_can_be_converted():
    with pytest.raises(TypeError, match=r"gru.*torch\.nn\.GRU, got LSTM"):
        rbn.BatchNormGRU.from_gru(nn.LSTM(3, 5))
