"""Runs the demo."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rbn import __version__
from rbn.data import Splits, digits
from rbn.experiments.demo.figure import draw
from rbn.experiments.demo.page import write_page
from rbn.experiments.demo.result import Result, Settings
from rbn.experiments.demo.terminal import Bar, progress_bars, show
from rbn.experiments.demo.train import fit

if TYPE_CHECKING:
    from rich.console import Console

_NEEDS = {
    "jinja2": "Jinja2",
    "lightning": "lightning",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "safetensors": "safetensors",
    "sklearn": "scikit-learn",
}


def run_demo(
    settings: Settings,
    out: Path,
    *,
    data: Splits | None = None,
    console: Console | None = None,
) -> Result:
    """Train both models, compare them, and write the files.

    Writes ``index.html``, ``curves.png``, ``curves.csv`` and ``result.json``, replacing those of an
    earlier run. Checks the dependencies and that `out` is writable before training.

    Args:
        settings: what to train, and how.
        out: folder for the files; created if needed.
        data: sequences with one feature and ten classes; the digits by default.
        console: where to print progress and the table; the terminal by default.
    """
    _require_extra()
    _require_writable(out)
    from rich.console import Console

    console = console or Console()
    began = time.perf_counter()
    data = data or digits(settings.permuted)
    sizes = (len(data.train), len(data.valid), len(data.test))
    steps = settings.epochs * (sizes[0] // settings.batch_size)
    console.print(
        f"{settings.task.capitalize()}: {sizes[0]:,} training images, read one pixel at a time. "
        f"Each model trains for {steps} steps, from the same weights, with the same minibatches.",
        highlight=False,
    )
    with _threads(settings.threads), progress_bars(console) as progress:
        bar = Bar(progress, "LSTM", steps)
        lstm = fit("LSTM", settings, data, bar.on_step, bar.on_record)
        bar = Bar(progress, "BN-LSTM", steps)
        bn_lstm = fit("BN-LSTM", settings, data, bar.on_step, bar.on_record)
    seconds = time.perf_counter() - began
    result = Result(settings, sizes, lstm, bn_lstm, _environment(), seconds)
    result.write_json(out / "result.json")
    result.write_csv(out / "curves.csv")
    draw(result, out / "curves.png")
    write_page(result, out / "curves.png", out / "index.html")
    show(result, console)
    page = f"Report: {out / 'index.html'}"
    console.print(page, highlight=False, soft_wrap=True, markup=False)
    return result


def _require_extra() -> None:
    missing = [name for module, name in _NEEDS.items() if not importlib.util.find_spec(module)]
    if missing:
        raise ImportError(
            f"the demo needs {' and '.join(missing)}: pip install 'recurrent-batchnorm[demo]'"
        )


def _require_writable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise OSError(f"cannot write to the folder {folder}: it is a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write to the folder {folder}: {error.strerror}") from error


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Limit torch's threads inside the ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _environment() -> dict[str, str]:
    return {
        "recurrent-batchnorm": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("scikit-learn", "matplotlib")},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }
