"""``rbn runs``, ``rbn publish``, ``rbn evaluate`` and ``rbn sample``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rbn.cli.common import DataDir, Device, Run, device_of, guarded, make_console, make_table, stop

Split = Annotated[str, typer.Option(help="train, valid, test or test-cnn (dailymail-built).")]
Statistics = Annotated[str, typer.Option(help="population or batch.")]
Length = Annotated[
    str | None,
    typer.Option(help="Of texts: characters of a window, or full for one sequence."),
]


def runs(
    folder: Annotated[Path, typer.Argument(help="Where to look for runs.")] = Path("runs"),
) -> None:
    """A table of the runs in a folder and their results."""
    from rich.markup import escape

    table = make_table("run", "steps", "best validation", "valid", "test", "minutes")
    found = sorted(folder.rglob("config.json"))
    for path in found:
        table.add_row(escape(str(path.parent.relative_to(folder))), *_figures(path.parent))
    if not found:
        stop(f"there is no run in {folder}", 2)
    make_console().print(table)


def _figures(run: Path) -> list[str]:
    """Steps, best validation, valid, test and minutes of a run; a damaged file is named."""
    from rbn.training.checkpoint import CheckpointError, load_facts

    steps = best = valid = test = minutes = ""
    metrics, result = run / "metrics.jsonl", run / "result.json"
    try:
        now = load_facts(run / "last.safetensors")["progress"]
        steps, minutes = str(now["step"]), f"{now['seconds'] / 60:.1f}"
    except CheckpointError:
        steps = "no checkpoint"
    except (KeyError, TypeError, ValueError):  # a sound file, but not of a run's progress
        steps, minutes = "", "last.safetensors is damaged"
    try:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if lines:
            best = f"{json.loads(lines[-1])['valid_population']:.4f} (last)"
    except (KeyError, OSError, TypeError, ValueError):
        best = f"{metrics.name} is damaged"
    try:
        if result.exists():
            values = json.loads(result.read_text())
            valid, test = f"{values['valid']:.4f}", f"{values['test']:.4f}"
            steps, best = str(values["steps"]), f"at step {values['best_step']}"
            if values["diverged_at"] is not None:
                steps += " (diverged)"
    except (KeyError, OSError, TypeError, ValueError):
        test = f"{result.name} is damaged"
    return [steps, best, valid, test, minutes]


def publish(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    to: Annotated[Path, typer.Option(help="Folder of results.")] = Path("results"),
    replace: Annotated[
        bool, typer.Option("--replace", help="Also results of runs with other settings.")
    ] = False,
) -> None:
    """Copy results and learning curves to TASK/MODEL-seedN.json and .csv in a folder."""
    from rbn.experiments import results

    def work() -> None:
        for run in dict.fromkeys(runs):
            typer.echo(str(results.publish(run, to, replace)))

    guarded(work)


def evaluate(
    run: Run,
    split: Split = "test",
    stats: Statistics = "population",
    length: Length = None,
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """Measure a trained model."""
    from rbn.experiments import trained

    def work() -> None:
        if length is not None:
            trained.check_length(length)
        config, task = trained.open_task(run, device_of(device), data_dir)
        estimate = None if trained.is_final(run) else config.population_batch
        value = trained.evaluate(task, split, stats, length, estimate)
        unit = "bits per character" if config.is_text else "accuracy"
        unit = "error rate" if config.is_reading else unit
        how = f"{split}, {stats} statistics" + (f", length {length}" if length else "")
        how += "" if estimate is None else ", the best model so far"
        typer.echo(f"{config.task}, {config.name}: {value:.4f} {unit} ({how})")

    guarded(work)


def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "the ",
    temperature: Annotated[float, typer.Option(help="0: the likeliest; 1: as learned.")] = 0.8,
    length: Annotated[int, typer.Option(help="Characters to write.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 1,
    device: Device = "auto",
) -> None:
    """Write text with a trained language model."""
    from rbn.experiments import trained
    from rbn.experiments.config import check_seed

    def work() -> None:
        check_seed("seed", seed)
        model, symbols = trained.open_language_model(run, device_of(device))
        characters = trained.sample(model, symbols, prompt, length, temperature, seed)
        for k, character in enumerate(characters):
            typer.echo((prompt if k == 0 else "") + character, nl=False)
        typer.echo("" if length else prompt)

    guarded(work)
