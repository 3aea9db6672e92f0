"""Cells: a loop over them matches the layer."""

import copy
import pickle

import pytest
import torch

import rbn

PAIRS = [
    (rbn.LSTM, rbn.LSTMCell),
    (rbn.BatchNormLSTM, rbn.BatchNormLSTMCell),
    (rbn.LayerNormLSTM, rbn.LayerNormLSTMCell),
    (rbn.BatchNormRNN, rbn.BatchNormRNNCell),
    (rbn.BatchNormGRU, rbn.BatchNormGRUCell),
]
NORMALIZED = (rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU)


def pair(layer_class, cell_class, **options):
    torch.manual_seed(0)
    layer = layer_class(3, 4, dtype=torch.float64, **options)
    cell = cell_class(3, 4, dtype=torch.float64, **options)
    for name, parameter in layer.named_parameters():
        if not name.startswith("weight"):
            parameter.data.uniform_(0.2, 1.0)
        cell.get_parameter(name.removesuffix("_l0")).data.copy_(parameter)
    return layer, cell


@pytest.mark.parametrize("classes", PAIRS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_loop_over_the_cell_is_the_layer(classes, bias):
    layer, cell = pair(*classes, bias=bias)
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    for training in (True, False):
        layer.train(training), cell.train(training)
        expected, _ = layer(x)
        hx, outputs = None, []
        for t in range(5):
            hx = cell(x[t], hx, t)
            outputs.append(hx[0] if isinstance(hx, tuple) else hx)
        torch.testing.assert_close(torch.stack(outputs), expected, rtol=1e-11, atol=1e-13)
    if classes[0] in NORMALIZED:
        torch.testing.assert_close(cell.stats_h.mean, layer.stats_h_l0.mean)
        assert cell.stats_h.count.tolist() == [1] * 5


@pytest.mark.parametrize("classes", PAIRS)
def test_gradients_flow_through_a_loop(classes):
    layer, cell = pair(*classes)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    layer(x)[0].square().sum().backward()
    hx, total = None, 0.0
    for t in range(4):
        hx = cell(x[t], hx, t)
        total = total + (hx[0] if isinstance(hx, tuple) else hx).square().sum()
    total.backward()
    for name, parameter in cell.named_parameters():
        wanted = layer.get_parameter(name + "_l0").grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("classes", PAIRS)
def test_shapes_and_one_row_without_a_batch(classes):
    _, cell = pair(*classes)
    cell(torch.randn(6, 3, dtype=torch.float64))
    cell.eval()
    x = torch.randn(3, dtype=torch.float64)
    hx = cell(x)
    assert all(s.shape == (4,) for s in (hx if isinstance(hx, tuple) else (hx,)))
    again = cell(x, hx, 7)
    batched = cell(x[None], tuple(s[None] for s in hx) if isinstance(hx, tuple) else hx[None], 7)
    one = again[0] if isinstance(again, tuple) else again
    many = batched[0][0] if isinstance(batched, tuple) else batched[0]
    assert torch.equal(one, many)
    assert "3, 4" in repr(cell)


def test_errors_of_cells():
    cell = rbn.BatchNormLSTMCell(3, 4)
    with pytest.raises(ValueError, match=r"input.*shape.*\[B, 3\], got \(5, 6, 3\)"):
        cell(torch.randn(5, 6, 3))
    with pytest.raises(RuntimeError, match="Expected 3, got 2"):
        cell(torch.randn(6, 2))
    with pytest.raises(ValueError, match=r"step.*negative"):
        cell(torch.randn(6, 3), None, -1)
    with pytest.raises(RuntimeError, match=r"hidden\[0\] size \(6, 4\), got \[5, 4\]"):
        cell(torch.randn(6, 3), (torch.zeros(5, 4), torch.zeros(6, 4)))
    with pytest.warns(UserWarning, match="BatchNormLSTMCell was not trained"):
        cell.eval()(torch.randn(6, 3))


CELLS = (rbn.BatchNormLSTMCell, rbn.BatchNormRNNCell, rbn.BatchNormGRUCell)


@pytest.mark.parametrize("cell_class", CELLS)
def test_a_loop_without_step_warns_once(cell_class):
    cell, x = cell_class(3, 4), torch.randn(5, 6, 3)
    hx = cell(x[0])
    with pytest.warns(UserWarning, match="step was not given"):
        hx = cell(x[1], hx)
    for t in (2, 3, 4):  # further warnings would be errors
        hx = cell(x[t], hx)


@pytest.mark.parametrize("cell_class", CELLS)
def test_single_steps_do_not_warn(cell_class):
    """Warnings are errors in these tests."""
    x = torch.randn(5, 6, 3)
    shared, one, cell = (cell_class(3, 4, **o) for o in SINGLE)
    for each in (shared, one):  # all steps share statistics by design
        hx = None
        for t in range(5):
            hx = each(x[t], hx)
    given = cell(x[0])
    clones = tuple(s.detach() for s in given) if isinstance(given, tuple) else given.detach()
    for _ in range(3):
        cell(x[1], clones)  # a first step from given states
    hx = given
    for t in (1, 2, 0, 0):  # the states of one window continue in the next
        hx = cell(x[t], hx, t)
    for _ in range(2):
        cell.eval()(x[0], clones)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("cell_class", CELLS)
def test_a_loop_without_step_in_eval_warns_once(cell_class, rows):
    cell, x = cell_class(3, 4), torch.randn(5, 6, 3)
    hx = None
    for t in range(3):
        hx = cell(x[t], hx, t)
    cell.eval()
    hx = cell(x[0, :rows])
    hx = cell(x[0, :rows])  # another sequence
    hx = cell(x[1, :rows], hx, 1)
    hx = cell(x[0, :rows], hx)  # windows that continue
    with pytest.warns(UserWarning, match="step was not given"):
        hx = cell(x[1, :rows], hx)
    for t in (2, 3, 4):  # further warnings would be errors
        hx = cell(x[t, :rows], hx)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(cell)))
    copied(x[0, :rows])


SINGLE = ({"ablations": ["shared_stats"]}, {"max_length": 1}, {})
