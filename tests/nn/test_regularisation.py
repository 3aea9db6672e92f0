"""Dropout, zoneout and noise: on in training, off or averaged in evaluation."""

import pytest
import torch

import rbn

LSTMS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM]


def test_dropout_is_between_layers_only():
    x = torch.randn(5, 6, 3)
    with pytest.warns(UserWarning, match="num_layers greater than 1"):
        one = rbn.LSTM(3, 4, dropout=0.5)
    assert torch.equal(one(x)[0], one(x)[0])
    two = rbn.LSTM(3, 4, 2, dropout=0.5)
    assert not torch.equal(two(x)[0], two(x)[0])
    two.eval()
    assert torch.equal(two(x)[0], two(x)[0])
    assert rbn.LSTM(3, 4, 2, dropout=1.0)(x)[0].isfinite().all()


@pytest.mark.parametrize("layer_class", LSTMS)
def test_zoneout_of_everything_keeps_the_initial_state(layer_class):
    layer = layer_class(3, 4, zoneout=(1.0, 1.0))
    layer.h0_l0.data.normal_()
    layer.c0_l0.data.normal_()
    x = torch.randn(5, 6, 3)
    for training in (True, False):
        output, (h, c) = layer.train(training)(x)
        assert torch.equal(output, layer.h0_l0.expand(5, 6, 4))
        assert torch.equal(h[0], layer.h0_l0.expand(6, 4))
        assert torch.equal(c[0], layer.c0_l0.expand(6, 4))


@pytest.mark.parametrize("layer_class", LSTMS)
def test_zoneout_keeps_the_right_state_at_the_right_rate(layer_class):
    torch.manual_seed(0)
    layer = layer_class(3, 200, zoneout=(0.25, 0.0))
    layer.c0_l0.data.fill_(3.0)
    _, (_, c) = layer(torch.randn(1, 50, 3))
    kept = (c == 3.0).float().mean().item()
    assert abs(kept - 0.25) < 0.02  # 10,000 draws: 4.6 standard deviations
    layer = layer_class(3, 200, zoneout=(0.0, 0.25))
    layer.h0_l0.data.fill_(0.5)
    output, _ = layer(torch.randn(1, 50, 3))
    assert abs((output == 0.5).float().mean().item() - 0.25) < 0.02


def test_zoneout_in_evaluation_is_the_expected_state():
    torch.manual_seed(0)
    layer = rbn.LSTM(3, 4, zoneout=(0.3, 0.2), dtype=torch.float64)
    plain = rbn.LSTM(3, 4, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(1, 6, 3, dtype=torch.float64)
    h0, c0 = (torch.randn(1, 6, 4, dtype=torch.float64) for _ in range(2))
    _, (h, c) = layer.eval()(x, (h0, c0))
    _, (h_new, c_new) = plain(x, (h0, c0))
    torch.testing.assert_close(c, 0.3 * c0 + 0.7 * c_new)
    torch.testing.assert_close(h, 0.2 * h0 + 0.8 * h_new)


@pytest.mark.parametrize("layer_class", [rbn.BatchNormRNN, rbn.BatchNormGRU])
def test_zoneout_of_one_state(layer_class):
    layer = layer_class(3, 4, zoneout=1.0)
    layer.h0_l0.data.normal_()
    assert torch.equal(layer(torch.randn(5, 6, 3))[0], layer.h0_l0.expand(5, 6, 4))


@pytest.mark.parametrize("layer_class", [*LSTMS, rbn.BatchNormRNN, rbn.BatchNormGRU])
def test_weight_dropout_leaves_out_the_same_weights_in_all_steps(layer_class):
    torch.manual_seed(0)
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    layer = layer_class(3, 50, bidirectional=True, weight_dropout=0.3, dtype=torch.float64)
    plain = layer_class(3, 50, bidirectional=True, dtype=torch.float64)
    torch.manual_seed(1)
    output, _ = layer(x)
    torch.manual_seed(1)
    masks = {}
    for name in ("weight_hh_l0", "weight_hh_l0_reverse"):
        masks[name] = torch.nn.functional.dropout(torch.ones_like(getattr(layer, name)), 0.3)
    # 2500 and more draws: 0.03 is more than 3 standard deviations, and the seed is fixed.
    assert abs((masks["weight_hh_l0"] == 0).double().mean().item() - 0.3) < 0.03
    assert not torch.equal(masks["weight_hh_l0"], masks["weight_hh_l0_reverse"])
    plain.load_state_dict(layer.state_dict(), strict=False)
    for name, mask in masks.items():
        getattr(plain, name).data.mul_(mask)
    torch.testing.assert_close(output, plain(x)[0])
    output.square().sum().backward()
    for name, mask in masks.items():
        assert (getattr(layer, name).grad[mask == 0] == 0).all()
        assert (getattr(layer, name).grad[mask != 0] != 0).all()


@pytest.mark.parametrize("layer_class", [*LSTMS, rbn.BatchNormRNN, rbn.BatchNormGRU])
def test_weight_dropout_is_gone_in_evaluation(layer_class):
    x = torch.randn(4, 6, 3)
    layer = layer_class(3, 5, weight_dropout=0.5)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    plain = layer_class(3, 5).eval()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0], plain(x)[0])
    assert "weight_dropout=0.5" in repr(layer)


