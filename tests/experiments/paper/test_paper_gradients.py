"""The computation of Figure 1."""

import pytest
import torch
import torch.nn.functional as F

import rbn
from rbn.data import Split
from rbn.experiments.paper import gradients
from rbn.experiments.paper.gradients import VARIANTS, gradient_norms, gradient_panels
from rbn.models import SequenceClassifier


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    return Split(torch.rand(12, 9, 1), torch.arange(9))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.together])
def test_each_term_normalized_is_the_layer_of_the_library(images, variant):
    """Norms of the total derivative, through a cell that is stepped by hand."""
    found = gradient_norms(images, (0.3, 0.9), variant, hidden_size=12, seed=4)
    assert found.shape == (2, 12)
    torch.manual_seed(4)
    layer = rbn.BatchNormRNN(1, 12, gamma=0.9)
    if variant.start == "identity":
        rbn.init.identity_recurrent_(layer)
    head = SequenceClassifier(layer, 10).classifier
    states = [0.1 * torch.randn(9, 12)]
    cell = rbn.BatchNormRNNCell(1, 12, gamma=0.9)
    weights = {k.removesuffix("_l0"): v for k, v in layer.named_parameters()}
    cell.load_state_dict(weights, strict=False)
    for t, x in enumerate(images.inputs):
        states.append(cell(x, states[-1], t))
    loss = F.cross_entropy(head(states[-1]), images.labels)
    expected = [g.norm(dim=1).mean() for g in torch.autograd.grad(loss, states[1:])]
    # float32, twelve steps with another order of sums
    torch.testing.assert_close(found[1].float(), torch.stack(expected), rtol=1e-4, atol=0)


def test_networks_side_by_side_do_not_meet(images):
    both = gradient_norms(images, (0.1, 1.0), VARIANTS[0], hidden_size=8)
    alone = gradient_norms(images, (1.0,), VARIANTS[0], hidden_size=8)
    torch.testing.assert_close(both[1:], alone, rtol=1e-5, atol=0)


def test_the_last_norm_is_that_of_the_paper():
    """With 100 images it is about 0.0095 for any gamma: |softmax - label| / 100."""
    images = Split(torch.rand(3, 100, 1), torch.arange(100) % 10)
    found = gradient_norms(images, gradients.GAMMAS, VARIANTS[0])
    assert found[:, -1].tolist() == pytest.approx([0.0095] * 10, rel=0.1)


def test_panels(images):
    panels = gradient_panels(images, (0.1, 1.0), seeds=(1, 2))
    assert [len(panel.lines) for panel in panels] == [2, 2, 2]
    assert panels[0].lines[0].series == "gamma=0.10"


def test_the_derivative_of_tanh():
    line = gradients.tanh_derivative()
    assert (line.x[0], line.y[0], line.low[0], line.high[0]) == (0, 1, 1, 1)
    # The expectation of 1 - tanh(x)^2 at unit deviation is 0.6057; 20,000 samples with a standard
    # deviation of 0.3 are within 0.01.
    assert line.y[-1] == pytest.approx(0.6057, abs=0.01)
    quartile = 1 - torch.tanh(torch.tensor(0.67449)) ** 2  # half of all |x| are smaller
    assert line.low[-1] < float(quartile) < line.high[-1]
    assert list(line.y) == sorted(line.y, reverse=True)
