"""Conversion of a layer to cells and back."""

import pytest
import torch

import rbn

LAYERS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
CASES = [
    *((layer, {}) for layer in LAYERS),
    *((layer, {"num_layers": 2, "bias": False}) for layer in LAYERS),
    *((layer, {"num_layers": 2, "bidirectional": True}) for layer in LAYERS),
    (rbn.LSTM, {"cell_bias": False, "initial_state": "zeros", "hidden_noise": 0.1}),
    (rbn.LSTM, {"zoneout": (0.1, 0.2)}),
    (rbn.BatchNormLSTM, {"zoneout": (0.1, 0.2), "max_length": 9, "momentum": None}),
    (rbn.BatchNormLSTM, {"ablations": ("shared_stats", "joint_terms"), "eps": 1e-3}),
    (rbn.BatchNormLSTM, {"input_stats": "sequence"}),
    (rbn.BatchNormLSTM, {"input_stats": "sequence", "max_length": 9}),
    (rbn.LayerNormLSTM, {"gamma": 0.5, "dtype": torch.float32}),
    (rbn.BatchNormRNN, {"nonlinearity": "relu", "zoneout": 0.2}),
    (rbn.BatchNormGRU, {"input_stats": "sequence", "zoneout": 0.2}),
]
ONLY_LAYERS = ("input_stats", "padding", "batch_first", "bidirectional", "dropout")


def trained(layer_class, **options):
    torch.manual_seed(0)
    layer = layer_class(3, 4, **{"dtype": torch.float64, **options})
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("weight"):
                parameter.uniform_(0.2, 1.0)
        for _ in range(2):
            layer(torch.randn(6, 5, 3, dtype=layer.weight_ih_l0.dtype))
    return layer.eval()


def loop(cell, x):
    """Run all steps of one layer and direction."""
    hx, outputs = None, []
    for t, x_t in enumerate(x):
        hx = cell(x_t, hx, t)
        outputs.append(hx[0] if isinstance(hx, tuple) else hx)
    return torch.stack(outputs)


@pytest.mark.parametrize(("layer_class", "options"), CASES, ids=str)
def test_a_loop_over_the_cells_is_the_layer(layer_class, options):
    layer = trained(layer_class, **options)
    cells = layer.to_cells()
    assert len(cells) == layer.num_layers * layer.directions
    assert not any(cell.training for cell in cells)
    tolerance = 1e-11 if layer.weight_ih_l0.dtype == torch.float64 else 1e-5
    for steps in (1, 6, 10):  # fewer, as many and more than there are statistics for
        x = y = torch.randn(steps, 2, 3, dtype=layer.weight_ih_l0.dtype)
        for k in range(0, len(cells), layer.directions):
            outputs = [loop(cells[k], y)]
            if layer.bidirectional:
                outputs.append(loop(cells[k + 1], y.flip(0)).flip(0))
            y = torch.cat(outputs, dim=2)
        torch.testing.assert_close(y, layer(x)[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("layer_class", "options"), CASES, ids=str)
def test_there_and_back_is_exact(layer_class, options):
    layer = trained(layer_class, **options)
    own = {name: value for name, value in options.items() if name in ONLY_LAYERS}
    back = layer_class.from_cells(layer.to_cells(), **own)
    assert repr(back) == repr(layer)
    assert not back.training
    state, wanted = back.state_dict(), layer.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name
    for kept in ("hidden_noise", "zoneout", "momentum", "eps", "ablations", "max_length"):
        assert getattr(back, kept, None) == getattr(layer, kept, None)


def test_copies_share_nothing_and_keep_what_is_frozen():
    layer = trained(rbn.BatchNormLSTM).train()
    layer.weight_ih_l0.requires_grad_(False)
    (cell,) = layer.to_cells()
    assert cell.training
    assert not cell.weight_ih.requires_grad
    assert cell.weight_hh.requires_grad
    before = layer.stats_h_l0.mean.clone()
    with torch.no_grad():
        cell.weight_hh.zero_()
        cell.stats_h.mean.zero_()
    assert layer.weight_hh_l0.abs().sum() > 0
    assert torch.equal(layer.stats_h_l0.mean, before)


def test_cells_that_make_no_layer():
    one, two = rbn.LSTMCell(3, 4), rbn.LSTMCell(3, 4)
    with pytest.raises(ValueError, match=r"cell 1.*input_size.*4, got 3"):
        rbn.LSTM.from_cells([one, two])
    with pytest.raises(ValueError, match=r"cells.* 2.*got 1"):
        rbn.LSTM.from_cells([one], bidirectional=True)
    with pytest.raises(ValueError, match=r"cells.* 1.*got 0"):
        rbn.LSTM.from_cells([])
    with pytest.raises(TypeError, match=r"cells.*BatchNormLSTMCell, got LSTMCell"):
        rbn.BatchNormLSTM.from_cells([one])
    with pytest.raises(ValueError, match=r"zoneout=\(0\.0, 0\.0\) in cell 0 and \(0\.1, 0\.0\)"):
        rbn.LSTM.from_cells([one, rbn.LSTMCell(4, 4, zoneout=(0.1, 0.0))])
