"""``rbn runs``, ``rbn publish``, ``rbn evaluate`` and ``rbn sample``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rbn.cli.common import (
    DataDir,
    Device,
    Run,
    default_folder,
    device_of,
    folder_of_run,
    guarded,
    make_console,
    make_table,
    printable,
    stop,
)

Split = Annotated[
    str, typer.Option(help="Data to evaluate on: train, valid, test or test-cnn (dailymail-built).")
]
Statistics = Annotated[str, typer.Option(help="Statistics to normalize with: population or batch.")]
Length = Annotated[
    str | None,
    typer.Option(
        help="For text: window length in characters, or full for a single sequence, which is how "
        "rbn train tests."
    ),
]


def runs(
    folder: Annotated[Path, typer.Argument(help="Where to look for runs.")] = Path("runs"),
) -> None:
    """Show a table of the runs in a folder and their results."""
    from rich.markup import escape

    table = make_table("run", "step", "last validation", "validation", "test", "minutes")
    configs = sorted(folder.rglob("config.json"))
    for path in configs:
        name = printable(str(path.parent.relative_to(folder)))
        table.add_row(escape(name), *map(escape, _figures(path.parent)))
    if not configs:
        stop(f"no runs in {folder}", 2)
    make_console().print(table)


def _figures(run: Path) -> list[str]:
    """Step, last validation, validation, test and minutes of a run. Names damaged files."""
    from rbn.experiments.run_folder import read_config
    from rbn.training.atomic_files import read_checked
    from rbn.training.checkpoint import CheckpointError, load_metadata

    step = last = valid = test = minutes = ""
    try:
        config, _ = read_config(run)
    except (OSError, ValueError):
        return ["config.json is damaged", "", "", "", ""]
    try:
        now = load_metadata(run / "last.safetensors")["progress"]
        step, minutes = f"{now['step']:,d}", f"{now['seconds'] / 60:.1f}"
        if now["history"]:
            value = float(now["history"][-1][f"valid_{config.select}"])
            last = config.kind.format_valid(value, config.statistics(config.select))
    except CheckpointError:
        exists = (run / "last.safetensors").exists()
        last = "last.safetensors is damaged" if exists else "no checkpoint"
    except (KeyError, TypeError, ValueError):  # an intact file, but not of a run's progress
        last = "last.safetensors is damaged"
    try:
        values = read_checked(run / "result.json")
        valid = config.kind.format_valid(values["valid"], config.statistics())
        test = config.kind.format_test(values["test"], config.statistics())
        step = f"{values['steps']:,d}, best at {values['best_step']:,d}"
        if values["diverged_at"] is not None:
            step += " (diverged)"
    except FileNotFoundError:
        pass
    except (KeyError, OSError, TypeError, ValueError):
        test = "result.json is damaged"
    return [step, last, valid, test, minutes]


def publish(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    to: Annotated[
        Path | None,
        typer.Option(help="Folder of results. Default: results in a clone, else runs/results."),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace results of runs with other settings, too.")
    ] = False,
) -> None:
    """Copy results and learning curves to TASK/MODEL-seedN.json and .csv in a folder."""
    from rbn.experiments import results

    def work() -> None:
        target = default_folder("results") if to is None else to
        for run in dict.fromkeys(runs):
            typer.echo(str(results.publish(run, target, replace)))

    guarded(work)


def evaluate(
    run: Run,
    split: Split = "test",
    stats: Statistics = "population",
    length: Length = None,
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """Evaluate a trained model."""
    from rbn.experiments import trained_models

    def work() -> None:
        if length is not None:
            trained_models.check_length(length)
        folder = folder_of_run(run)
        config, task = trained_models.open_task(folder, device_of(device), data_dir)
        estimate = None if trained_models.is_final(folder) else config.population_batch
        over = task.default_length(split, stats) if length is None else length
        value = trained_models.evaluate(task, split, stats, over, estimate)
        how = [split, f"{stats} stats"] if config.batch_normalized else [split]
        if over is not None:
            how.append("whole sequence" if over == "full" else f"windows of {over} characters")
        if estimate is not None:
            best = (run / "best.safetensors").exists()
            how.append("the best model so far" if best else "the last checkpoint")
        typer.echo(f"{config.task}, {config.name}: {config.kind.format(value)} ({', '.join(how)})")

    guarded(work)


def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Start of the text.")] = "the ",
    temperature: Annotated[
        float, typer.Option(help="0: the most likely character; 1: as learned.")
    ] = 0.8,
    length: Annotated[int, typer.Option(help="Number of characters to generate.")] = 300,
    seed: Annotated[int, typer.Option(help="Random seed of the sampling.")] = 1,
    device: Device = "auto",
) -> None:
    """Generate text with a trained language model."""
    from rbn.experiments import trained_models
    from rbn.experiments.config import check_seed

    def work() -> None:
        check_seed("seed", seed)
        model, symbols = trained_models.open_language_model(folder_of_run(run), device_of(device))
        characters = trained_models.sample(model, symbols, prompt, length, temperature, seed)
        for k, character in enumerate(characters):
            typer.echo((prompt if k == 0 else "") + character, nl=False)
        typer.echo("" if length else prompt)

    guarded(work)
