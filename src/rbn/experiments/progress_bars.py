"""Progress bars of training runs, or log lines if there is no terminal."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from rbn.experiments.base_task import BaseTask, has_statistics
from rbn.training import Progress, Trainer

if TYPE_CHECKING:
    from rich.console import Console

_MIN_WIDTH = 11  # characters of the last column


class ProgressBars:
    """A progress bar per run of a `TrainingSession`: speed, time left, loss and validation.

    If the console is not a terminal, prints a line at each evaluation instead.

    Args:
        console: the console to print to.
    """

    def __init__(self, console: Console) -> None:
        from rich.progress import Progress as Bars
        from rich.progress import SpinnerColumn, TextColumn, TimeRemainingColumn
        from rich.table import Column

        # If the line is too long, the speed and the last column wrap.
        self._bars = Bars(
            SpinnerColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}"),
            TextColumn("step {task.completed:,}/{task.total:,}"),
            TextColumn("{task.fields[speed]}", table_column=Column(no_wrap=False)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("left"),
            TextColumn(
                "{task.fields[loss]} {task.fields[valid]}",
                table_column=Column(no_wrap=False, min_width=_MIN_WIDTH),
            ),
            console=console,
        )
        self._console = console

    def __enter__(self) -> ProgressBars:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop updating; the bars stay visible."""
        if self._console.is_terminal:
            self._bars.stop()

    def add(self, trainer: Trainer, task: BaseTask) -> None:
        """Show a run."""
        line = self._bars.add_task(
            trainer.folder.name,
            total=trainer.schedule.steps,
            completed=trainer.progress.step,
            loss="",
            valid="",
            speed="",
        )
        begun: list[tuple[int, float]] = []
        total = trainer.schedule.steps

        def speed_of(now: Progress) -> tuple[float, str]:
            speed = (now.step - begun[0][0]) / max(now.seconds - begun[0][1], 1e-9)
            return (
                speed,
                f"{speed:,.1f} steps/s, {speed * task.items_per_step:,.0f} {task.kind.items}/s",
            )

        def on_step(now: Progress) -> None:
            if not begun:
                begun.append((now.step, now.seconds))
            elif now.step % 10 == 0 or now.step == total:
                loss = f"train loss {now.loss:.3f} nats"
                self._bars.update(line, completed=now.step, loss=loss, speed=speed_of(now)[1])

        def on_record(record: dict[str, float]) -> None:
            text = f"validation {task.kind.format_evaluation(record, has_statistics(task.model))}"
            self._bars.update(line, valid=text)
            if not self._console.is_terminal:
                now = trainer.progress
                columns = [
                    f"{trainer.folder}: step {now.step:,}/{total:,}",
                    f"train loss {record['train']:.3f} nats",
                    text,
                ]
                if begun and now.step > begun[0][0]:
                    speed, words = speed_of(now)
                    left = timedelta(seconds=round((total - now.step) / speed))
                    columns[1:1] = [words, f"{left} left"]
                self._console.print(
                    "  ".join(columns), soft_wrap=True, markup=False, highlight=False
                )
                self._console.file.flush()

        trainer.step_callbacks.append(on_step)
        trainer.record_callbacks.append(on_record)
