"""The paper's claims about initial states of images with identical first pixels (section 5.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rbn
from rbn.data import Splits, digits
from rbn.experiments import build, results
from rbn.experiments.base_task import BaseTask
from rbn.experiments.paper.finding import Finding
from rbn.experiments.paper.short_training import CPU, fit, on_digits
from rbn.models import SequenceClassifier
from rbn.ops.reference.normalization import bn, moments

BLACK = 100  # pixels; about as many as are black at the top of nearly all MNIST images
NOISE = 0.1  # standard deviation, the paper's


def digits_after_black_pixels() -> Splits:
    """The digits, each preceded by black pixels."""
    parts = digits()
    black = [
        type(part)(F.pad(part.inputs, (0, 0, 0, 0, BLACK, 0)), part.labels)
        for part in (parts.train, parts.valid, parts.test)
    ]
    return Splits(*black)


def plain_gradient(inputs: Tensor, labels: Tensor, noise: float, seed: int = 1) -> float:
    """The gradient norm of the recurrent weights, from a literal computation of equations 6 to 8.

    The layers of `rbn` differ in one way: while all rows of a batch are identical, constant terms
    pass on no gradient.

    Args:
        inputs: ``[T, B, 1]``.
        labels: ``[B]``.
        noise: standard deviation of the initial hidden state.
        seed: seed of the weights and the noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = rbn.BatchNormLSTM(1, 100)
        head = SequenceClassifier(layer, 10).classifier
        h = noise * torch.randn(len(labels), 100)
    weights = dict(layer.named_parameters())
    c = weights["c0_l0"].expand(len(labels), -1)

    def normalized(u: Tensor, name: str, beta: Tensor | float = 0.0) -> Tensor:
        return bn(u, weights[f"gamma_{name}_l0"], beta, *moments(u), layer.eps)

    for x in inputs:
        gates = normalized(h @ weights["weight_hh_l0"].T, "h") + weights["bias_l0"]
        gates = gates + normalized(x @ weights["weight_ih_l0"].T, "x")
        i, f, g, o = gates.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(normalized(c, "c", weights["beta_c_l0"]))
    loss = F.cross_entropy(head(h), labels)
    (gradient,) = torch.autograd.grad(loss, [weights["weight_hh_l0"]])
    return float(gradient.norm())


def no_noise(seeds: int, steps: int) -> Finding:
    """Train on images with identical first pixels, with and without noise in the first state."""
    splits = digits_after_black_pixels()
    batch = splits.train.first(100)
    rows, plain = [], {}
    for noise in (0.1, 0.0):
        plain[noise] = plain_gradient(batch.inputs, batch.labels, noise)
        config = on_digits(f"layer.hidden_noise={noise}", "normalization.input_stats=step")
        first, right, bad = [], [], 0
        for seed in range(1, seeds + 1):
            task = build.build(config, seed, CPU, loaded=splits)
            trace = fit(task, config, steps)
            first.append(trace.norms[0])
            bad += trace.non_finite
            right.append(task.evaluate()["valid_batch"])
        accuracies = f"{100 * mean(right):.1f}"
        norms = f"{mean(first):.2g}"
        rows.append((f"{noise:g}", f"{plain[noise]:.2g}", norms, str(bad), accuracies))
    explodes = not math.isfinite(plain[0.0]) or plain[0.0] > 1e3 * plain[0.1]
    outcome = (
        "Without noise the gradient of the literal equations explodes, as the paper says. "
        if explodes
        else "Without noise the gradient of the literal equations is as large as with noise. "
    )
    outcome += (
        "The layers of rbn pass no gradient through constant terms while all rows are identical: "
        f"{rows[1][3]} of {seeds * steps} of their steps without noise had a non-finite gradient."
    )
    return Finding(
        "no-noise",
        "Without noise in the initial hidden state, in-order MNIST, whose first hundred or so "
        "inputs are the same in all images, makes the gradient explode (section 5.1).",
        f"BN-LSTMs on the digits in order with {BLACK} black pixels in front, {seeds} seeds, "
        f"{steps} steps each. The gradient is that of the first minibatch.",
        (
            *("noise", "norm at W_h, equations 6 to 8", "norm of all gradients, rbn.BatchNormLSTM"),
            *("non-finite steps", "validation accuracy, % (batch statistics)"),
        ),
        tuple(rows),
        outcome,
        "rbn reproduce no-noise",
    )