@pytest.mark.parametrize("layer_class", [*LSTMS, rbn.BatchNormRNN, rbn.BatchNormGRU])
def test_noise_in_the_initial_state(layer_class):
    layer = layer_class(1, 4, hidden_noise=0.1)
    x = torch.zeros(1, 500, 1)  # constant over the batch, as the upper pixels of an image
    rows = layer(x)[0][0]
    assert rows.std(0).min() > 0
    layer(torch.randn(1, 500, 1))
    rows = layer.eval()(x)[0][0]
    assert (rows == rows[0]).all()


def test_identical_rows_do_not_explode_with_or_without_noise():
    """Section 5.1: all rows are identical, as in the first steps of in-order MNIST.

    In each row the gradient grows by gamma / sqrt(eps) per step, and its sum over rows is 0. The
    rounding error of that sum was above 1e6 here, which is why the paper adds noise; constant terms
    now pass no gradient (see `rbn.ops.types.CONSTANT`).
    """
    x = torch.zeros(30, 8, 1)
    x[-1] = torch.randn(8, 1)
    for noise in (0.0, 0.1):
        torch.manual_seed(0)
        layer = rbn.BatchNormLSTM(1, 4, hidden_noise=noise)
        y, _ = layer(x)
        assert y.isfinite().all()
        if noise == 0:  # 0 / sqrt(eps) does not change the forward pass
            assert (y[:-1] == y[:-1, :1]).all()
        y[-1].square().sum().backward()
        assert layer.weight_hh_l0.grad.abs().max() < 1


def test_initial_states_of_zeros_are_no_parameters():
    layer = rbn.BatchNormLSTM(3, 4, initial_state="zeros")
    assert not [name for name, _ in layer.named_parameters() if name.startswith(("h0", "c0"))]
    assert layer(torch.randn(5, 6, 3))[0].shape == (5, 6, 4)


@pytest.mark.parametrize(
    "ablation", ["shared_stats", "joint_terms", "pass_normalized_cell", "raw_output"]
)
def test_ablations_run_and_change_the_network(ablation):
    torch.manual_seed(0)
    plain = rbn.BatchNormLSTM(3, 4)
    torch.manual_seed(0)
    ablated = rbn.BatchNormLSTM(3, 4, ablations=[ablation])
    names = {name for name, _ in plain.named_parameters()}
    missing = {"joint_terms": {"gamma_x_l0"}, "raw_output": {"gamma_c_l0"}}.get(ablation, set())
    assert names - {name for name, _ in ablated.named_parameters()} == missing
    x = torch.randn(5, 6, 3)
    a, b = plain(x)[0], ablated(x)[0]
    if ablation == "shared_stats":  # differs in evaluation only
        assert torch.equal(a, b)
    else:
        assert not torch.allclose(a, b)
    assert not torch.allclose(plain.eval()(x)[0], ablated.eval()(x)[0])


def test_zoneout_rates_under_a_rough_default_type():
    """Random numbers of 8 bits would never be below 0.002, for that rate."""
    before = torch.get_default_dtype()
    layer = rbn.LSTM(2, 400, zoneout=(0.002, 0.0))
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.manual_seed(0)
        masks = [layer._zoneout(0.002, torch.empty(50, 50, 1600))[0] for _ in range(2)]
    finally:
        torch.set_default_dtype(before)
    # Two standard errors of 2 million draws are 3 % of the rate; of 8 bits it would be twice it.
    found = torch.stack(masks).float().mean().item()
    assert found == pytest.approx(0.002, rel=0.1)
