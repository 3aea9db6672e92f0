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
from rbn.experiments.paper.short_training import CPU, Tick, fit, on_digits
from rbn.models import SequenceClassifier
from rbn.ops.reference.normalization import bn, moments

BLACK = 100  # pixels, as many as are black in nearly all of MNIST's images at the top
NOISE = 0.1  # the paper's


def black_beginning() -> Splits:
    """The digits with black pixels in front."""
    parts = digits()
    black = [
        type(part)(F.pad(part.inputs, (0, 0, 0, 0, BLACK, 0)), part.labels)
        for part in (parts.train, parts.valid, parts.test)
    ]
    return Splits(*black)


def plain_gradient(inputs: Tensor, labels: Tensor, noise: float, seed: int = 1) -> float:
    """The norm of the gradient at the recurrent weights, by equations 6 to 8 as they are written.

    `rbn`'s own layers differ in one thing: while all rows are identical, constant terms pass on no
    gradient.

    Args:
        inputs: ``[T, B, 1]``.
        labels: ``[B]``.
        noise: standard deviation of the initial hidden state.
        seed: of weights and noise.
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


def no_noise(seeds: int, steps: int, tick: Tick | None = None) -> Finding:
    """Images that all begin with the same black pixels, with noise in the first state or none."""
    splits = black_beginning()
    batch = splits.train.first(100)
    rows, plain = [], {}
    for noise in (0.1, 0.0):
        plain[noise] = plain_gradient(batch.inputs, batch.labels, noise)
        config = on_digits(f"layer.hidden_noise={noise}", "normalization.input_stats=step")
        first, right, bad = [], [], 0
        for seed in range(1, seeds + 1):
            task = build.build(config, seed, CPU, loaded=splits)
            trace = fit(task, config, steps, tick)
            first.append(trace.norms[0])
            bad += trace.bad
            right.append(task.evaluate()["valid_batch"])
        accuracies = f"{100 * mean(right):.1f}"
        norms = f"{mean(first):.2g}"
        rows.append((f"{noise:g}", f"{plain[noise]:.2g}", norms, str(bad), accuracies))
    explodes = not math.isfinite(plain[0.0]) or plain[0.0] > 1e3 * plain[0.1]
    outcome = (
        "Without noise the gradient of the equations as they are written explodes, as the paper "
        "says. "
        if explodes
        else "Without noise the gradient of the equations as they are written stays of the size "
        "that it has with noise. "
    )
    outcome += (
        "The layers of rbn pass no gradient through constant terms while all rows are identical: "
        f"there, {rows[1][3]} of {seeds * steps} steps without noise had a gradient that was not "
        "finite."
    )
    return Finding(
        "no-noise",
        "Without noise in the initial hidden state, in-order MNIST, whose first hundred or so "
        "inputs are the same in all images, makes the gradient explode (section 5.1).",
        f"BN-LSTMs on the digits in order with {BLACK} black pixels in front, {seeds} seeds, "
        f"{steps} steps each. The gradient is that of the first minibatch.",
        (
            *("noise", "norm at W_h, equations 6 to 8", "norm of all gradients, rbn.BatchNormLSTM"),
            *("steps not finite", "validation accuracy, % (batch statistics)"),
        ),
        tuple(rows),
        outcome,
        "rbn reproduce no-noise",
    )


class StartedByData(nn.Module):
    """A classifier whose first hidden state is a function of the sequence.

    Args:
        model: the classifier.
        projection: ``[T, H]``, from a sequence of one feature to its first hidden state.
        mean: of the sequences, ``[T, 1]``, taken away before.
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


def _start_by_data(task: BaseTask, inputs: Tensor, start: Start, seed: int) -> None:
    """Begin a task's model with its images' mean, or projections as wide as the paper's noise."""
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
    task.model = StartedByData(model, projection, centre, start == "learned")


def _standard_error(first: Sequence[float], second: Sequence[float]) -> float:
    """Of the difference of two means."""
    return math.hypot(*(stdev(values) / math.sqrt(len(values)) for values in (first, second)))


def data_start(seeds: int, steps: int, tick: Tick | None = None) -> Finding:
    """Noise in the first state, against first states that are functions of the images."""
    splits = black_beginning()
    rows, right = [], {}
    for start, name in _STARTS.items():
        noise = NOISE if start == "noise" else 0.0
        config = on_digits(f"layer.hidden_noise={noise}", "normalization.input_stats=step")
        accuracies = []
        for seed in range(1, seeds + 1):
            task = build.build(config, seed, CPU, loaded=splits)
            if start != "noise":
                _start_by_data(task, splits.train.inputs, start, seed)
            fit(task, config, steps, tick)
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
            f"The best of the others is {behind:+.1f} points from noise; one seed does not say "
            "whether that is more than chance."
        )
    elif behind < 0:
        outcome = f"Noise is {-behind:.1f} points before them: it does not hurt, as the paper says."
    else:
        told = (
            "here noise does hurt"
            if behind > 2 * error
            else f"{seeds} seeds do not tell whether noise hurts at all"
        )
        outcome = (
            f"Noise is {behind:.1f} points behind the best of them, with a standard error of "
            f"{error:.1f}: {told}."
        )
    return Finding(
        "data-start",
        "Noise in the initial hidden state does not hurt performance compared to data-dependent "
        "ways of initializing it (section 5.1, which does not say which ways; the authors' code "
        "has the mean of the image).",
        f"BN-LSTMs on the digits in order with {BLACK} black pixels in front, {seeds} seeds, "
        f"{steps} steps each. The projections begin with a standard deviation of {NOISE:g}.",
        ("initial hidden state", "test accuracy, %", "standard deviation over seeds"),
        tuple(rows),
        outcome,
        "rbn reproduce data-start",
    )
