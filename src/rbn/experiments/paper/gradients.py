"""Figure 1: how gamma determines the size of gradients through time (section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import rbn
from rbn.data import Split
from rbn.experiments.paper.lines import OURS, Line, Panel, thinned
from rbn.models import SequenceClassifier
from rbn.ops.reference.normalization import Term

GAMMAS = tuple(k / 10 for k in range(1, 11))
CLASSES = 10
_SMALLEST = 1e-26  # smaller values are not drawn; the paper's lines end at 4e-25
_POINTS = 160  # points kept of each line


@dataclass(frozen=True)
class Variant:
    """A batch-normalized tanh RNN.

    Attributes:
        title: title of the panel.
        start: initial recurrent weights, ``identity`` or ``orthogonal``.
        together: whether W_h h + W_x x is normalized as one term instead of two.
    """

    title: str
    start: str
    together: bool


VARIANTS = (
    Variant("identity, terms together", "identity", True),
    Variant("identity, BatchNormRNN", "identity", False),
    Variant("orthogonal, BatchNormRNN", "orthogonal", False),
)


def gradient_norms(
    data: Split,
    gammas: Sequence[float],
    variant: Variant,
    *,
    hidden_size: int = 100,
    noise: float = 0.1,
    seed: int = 1,
) -> Tensor:
    """The gradient norm at every hidden state of an RNN before training, ``[G, T]``.

    The loss is the mean cross-entropy at the last step. The norm is computed for each sequence and
    averaged, which matches the paper's last value (100 sequences, orthogonal classifier).

    Args:
        data: one minibatch.
        gammas: G values; each is used for all normalized terms of one network.
        variant: the RNN.
        hidden_size: number of units H.
        noise: standard deviation of the initial hidden state.
        seed: seed of the weights and the noise, the same for every gamma.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = rbn.BatchNormRNN(1, hidden_size)
        if variant.start == "identity":
            rbn.init.identity_recurrent_(layer)
        head = SequenceClassifier(layer, CLASSES).classifier
        first = noise * torch.randn(len(data), hidden_size)
    networks = len(gammas)
    weights = dict(layer.named_parameters())
    recurrent, inputs = weights["weight_hh_l0"].T, weights["weight_ih_l0"].T
    # All networks run in one batch: statistics are per column, so the networks are independent.
    gamma = torch.tensor(gammas).repeat_interleave(hidden_size)
    term_h, term_x = Term(None), Term(None)
    states = [first.repeat(1, networks).requires_grad_()]  # [B, G * H]
    for t, x in enumerate(data.inputs):
        h = states[-1].view(-1, networks, hidden_size)
        w_h = (h @ recurrent).flatten(1)
        w_x = (x @ inputs).repeat(1, networks)
        if variant.together:
            summed = term_h.bn(t, w_h + w_x, gamma, 0.0, None, layer.eps)
        else:
            summed = term_h.bn(t, w_h, gamma, 0.0, None, layer.eps)
            summed = summed + term_x.bn(t, w_x, gamma, 0.0, None, layer.eps)
        states.append(torch.tanh(summed))
    logits = head(states[-1].view(-1, networks, hidden_size))
    loss = sum(F.cross_entropy(logits[:, k], data.labels) for k in range(networks))
    assert isinstance(loss, Tensor)
    gradients = torch.stack(torch.autograd.grad(loss, states[1:]))  # [T, B, G * H]
    # float64, because the squares of small float32 gradients underflow.
    norms: Tensor = gradients.double().unflatten(2, (networks, hidden_size)).norm(dim=3)
    return norms.mean(1).T


def gradient_panels(
    data: Split, gammas: Sequence[float] = GAMMAS, seeds: Sequence[int] = (1, 2, 3)
) -> list[Panel]:
    """Figure 1a: a panel for each of `VARIANTS`, with geometric means over the seeds."""
    panels = []
    for variant in VARIANTS:
        logs = [
            gradient_norms(data, gammas, variant, seed=seed).clamp(min=1e-300).log()
            for seed in seeds
        ]
        means = torch.stack(logs).mean(0).exp()
        lines = []
        for gamma, norms in zip(gammas, means.tolist(), strict=True):
            kept = [(t, norms[t]) for t in thinned(norms, _POINTS) if norms[t] >= _SMALLEST]
            if kept:
                x, y = zip(*kept, strict=True)
                lines.append(Line(f"gamma={gamma:.2f}", OURS, x, y))
        panels.append(Panel(variant.title, "time step", "norm of the gradient", tuple(lines)))
    return panels


def tanh_derivative(samples: int = 20_000, points: int = 101, seed: int = 1) -> Line:
    """Figure 1b: mean and quartiles of tanh' for inputs of growing standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    deviations = torch.linspace(0, 1, points, dtype=torch.float64)
    normal = torch.randn(samples, generator=generator, dtype=torch.float64)
    rows = []
    for deviation in deviations:
        derivative = 1 - torch.tanh(deviation * normal).square()
        low, high = derivative.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64))
        rows.append((float(derivative.mean()), float(low), float(high)))
    y, low_edge, high_edge = zip(*rows, strict=True)
    return Line("mean derivative", OURS, tuple(deviations.tolist()), y, low_edge, high_edge)
