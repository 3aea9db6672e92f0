"""``rbn train``, ``rbn resume`` and ``rbn runs``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from rbn.experiments.config import Config

Task = Annotated[
    str, typer.Argument(help="digits, mnist, pmnist, ptb, text8, pydoc, cloze, cnn or cnn-built.")
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
File = Annotated[Path | None, typer.Option(help="Settings (YAML) instead of the paper's.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="key=value, for instance optimizer.lr=0.01.")
]
Seed = Annotated[int, typer.Option(help="Of weights, noise and order.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto takes a GPU if there is one.")]
Minutes = Annotated[float | None, typer.Option(help="Save and stop after so many.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data are; RBN_DATA by default.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the run; runs/TASK/MODEL-seedN.")]
Run = Annotated[Path, typer.Argument(help="Folder of a run.")]


def train(
    task: Task,
    model: Model = "bn-lstm",
    config: File = None,
    set_: Settings = None,
    seed: Seed = 1,
    device: Device = "auto",
    max_minutes: Minutes = None,
    data_dir: DataDir = None,
    out: Out = None,
) -> None:
    """Train a model on one of the paper's tasks, with the paper's settings.

    A run that is killed goes on with ``rbn resume``, to the same numbers.
    """
    from rbn.experiments import config as configs

    def work() -> None:
        found = configs.published(task) if config is None else configs.read(config)
        settings = configs.from_mapping({"task": task, **configs.for_model(found, model)})
        settings = configs.with_settings(settings, set_ or [])
        folder = out or Path("runs") / settings.task / f"{settings.name}-seed{seed}"
        _go_on(folder, settings, seed, device, max_minutes, data_dir)

    _guarded(work)


def resume(
    run: Run,
    device: Device = "auto",
    max_minutes: Minutes = None,
    data_dir: DataDir = None,
) -> None:
    """Go on with a run that was stopped or killed."""
    from rbn.experiments import runs as experiments

    _guarded(lambda: _go_on(run, *experiments.opened(run), device, max_minutes, data_dir))


def runs(
    folder: Annotated[Path, typer.Argument(help="Where to look for runs.")] = Path("runs"),
) -> None:
    """A table of the runs in a folder and their results."""
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "steps", "best validation", "valid", "test", "minutes")
    found = sorted(folder.rglob("config.json"))
    for path in found:
        row = [str(path.parent.relative_to(folder)), "", "", "", "", ""]
        metrics, result = path.with_name("metrics.jsonl"), path.with_name("result.json")
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if lines:
            last = json.loads(lines[-1])
            row[1], row[2] = str(last["step"]), f"{last['valid_batch']:.4f} (last)"
            row[5] = f"{last['seconds'] / 60:.1f}"
        if result.exists():
            values = json.loads(result.read_text())
            row[1], row[2] = str(values["steps"]), f"at step {values['best_step']}"
            row[3], row[4] = f"{values['valid']:.4f}", f"{values['test']:.4f}"
        table.add_row(*row)
    if not found:
        _stop(f"there is no run in {folder}", 2)
    Console().print(table)


def _go_on(
    folder: Path,
    settings: Config,
    seed: int,
    device: str,
    max_minutes: float | None,
    data_dir: Path | None,
) -> None:
    """Train the run of a folder to its end, with a progress bar, and report.

    The folder is made when the data and the model are there, so that a mistake leaves nothing.
    """
    import torch
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    from rbn.experiments import runs as experiments

    experiments.check_free(folder, settings, seed)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        task = experiments.build(settings, seed, torch.device(device), data_dir)
    except TypeError as error:  # an option that the layer or the data set does not have
        raise ValueError(f"the settings do not fit: {error}") from error
    experiments.start(folder, settings, seed)
    console = Console()
    columns = (
        SpinnerColumn(),
        TextColumn("step {task.completed:,} of {task.total:,}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]} {task.fields[valid]}"),
    )
    with Progress(*columns, console=console) as bar:
        line = bar.add_task("", total=1, loss="", valid="", speed="")

        def on_step(progress: Any, loss: Any) -> None:
            if progress.step % 10 == 0 or progress.step < 10:
                speed = progress.step / max(progress.seconds, 1e-9)
                unit = "characters" if settings.is_text else "sequences"
                text = f"{speed:,.1f} steps/s, {speed * task.items_per_step:,.0f} {unit}/s"
                shown = f"loss {float(loss):.3f}"
                bar.update(line, completed=progress.step, loss=shown, speed=text)

        def on_record(record: dict[str, float]) -> None:
            text = f"validation {record['valid_batch']:.4f}, {record['valid_population']:.4f}"
            bar.update(line, valid=text)

        trainer = experiments.make_trainer(
            settings, task, folder, max_minutes, on_step=on_step, on_record=on_record
        )
        bar.update(line, total=trainer.schedule.steps, completed=trainer.progress.step)
        try:
            progress = trainer.run()
        except KeyboardInterrupt:
            step = trainer.progress.step
            _stop(f"stopped after step {step:,}, saved. Go on with: rbn resume {folder}", 130)
    if not progress.finished:
        console.print(f"Out of time at step {progress.step:,}. Go on with: rbn resume {folder}")
        return
    command = f"rbn train {settings.task} --model {settings.model} --seed {seed}"
    result = experiments.finish(settings, seed, trainer, command)
    console.print(
        f"{settings.task}, {settings.name}, seed {seed}: test {result['test']:.4f} "
        f"({result['metric']}), validation {result['valid']:.4f}, best at step "
        f"{progress.best_step:,} of {progress.step:,}. In {folder / 'result.json'}."
    )


def _guarded(work: Callable[[], None]) -> None:
    """One sentence instead of a traceback for what a user can mend."""
    from rbn.training import CheckpointError, Diverged

    try:
        work()
    except (ImportError, OSError, ValueError) as error:
        _stop(str(error), 2)
    except (CheckpointError, Diverged) as error:
        _stop(str(error), 1)
    except KeyboardInterrupt:
        _stop("stopped before training began", 130)


def _stop(reason: str, code: int) -> NoReturn:
    typer.echo(f"rbn: {reason}", err=True)
    raise typer.Exit(code)
