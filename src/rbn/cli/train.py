"""``rbn train`` and ``rbn resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rbn.cli.common import DataDir, Device, device_of, guarded, stop
from rbn.experiments.config import Config

Task = Annotated[
    str,
    typer.Argument(help="digits, mnist, pmnist, ptb, text8, pydoc, cloze, cnn or cnn-built."),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "--variant",
        help="lstm, bn-lstm, ln-lstm, bn-rnn, rnn or irnn; for reading tasks lstm, bn-lstm, "
        "bn-everywhere, bn-e* or bn-e**.",
    ),
]
File = Annotated[
    str | None,
    typer.Option(help="Settings (YAML) instead of the paper's: a file, or a name like mnist-code."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, for instance optimizer.lr=0.01.")
]
Seed = Annotated[int, typer.Option(help="Of weights, noise and order.")]
Seeds = Annotated[str | None, typer.Option(help="Several at once, such as 1,2,3.")]
Precision = Annotated[str | None, typer.Option(help="32-true, bf16-mixed or 16-mixed.")]
Graph = Annotated[
    bool | None,
    typer.Option(help="Each step as one CUDA graph; on a GPU by default, but for 16-mixed."),
]
TensorBoard = Annotated[bool, typer.Option(help="Write learning curves for TensorBoard.")]
Minutes = Annotated[float | None, typer.Option(help="Save and stop after so many.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder of the run, or of the runs; runs/TASK/MODEL-seedN.")
]
Folders = Annotated[list[Path], typer.Argument(help="Folders of runs, trained at once.")]


def train(
    task: Task,
    model: Model = "bn-lstm",
    config: File = None,
    set_: Settings = None,
    seed: Seed = 1,
    seeds: Seeds = None,
    device: Device = "auto",
    precision: Precision = None,
    graph: Graph = None,
    tensorboard: TensorBoard = False,
    max_minutes: Minutes = None,
    data_dir: DataDir = None,
    out: Out = None,
) -> None:
    """Train a model on one of the paper's tasks, with the paper's settings.

    A run that is killed goes on with ``rbn resume``, to the same numbers.
    """
    from rbn.experiments import config as configs

    def work() -> None:
        found = configs.published(task) if config is None else configs.read(configs.find(config))
        wanted = [f"precision={precision}"] if precision else []
        settings = configs.from_mapping({"task": task, **configs.for_model(found, model)})
        settings = configs.with_settings(settings, [*wanted, *(set_ or [])])
        numbers = [seed] if seeds is None else _numbers(seeds)
        runs = []
        for number in numbers:
            folder = Path("runs") / settings.task / f"{settings.name}-seed{number}"
            if out is not None:
                folder = out if seeds is None else out / f"{settings.name}-seed{number}"
            runs.append((folder, settings, number))
        command = f"rbn train {task} --model {model}" + (f" --config {config}" if config else "")
        command += "".join(f" --set {setting}" for setting in set_ or [])
        command += f" --precision {precision}" if precision else ""
        _go_on(runs, device, graph, tensorboard, max_minutes, data_dir, command)

    guarded(work)


def resume(
    runs: Folders,
    device: Device = "auto",
    graph: Graph = None,
    tensorboard: TensorBoard = False,
    max_minutes: Minutes = None,
    data_dir: DataDir = None,
) -> None:
    """Go on with runs that were stopped or killed."""
    from rbn.experiments.runs import opened

    def work() -> None:
        found = [(folder, *opened(folder)) for folder in runs]
        _go_on(found, device, graph, tensorboard, max_minutes, data_dir, None)

    guarded(work)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"seeds must be numbers such as 1,2,3, got {text!r}") from None
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"seeds must be different from each other, got {text!r}")
    return numbers


def _go_on(
    runs: list[tuple[Path, Config, int]],
    device: str,
    graph: bool | None,
    tensorboard: bool,
    max_minutes: float | None,
    data_dir: Path | None,
    command: str | None,
) -> None:
    """Train runs to their end, with a progress bar, and report.

    Their folders are made when data and models are there, so that a mistake leaves nothing.
    """
    from rich.console import Console

    from rbn.experiments.fit import Fit, Watch

    place = device_of(device)
    fit = Fit(runs, place, data_dir, command)
    console = Console()
    with Watch(fit, console) as watch:
        try:
            fit.train(graph, tensorboard, max_minutes, watch)
        except KeyboardInterrupt:
            watch.close()
            folders = " ".join(str(folder) for folder, _, _ in runs)
            steps = " and ".join(f"{t.progress.step:,}" for t in fit.trainers)
            stop(f"stopped after step {steps}, saved. Go on with: rbn resume {folders}", 130)
    unfinished = [
        t for t in fit.trainers if not t.progress.finished and t.progress.diverged_at is None
    ]
    for result in fit.results(console):
        console.print(result, soft_wrap=True)
    if unfinished:
        folders = " ".join(str(trainer.folder) for trainer in unfinished)
        step = unfinished[0].progress.step
        console.print(f"Out of time at step {step:,}. Go on with: rbn resume {folders}")
    if fit.diverged is not None:
        raise fit.diverged