class DataInitializedClassifier(nn.Module):
    """A classifier whose initial hidden state is a linear function of the sequence.

    Args:
        model: the classifier.
        projection: ``[T, H]``, maps a sequence of one feature to its initial hidden state.
        mean: ``[T, 1]``, the mean of the sequences, subtracted before the projection.
        learned: whether the projection is trained.
    """

    mean: Tensor

    def __init__(
        self, model: SequenceClassifier, projection: Tensor, mean: Tensor, learned: bool
    ) -> None:
        super().__init__()
        self.recurrent, self.classifier = model.recurrent, model.classifier
        self.projection = nn.Parameter(projection, requires_grad=learned)
        self.register_buffer("mean", mean)

    def forward(self, input: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of sequences ``[T, B, 1]``."""
        h = (input.squeeze(2) - self.mean).T @ self.projection
        c = self.recurrent.get_parameter("c0_l0").expand_as(h)
        _, (h_n, _) = self.recurrent(input, (h[None], c[None]))
        logits: Tensor = self.classifier(h_n[-1])
        return logits


Start = Literal["noise", "mean", "fixed", "learned"]
_STARTS: dict[Start, str] = {
    "noise": f"noise of {NOISE:g}",
    "mean": "the mean of the image, in all units",
    "fixed": "a fixed random projection of the image",
    "learned": "a learned projection of the image",
}


def initialize_from_data(task: BaseTask, inputs: Tensor, start: Start, seed: int) -> None:
    """Initialize the hidden state with the image's mean, or a projection as wide as the noise."""
    model = task.model
    assert isinstance(model, SequenceClassifier)
    hidden: int = model.recurrent.hidden_size  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(seed)
    if start == "mean":
        projection = torch.full((len(inputs), hidden), 1 / len(inputs))
        centre = torch.zeros(len(inputs), 1)
    else:
        projection = torch.randn(len(inputs), hidden, generator=generator)
        centre = inputs.mean(1)
        projection *= NOISE / ((inputs.squeeze(2) - centre).T @ projection).std(0)
    task.model = DataInitializedClassifier(model, projection, centre, start == "learned")


def _standard_error(first: Sequence[float], second: Sequence[float]) -> float:
    """The standard error of the difference of two means."""
    return math.hypot(*(stdev(values) / math.sqrt(len(values)) for values in (first, second)))


def data_start(seeds: int, steps: int) -> Finding:
    """Compare noise in the initial state with initial states computed from the images."""
    splits = digits_after_black_pixels()
    rows, right = [], {}
    for start, name in _STARTS.items():
        noise = NOISE if start == "noise" else 0.0
        config = on_digits(f"layer.hidden_noise={noise}", "normalization.input_stats=step")
        accuracies = []
        for seed in range(1, seeds + 1):
            task = build.build(config, seed, CPU, loaded=splits)
            if start != "noise":
                initialize_from_data(task, splits.train.inputs, start, seed)
            fit(task, config, steps)
            results.exact_statistics(config, task)
            accuracies.append(100 * task.measure_with("test", "population"))
        right[name] = accuracies
        spread = f"{stdev(accuracies):.1f}" if len(accuracies) > 1 else "-"
        rows.append((name, f"{mean(accuracies):.1f}", spread))
    noisy, *others = right.values()
    best = max(others, key=mean)
    behind = mean(best) - mean(noisy)
    error = _standard_error(noisy, best) if seeds > 1 else 0.0
    if seeds == 1:
        outcome = (
            f"The best of the others differs from noise by {behind:+.1f} points; one seed cannot "
            "tell whether that is more than chance."
        )
    elif behind < 0:
        outcome = f"Noise is {-behind:.1f} points better: it does not hurt, as the paper says."
    else:
        verdict = (
            "here noise hurts"
            if behind > 2 * error
            else f"{seeds} seeds are too few to tell whether noise hurts"
        )
        outcome = (
            f"Noise is {behind:.1f} points behind the best of them, with a standard error of "
            f"{error:.1f}: {verdict}."
        )
    return Finding(
        "data-start",
        "Noise in the initial hidden state does not hurt performance compared to data-dependent "
        "ways of initializing it (section 5.1, which does not say which ways; the authors' code "
        "has the mean of the image).",
        f"BN-LSTMs on the digits in order with {BLACK} black pixels in front, {seeds} seeds, "
        f"{steps} steps each. The projections start with a standard deviation of {NOISE:g}.",
        ("initial hidden state", "test accuracy, %", "standard deviation over seeds"),
        tuple(rows),
        outcome,
        "rbn reproduce data-start",
    )
