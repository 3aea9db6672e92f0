"""``rbn train`` and ``rbn resume``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rbn.cli.common import (
    DataDir,
    Device,
    Stopped,
    check_minutes,
    check_out,
    device_of,
    guarded,
    interrupted_code,
)
from rbn.experiments.config import Config

if TYPE_CHECKING:
    from rbn.training import World

Task = Annotated[
    str,
    typer.Argument(
        help="digits, mnist, pmnist, ptb, text8, pydoc, cloze, cnn, cnn-built or dailymail-built."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "--variant",
        help="lstm, bn-lstm (the default, unless the config has one), ln-lstm, bn-gru, bn-rnn, rnn "
        "or irnn; for reading tasks lstm, bi-lstm, bn-lstm, bn-everywhere, bn-e* or bn-e**.",
    ),
]
File = Annotated[
    str | None,
    typer.Option(help="Config instead of the paper's: a YAML file, or a name like mnist-code."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting: key=value, for instance optimizer.lr=0.01."),
]
Seed = Annotated[
    int | None, typer.Option(help="Random seed of weights, noise and data order. Default: 1.")
]
Seeds = Annotated[str | None, typer.Option(help="Train several seeds at once, such as 1,2,3.")]
Precision = Annotated[str | None, typer.Option(help="32-true, bf16-mixed or 16-mixed.")]
Graph = Annotated[
    bool | None,
    typer.Option(
        help="Run each training step as a CUDA graph. Default: on a GPU, except with 16-mixed."
    ),
]
TensorBoard = Annotated[bool, typer.Option(help="Write learning curves for TensorBoard.")]
Minutes = Annotated[
    float | None, typer.Option(help="Save and stop after this many minutes, with exit code 3.")
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the run, or of all runs. Default: runs/TASK/MODEL-seedN."),
]
Devices = Annotated[
    int | None,
    typer.Option(
        help="Number of processes that train a run together, each on its own GPU (or on the "
        "CPU). Default: 1, or as many as torchrun started.",
    ),
]
Folders = Annotated[
    list[Path], typer.Argument(help="Run folders; several are trained at the same time.")
]


def train(
    task: Task,
    model: Model = None,
    config: File = None,
    set_: Settings = None,
    seed: Seed = None,
    seeds: Seeds = None,
    device: Device = "auto",
    devices: Devices = None,
    precision: Precision = None,
    graph: Graph = None,
    tensorboard: TensorBoard = False,
    max_minutes: Minutes = None,
    data_dir: DataDir = None,
    out: Out = None,
) -> None:
    """Train a model on one of the paper's tasks, with the paper's settings.

    If a run is killed, ``rbn resume`` continues it to the same results.
    """
    from rbn.experiments import config as configs

    def work() -> None:
        if model == "":
            raise ValueError("model must be the name of a model, got ''")
        check_out(out)
        values = (
            configs.published(task) if config is None else configs.read_yaml(configs.find(config))
        )
        if values.get("task", task) != task:
            raise ValueError(f"config {config} is for task {values['task']}, not {task}")
        wanted = [f"precision={precision}"] if precision else []
        named = {setting.partition("=")[0].strip() for setting in set_ or []}
        if "model" in named:
            raise ValueError(
                "--set cannot change the model: use --model, which selects its settings"
            )
        if "task" in named:
            raise ValueError("--set cannot change the task: it is the first argument of rbn train")
        config_model = values.get("model")
        chosen = model or ("bn-lstm" if config_model is None else config_model)
        settings = configs.from_mapping({"task": task, **configs.for_model(values, chosen)})
        settings = configs.with_settings(settings, [*wanted, *(set_ or [])])
        if seed is not None and seeds is not None:
            raise ValueError("pass either --seed or --seeds, not both")
        numbers = [1 if seed is None else seed] if seeds is None else _numbers(seeds)
        for number in numbers:
            configs.check_seed("a seed", number)
        runs = []
        for number in numbers:
            folder = Path("runs") / settings.task / f"{settings.name}-seed{number}"
            if out is not None:
                folder = out if seeds is None else out / f"{settings.name}-seed{number}"
            runs.append((folder, settings, number))
        words = ["rbn", "train", task, "--model", chosen, *(["--config", config] if config else [])]
        for setting in set_ or []:
            words += ["--set", setting]
        words += ["--precision", precision] if precision else []
        options = device, graph, tensorboard, max_minutes, data_dir
        _run(Plan(runs, *options, shlex.join(words)), devices)

    guarded(work)


def resume(
    runs: Folders,
    device: Device = "auto",
    devices: Devices = None,
    graph: Graph = None,
    tensorboard: TensorBoard = False,
    max_minutes: Minutes = None,
    data_dir: DataDir = None,
) -> None:
    """Resume runs that were stopped or killed, on any number of devices."""
    from rbn.experiments.run_folder import read_config

    def work() -> None:
        for folder in runs:
            if sum(folder.resolve() == other.resolve() for other in runs) > 1:
                raise ValueError(f"{folder} is named twice")
        existing = [(folder, *read_config(folder)) for folder in runs]
        _run(Plan(existing, device, graph, tensorboard, max_minutes, data_dir), devices)

    guarded(work)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"seeds must be numbers such as 1,2,3, got {text!r}") from None
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"seeds must differ from each other, got {text!r}")
    return numbers


@dataclass(frozen=True)
class Plan:
    """What to train, and how. Picklable, so that it can be sent to other processes."""

    runs: list[tuple[Path, Config, int]]
    device: str
    graph: bool | None
    tensorboard: bool
    max_minutes: float | None
    data_dir: Path | None
    command: str | None = None

    def hint(self, count: int) -> str:
        """Tell the user how to resume the runs, if training has started."""
        folders = shlex.join(str(folder) for folder, _, _ in self.runs)
        options = f" --devices {count}" if count > 1 else ""
        if self.data_dir is not None:
            options += f" --data-dir {shlex.quote(str(self.data_dir))}"
        if not all((folder / "config.json").exists() for folder, _, _ in self.runs):
            return "Training had not started"
        return f"Resume with: rbn resume {folders}{options}"


def _run(plan: Plan, devices: int | None) -> None:
    """Train in this process, in several new ones, or as one of torchrun's processes."""
    from rbn.experiments.run_folder import check_available
    from rbn.experiments.training_session import check_processes
    from rbn.training import RankLost, World, launch

    check_minutes(plan.max_minutes)
    world = World.from_environment()
    if world is not None and devices not in (None, world.local_count):
        raise ValueError(
            f"devices must be omitted, or {world.local_count} as torchrun started here, "
            f"got {devices}"
        )
    local = (1 if devices is None else devices) if world is None else world.local_count
    count = local if world is None else world.count
    check_processes(plan.runs, device_of(plan.device), local, count, plan.graph)
    if plan.command is not None and count > 1:
        plan = replace(plan, command=f"{plan.command} --devices {count}")
    try:
        if world is not None or count == 1:
            _train(plan, world)
            return
        for folder, config, seed in plan.runs:
            check_available(folder, config, seed)
        launch(_train_rank, (plan,), count)
    except RankLost as error:
        raise Stopped(f"{error}. {plan.hint(count)}", 1) from error


