"""The demo's HTML page, in a single file."""

from __future__ import annotations

import base64
from pathlib import Path

from rbn.experiments.demo.result import Result, Settings
from rbn.experiments.demo.summary import expectation, headline, on_reach, outcome, percent
from rbn.experiments.demo.terminal import column_titles, rows
from rbn.experiments.html_templates import render
from rbn.training.atomic_files import write_atomic


def write_page(result: Result, picture: Path, path: Path) -> None:
    """Write the page, with the picture embedded."""
    text = render(
        "demo.html",
        headline=headline(result),
        introduction=_introduction(result),
        png=base64.b64encode(picture.read_bytes()).decode("ascii"),
        alt=_alternative(result),
        caption=_caption(result),
        columns=["model", *column_titles()],
        rows=rows(result),
        outcome=outcome(result),
        expectation=expectation(result),
        reach=on_reach(result),
        fairness=_fairness(result),
        command=result.settings.command,
        details=_details(result),
    )
    write_atomic(path, text)


def _introduction(result: Result) -> str:
    order = "in one fixed random order" if result.settings.permuted else "row by row"
    return (
        "A plain LSTM and a batch-normalized LSTM (BN-LSTM) learn to recognize handwritten digits. "
        f"Each reads an image of 64 pixels one pixel at a time, {order}, and names the digit after "
        "the last pixel."
    )


def _caption(result: Result) -> str:
    return (
        f"Accuracy on {result.sizes[1]:,} validation images during training on "
        f"{result.sizes[0]:,} images. Solid: population statistics, re-estimated from the training "
        "images at each evaluation. Dashed: statistics of the validation minibatch. A plain LSTM "
        "has no statistics."
    )


def _alternative(result: Result) -> str:
    curves = "; ".join(
        f"{m.name} from {percent(m.records[0].valid_population)} at step {m.records[0].step} to "
        f"{percent(m.last.valid_population)} at step {m.last.step}"
        for m in result.models
    )
    return f"Learning curves of validation accuracy: {curves}."


def _fairness(result: Result) -> list[str]:
    s, default = result.settings, Settings()
    return [
        "Both models start from the same weights and see the same minibatches in the same order, "
        f"with the same {s.hidden_size} units, optimizer, learning rate, clipping and noise. The "
        f"LSTM has {result.lstm.parameters:,} parameters, the BN-LSTM "
        f"{result.bn_lstm.parameters:,}, because of its γ.",
        f"The demo's learning rate, {default.learning_rate:g}, is not the best one for the plain "
        "LSTM: at 0.01 it learns faster and comes closer, while the BN-LSTM hardly changes. Try "
        "rbn demo --learning-rate 0.01.",
        "All time steps share the mean and variance of the input term, as in section 5.4 of the "
        "paper. The paper's experiments on images have separate ones for each step. Here that "
        "would slow the BN-LSTM down: pixels at the edge are blank in all but a few images, and "
        "dividing by their small standard deviation blows those few up.",
    ]


def _images(result: Result) -> str:
    train, valid, test = result.sizes
    return (
        f"scikit-learn's digits: {train:,} training, {valid:,} validation and {test:,} test images"
    )


def _details(result: Result) -> list[tuple[str, str]]:
    s = result.settings
    start = "orthogonal weights, forget bias 1, learned initial states"
    threads = f"{s.threads} CPU thread" + ("s" if s.threads > 1 else "")
    noise = f"standard deviation {s.hidden_noise} on the initial hidden state, in training"
    return [
        ("data", _images(result)),
        ("model", f"{s.hidden_size} units; {start}"),
        ("noise", noise),
        ("normalization", f"γ starts at {s.gamma}; input statistics per {s.input_stats}"),
        ("optimizer", f"Adam, learning rate {s.learning_rate:g}, gradient norm at most {s.clip:g}"),
        ("minibatches", f"{s.batch_size} images, {s.epochs} epochs, seed {s.seed}"),
        ("time", f"{result.seconds:.0f} s in total, with {threads}"),
        *result.environment.items(),
    ]
