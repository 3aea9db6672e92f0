"""The `rbn` command."""

import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("typer")

from typer.testing import CliRunner, Result

import rbn
from rbn.cli.app import app
from rbn.cli.common import make_console, make_table
from rbn.experiments.demo import Settings


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Records the demos that would run."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr("rbn.cli.app.run_demo", lambda *arguments: seen.append(arguments))
    return seen


def raising(error: BaseException) -> Any:
    def run_demo(*_: Any) -> None:
        raise error

    return run_demo


def test_version() -> None:
    result = call("--version")
    assert result.exit_code == 0
    assert result.output == f"rbn {rbn.__version__}\n"


@pytest.mark.parametrize("colors", [None, "1"])
def test_a_table_in_a_pipe_is_not_folded(
    colors: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if colors is not None:
        monkeypatch.setenv("FORCE_COLOR", colors)
    table = make_table("run", "test")
    table.add_row("a" * 150, "b" * 150)
    console = make_console()
    with console.capture() as found:
        console.print(table)
    assert "a" * 150 in found.get()
    assert "b" * 150 in found.get()
    assert max(map(len, found.get().splitlines())) < 400  # not padded to the console's width
    monkeypatch.setenv("COLUMNS", "40")
    assert make_console().width == 40


def test_help_names_the_commands() -> None:
    result = call("--help")
    assert result.exit_code == 0
    assert "demo" in result.output


def test_demo_by_default(
    runs: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Path(__file__).parent  # inside a clone
    for place in (inside, tmp_path):
        monkeypatch.chdir(place)
        assert call("demo").exit_code == 0
    assert runs == [(Settings(), Path("demo-out")), (Settings(), Path("runs/demo"))]


@pytest.mark.slow
def test_outside_a_clone_everything_is_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the paths that the commands print are correct."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delenv("COLUMNS", raising=False)  # set by pytest-xdist
    small = ("hidden_size=2", "epochs=1", "batch_size=600", "population_batch=600")
    words = [word for setting in small for word in ("--set", setting)]
    done = call("train", "digits", "--model", "lstm", "--device", "cpu", *words)
    assert "In runs/digits/lstm-seed1/result.json" in done.output
    assert "digits/lstm-seed1" in call("runs").output
    done = call("publish", "runs/digits/lstm-seed1")
    assert done.output == "runs/results/digits/lstm-seed1.json\n"
    done = call("report")
    assert done.output.startswith("rbn: no results ")
    assert "runs/results" in done.output
    (tmp_path / "elsewhere/runs/results/mnist").mkdir()
    published = Path(__file__).parents[2] / "results/mnist"
    for name in ("lstm-seed1.json", "lstm-seed1.csv"):
        shutil.copy(published / name, "runs/results/mnist")
    done = call("report")
    assert done.exit_code == 0, done.output
    assert "runs/report/report.md" in done.output.splitlines()
    assert [path.name for path in Path().iterdir()] == ["runs"]


def test_demo_with_every_option(runs: list[tuple[Any, ...]], tmp_path: Path) -> None:
    settings = Settings(permuted=True, seed=7, epochs=3, threads=2, learning_rate=0.01)
    words = settings.command.split()[1:]
    assert call(*words, "--out", str(tmp_path)).exit_code == 0
    assert runs == [(settings, tmp_path)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "epochs .*1, got 0"),
        (["--seed", "-3"], "seed .*0, got -3"),
        (["--threads", "0"], "threads .*1, got 0"),
        (["--learning-rate", "-1"], r"learning_rate .*positive, got -1\.0"),
    ],
)
def test_bad_options_get_one_sentence(
    arguments: list[str], message: str, runs: list[tuple[Any, ...]]
) -> None:
    result = call("demo", *arguments)
    assert result.exit_code == 2
    assert re.fullmatch(f"rbn: {message}\n", result.output)
    assert runs == []


def test_unwritable_folder_gets_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.touch()
    result = call("demo", "--out", str(file))
    assert result.exit_code == 2
    assert result.output.startswith("rbn: ")
    assert str(file) in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ImportError("the demo needs rich: pip install it"), 2, "rbn: the demo needs rich: "),
        (FloatingPointError("the loss is nan at step 3"), 1, "rbn: the loss is nan at step 3"),
        (KeyboardInterrupt(), 130, "rbn: interrupted"),
    ],
)
def test_ends_with_one_line(
    error: BaseException, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rbn.cli.app.run_demo", raising(error))
    result = call("demo")
    assert result.exit_code == code
    assert result.output.startswith(sentence)
    assert result.output.count("\n") == 1


@pytest.mark.slow
def test_without_typer_one_sentence() -> None:
    program = "import sys; sys.modules['typer'] = None; import rbn.cli; rbn.cli.main()"
    for arguments, extra in ((["demo"], "demo"), (["train", "digits"], "train,plots")):
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stdout == ""
        assert f"pip install 'recurrent-batchnorm[{extra}]'" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to another process")
def test_interrupted_while_training(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rbn", "demo", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()  # it prints its plan, then trains
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert first.startswith("Sequential digits")
    assert process.returncode == 130
    assert errors.splitlines() == ["rbn: interrupted"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_an_interrupt_during_an_import_ends_like_any_other(tmp_path: Path) -> None:
    """Python creates classes with exec(), and remembers an interrupt raised inside it."""
    (tmp_path / "interrupted.py").write_text(
        "import sys, rbn.cli, rbn.cli.app\n"
        "def app():\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        "        sys.exit(130)\n"
        "rbn.cli.app.app = app\n"
        "rbn.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, timeout=300)
    assert done.returncode == 130


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to another process")
def test_an_interrupt_waits_until_an_extension_is_loaded(tmp_path: Path) -> None:
    """A C++ extension may not survive it."""
    (tmp_path / "loading.py").write_text(
        "import signal, sys, time\n"
        "from rbn.training import interrupt\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may ignore it
        "interrupt.handle_signals()\n"
        "def load():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('loaded', flush=True)\n"
        "interrupt._LOADING = (load.__code__,)\n"
        "try:\n"
        "    load()\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    print('again')\n"
    )
    command = [sys.executable, "loading.py"]
    done = subprocess.run(command, cwd=tmp_path, timeout=300, capture_output=True, text=True)
    assert done.stdout.split() == ["loaded", "interrupted", "again"], done.stderr
    assert done.returncode == 0


def test_an_extension_is_loaded_by_these_functions() -> None:
    from rbn.training import interrupt

    seen = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        seen.append(frame.f_code)

    before = sys.getprofile()
    spec = importlib.util.find_spec("_elementtree")
    assert spec is not None
    if not isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
        pytest.skip("this Python has all of the standard library's extensions built in")
    sys.setprofile(look)
    try:
        importlib.util.module_from_spec(spec)
    finally:
        sys.setprofile(before)
    assert set(interrupt._LOADING) & set(seen)