def _train_rank(plan: Plan) -> None:
    """Train as one of the processes that `launch` started."""
    from rbn.training import World

    _train(plan, World.from_environment())


def _train(plan: Plan, world: World | None) -> None:
    """Train runs to the end, with progress bars, and report the results.

    Creates folders only after data and models are built, so that invalid settings leave none.
    """
    from contextlib import nullcontext

    from rich.console import Console

    from rbn.experiments.progress_bars import ProgressBars
    from rbn.experiments.training_session import TrainingSession
    from rbn.training import Interrupted, process_group

    place = device_of(plan.device)
    first = world is None or world.rank == 0
    count = 1 if world is None else world.count
    console = Console(quiet=not first)
    with process_group(world):
        device = place if world is None else world.device(place)
        session = TrainingSession(plan.runs, device, plan.data_dir, plan.command, world=world)
        bars = ProgressBars(console) if first else nullcontext()
        with bars as observer:
            try:
                session.train(plan.graph, plan.tensorboard, plan.max_minutes, observer)
            except KeyboardInterrupt as error:
                if observer is not None:
                    observer.close()
                steps = " and ".join(f"{t.progress.step:,}" for t in session.trainers)
                saved = "saved" if isinstance(error, Interrupted) else "not saved"
                said = f"stopped after step {steps}, {saved}" if steps else "stopped"
                code = interrupted_code(error)
                raise Stopped(f"{said}. {plan.hint(count)}", code) from None
        try:
            for result in session.results(console):
                console.print(result, soft_wrap=True, markup=False)
        except KeyboardInterrupt as error:
            said, code = "stopped during the test", interrupted_code(error)
            raise Stopped(f"{said}. {plan.hint(count)}", code) from None
        unfinished = [
            t
            for t in session.trainers
            if not t.progress.finished and t.progress.diverged_at is None
        ]
        if unfinished:
            step = unfinished[0].progress.step
            rest = [run for run in plan.runs if run[0] in [t.folder for t in unfinished]]
            hint = replace(plan, runs=rest).hint(count)
            said = f"out of time at step {step:,}, saved. {hint}"
            if session.diverged is None:
                raise Stopped(said, 3)
            console.print(said, soft_wrap=True, markup=False)
        if session.diverged is not None:
            raise session.diverged
