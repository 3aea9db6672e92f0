"""The commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import rbn
from rbn.cli import paper, reading, runs, train
from rbn.cli.common import default_folder, interrupted_code, stop
from rbn.cli.data import app as data
from rbn.cli.sweep import app as sweep
from rbn.experiments.demo import Settings, run_demo

app = typer.Typer(
    name="rbn",
    help="Batch-normalized recurrent networks for PyTorch.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # show bugs with Python's own traceback
)
app.add_typer(data)
app.add_typer(sweep)
data.command("build-cloze")(reading.build_cloze)
data.command("questions")(reading.questions)


for command in (
    train.train,
    train.resume,
    runs.runs,
    runs.evaluate,
    runs.sample,
    runs.publish,
    reading.ask,
):
    app.command()(command)
app.command()(paper.reproduce)
app.command()(paper.report)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rbn {rbn.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Batch-normalized recurrent networks for PyTorch."""


@app.command()
def demo(
    permuted: Annotated[
        bool, typer.Option("--permuted", help="Read the pixels in one fixed random order.")
    ] = Settings.permuted,
    seed: Annotated[
        int, typer.Option(help="Random seed of weights, noise and data order.")
    ] = Settings.seed,
    epochs: Annotated[
        int, typer.Option(help="Passes over the training images, for each model.")
    ] = Settings.epochs,
    learning_rate: Annotated[
        float, typer.Option(help="Learning rate of Adam, for both models.")
    ] = Settings.learning_rate,
    threads: Annotated[int, typer.Option(help="Number of CPU threads.")] = Settings.threads,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output folder for the page, the figure and the numbers. Default: demo-out in a "
            "clone, else runs/demo."
        ),
    ] = None,
) -> None:
    """Train a plain and a batch-normalized LSTM on handwritten digits, and compare them.

    Takes about a minute and a half on one CPU core. The digits come with scikit-learn.
    """
    try:
        settings = Settings(permuted, seed, epochs, threads, learning_rate)
    except ValueError as error:
        stop(str(error), 2)
    try:
        run_demo(settings, default_folder("demo", "demo-out") if out is None else out)
    except (ImportError, OSError) as error:
        stop(str(error), 2)
    except FloatingPointError as error:
        stop(str(error), 1)
    except KeyboardInterrupt as error:
        stop("interrupted", interrupted_code(error))
