"""``rbn train``, ``resume`` and ``runs``."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner
from warm_commands import Command

from rbn.cli.app import app
from rbn.training import checkpoint
from rbn.training.atomic_files import read_checked, write_checked

SMALL = ["--set", "epochs=2", "--set", "hidden_size=8", "--set", "evaluate_every=6"]


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def result_of(folder):
    found = json.loads((folder / "result.json").read_text())
    changing = ("seconds", "commit", "metrics_sha256", "sha256")  # checksums include the times
    return {k: v for k, v in found.items() if k not in changing}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = invoke("train", "digits", *SMALL, "--device", "cpu", "--out", folder)
    assert done.exit_code == 0, done.output
    assert "digits, bn-lstm, seed 1: test accuracy " in done.output
    return folder


@pytest.mark.slow
def test_out_of_time_and_resumed(whole, tmp_path):
    folder = tmp_path / "run"
    options = ["--device", "cpu", "--out", folder, "--max-minutes", "1e-9"]
    done = invoke("train", "digits", *SMALL, *options)
    assert done.exit_code == 3, done.output
    said = " ".join(done.output.split())
    assert re.search(rf"rbn: out of time at step 1.*rbn resume {folder}", said)
    assert not (folder / "result.json").exists()
    done = invoke("resume", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert result_of(folder) == result_of(whole)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_and_resumed(whole, warm_process, tmp_path):
    folder = tmp_path / "run"
    # One thread, like the other run, because sums depend on the number of threads.
    assert torch.get_num_threads() == 1
    words = ["train", "digits", *SMALL, "--device", "cpu", "--out", folder]
    process = Command(warm_process, words, tmp_path, tmp_path)
    deadline = time.monotonic() + 300
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    assert process.wait(60) in (-signal.SIGKILL, 0)
    done = invoke("resume", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert result_of(folder) == result_of(whole)
    last, other = (checkpoint.load(f / "last.safetensors")[0] for f in (folder, whole))
    assert all((value == other[name]).all() for name, value in last.items())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_control_c_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "rbn", "train", "digits", "--device", "cpu"]
    small = ("--set", "hidden_size=8", "--set", "evaluate_every=2")
    process = subprocess.Popen(
        [*command, *small, "--out", str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert f"rbn resume {folder}" in errors
    assert "Traceback" not in errors


def test_a_table_of_runs(whole, tmp_path):
    done = invoke("runs", whole.parent)
    assert done.exit_code == 0
    assert "24" in done.output
    done = invoke("runs", tmp_path)
    assert done.exit_code == 2
    assert "no runs in" in done.output


def rows_of(folder):
    """By name: step, last validation, validation, test and minutes, as `rbn runs` pipes them."""
    wide = {"COLUMNS": None, "FORCE_COLOR": None}
    done = CliRunner().invoke(app, ["runs", str(folder)], env=wide)
    assert done.exit_code == 0, done.output
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in done.output.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_a_table_of_unfinished_runs(whole, tmp_path):
    """For a run that resumes between two evaluations, and for one that cannot resume."""
    shutil.copytree(whole, tmp_path / "going")
    (tmp_path / "going" / "result.json").unlink()
    last = tmp_path / "going" / "last.safetensors"
    tensors, metadata = checkpoint.load(last)
    metadata["progress"] |= {"step": 21, "seconds": 90.0}
    checkpoint.save(last, tensors, metadata)
    shutil.copytree(tmp_path / "going", tmp_path / "damaged")
    (tmp_path / "damaged" / "last.safetensors").write_bytes(b"no checkpoint")
    found = rows_of(tmp_path)
    going = found["going"]
    assert going[0] == "21"
    assert "%" in going[1]
    assert going[2:] == ["", "", "1.5"]
    assert found["damaged"] == ["", "last.safetensors is damaged", "", "", ""]
    shutil.copytree(whole, tmp_path / "result")
    (tmp_path / "result" / "result.json").write_text("{")
    (tmp_path / "going" / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "damaged" / "last.safetensors").unlink()
    found = rows_of(tmp_path)
    assert found["going"] == going  # the table reads the checkpoint, not the curve
    assert found["damaged"] == ["", "no checkpoint", "", "", ""]
    assert found["result"][3] == "result.json is damaged"


def test_a_table_with_a_checkpoint_of_something_else(whole, tmp_path):
    """Intact, but without the run's progress."""
    shutil.copytree(whole, tmp_path / "sound")
    shutil.copytree(whole, tmp_path / "tested")
    shutil.copy(whole / "final.safetensors", tmp_path / "tested" / "last.safetensors")
    shutil.copytree(tmp_path / "tested", tmp_path / "untested")
    (tmp_path / "untested" / "result.json").unlink()
    found = rows_of(tmp_path)
    assert "damaged" not in "".join(found["sound"])
    assert found["tested"][0].startswith("24, best at ")
    assert found["untested"][0] == ""
    for name in ("tested", "untested"):
        assert found[name][1] == "last.safetensors is damaged"
        assert found[name][-1] == ""


def test_a_table_in_a_narrow_terminal_has_all_there_is(whole, tmp_path, monkeypatch):
    name = "a-run-with-quite-a-long-name"
    shutil.copytree(whole, tmp_path / name)
    path = tmp_path / name / "result.json"
    write_checked(path, read_checked(path) | {"best_step": 18, "diverged_at": 24, "test": 0.125})
    monkeypatch.setenv("COLUMNS", "40")
    rows = [line.split("│") for line in invoke("runs", tmp_path).output.splitlines() if "│" in line]
    cells = ["".join("".join(parts).split()) for parts in zip(*rows, strict=True)]
    assert cells[1] == name
    assert cells[2] == "24,bestat18(diverged)"
    assert cells[5].startswith("accuracy12.50%(")


def test_a_damaged_checkpoint_has_one_before(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "result.json").unlink()
    (folder / "last.safetensors").write_bytes(b"no checkpoint")
    with pytest.warns(UserWarning, match=r"last\.safetensors .* Resuming from"):
        done = invoke("resume", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert result_of(folder) == result_of(whole)


def test_the_command_of_a_run_can_be_given_to_a_shell(tmp_path):
    zoneout = "layer.zoneout=[0.1, 0.2]"
    options = ["--device", "cpu", "--max-minutes", "1e-9", "--out", tmp_path / "a run"]
    options += ["--data-dir", tmp_path / "my data"]
    done = invoke("train", "digits", *SMALL, "--set", zoneout, *options)
    said = " ".join(done.output.split())
    assert f"rbn resume '{tmp_path}/a run' --data-dir '{tmp_path}/my data'" in said
    words = shlex.split(json.loads((tmp_path / "a run" / "config.json").read_text())["command"])
    assert words[:5] == ["rbn", "train", "digits", "--model", "bn-lstm"]
    assert words[-4:] == ["--set", zoneout, "--seed", "1"]


def test_control_c_while_testing_says_how_to_go_on(whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "result.json").unlink()

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rbn.experiments.results.exact_statistics", interrupted)
        done = invoke("resume", folder, "--device", "cpu")
    assert done.exit_code == 130
    assert re.search(rf"test.*rbn resume {folder}", done.output)
    assert invoke("resume", folder, "--device", "cpu").exit_code == 0
    assert result_of(folder) == result_of(whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "imdb"], "task .*digits, .*imdb"),
        (["train", "digits", "--model", "gru"], "model .*lstm, .*gru"),
        (["train", "digits", "--set", "nothing=1"], "setting 'nothing'"),
        (["train", "digits", "--config", "none.yaml"], r"none\.yaml"),
        (["train", "digits", "--config", "mnist"], "config mnist .*digits"),
        (["train", "digits", "--device", "cpu", "--graph"], "graph .*CUDA"),
        (
            ["train", "mnist", "--data-dir", "none", "--max-minutes", "-1"],
            "max-minutes .*-1",
        ),
        (["train", "digits", "--set", "batch_size=1"], "batch_size .*at least 2"),
        (["train", "cloze", "--set", "batch_size=1"], "batch_size .*at least 2"),
        (["train", "digits", "--set", "layer.zoneot=[0, 0]"], r"layer\.zoneout\?"),
        (["train", "digits", "--set", "layer.foo=1"], "setting 'layer.foo'.* dropout, "),
        (["train", "digits", "--set", "data.lines=1"], "data.lines.* permuted, seed"),
        (["train", "pydoc", "--set", "data.lines=1"], "setting 'data.lines'.* none"),
        (["train", "cloze", "--set", "data.fact=1"], r"data\.facts\?"),
        (["train", "cloze", "--set", "data.longst=1"], r"data\.longest\?"),
        (["train", "cloze", "--set", "layer.dropot=0"], r"layer\.dropout\?"),
        (["train", "digits", "--set", "optimizer.bets=[0, 0]"], r"optimizer\.betas\?"),
        (["train", "digits", "--set", "average=1.5"], "average .*0 .*1, got 1.5"),
        (["train", "digits", "--set", "decay_from=2"], "decay_from .*0 .*1, got 2"),
        (["train", "digits", "--seed", "-1"], "seed .*from 0 .*got -1"),
        (["train", "digits", "--seed", f"{2**63}"], f"seed .*got {2**63}"),
        (["train", "digits", "--seeds", f"1,{2**70}"], f"seed .*got {2**70}"),
        (["train", "digits", "--set", f"data.seed={2**70}"], f"data.seed .*got {2**70}"),
        (["train", "digits", "--set", "optimizer.betas=[0.9]"], "optimizer.betas .*two"),
        (["train", "digits", "--set", "optimizer.betas=[0.9,0.99,0.5]"], "optimizer.betas .*two"),
        (["train", "digits", "--set", "optimizer.capturable=true"], "capturable"),
        (["train", "digits", "--set", "hidden_size=1000000000000"], "not enough memory"),
        (["train", "digits", "--seed", "1", "--seeds", "2,3"], "--seed .*--seeds"),
        (["train", "digits", "--device", "mps"], "device .*auto, cpu, cuda or cuda:N"),
        (["train", "digits", "--device", "meta"], "device .*auto, cpu, cuda or cuda:N"),
        (["train", "digits", "--device", "gpu"], "device .*auto, cpu, cuda or cuda:N"),
        (["train", "digits", "--model", "lstm", "--set", "normalization.gama=1"], r"gamma\?"),
        (["train", "digits", "--set", "normalization.gama=1"], r"normalization\.gamma\?"),
        (["resume", "nowhere"], "holds no run: the folder does not exist"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split()))
    assert "Traceback" not in done.output
    assert not (tmp_path / "runs").exists()  # a second try starts afresh


def unfinished_with(whole, folder, changed):
    """A copy of a run without its result, whose settings were changed afterwards."""
    shutil.copytree(whole, folder)
    (folder / "result.json").unlink()
    path = folder / "config.json"
    found = read_checked(path)
    for name, value in changed.items():
        assert found["config"][name] != value
        found["config"][name] = value
    write_checked(path, found)
    return folder


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": {"name": "rmsprop", "lr": 0.001}},
        {"optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.1}},
        {"average": 0.9},
    ],
)
def test_an_optimiser_that_does_not_fit_the_checkpoint(whole, tmp_path, changed):
    folder = unfinished_with(whole, tmp_path / "run", changed)
    done = invoke("resume", folder, "--device", "cpu")
    assert done.exit_code == 1
    assert "checkpoint does not match" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("command", ["resume", "evaluate"])
def test_settings_that_do_not_fit_the_checkpoint(whole, tmp_path, command):
    folder = unfinished_with(whole, tmp_path / "run", {"hidden_size": 17})
    done = invoke(command, folder, "--device", "cpu")
    assert done.exit_code == 1
    assert "checkpoint does not match" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5", "line 5: .*got 5"),
        ("[1]", r"line 5: .*got \[1\]"),
        ('{"step": 1}', "line 5: seconds .*got None"),
        ('{"step": true}', "line 5: step .*got True"),
        ("{", "line 5: Expecting"),
    ],
)
def test_what_is_no_curve_is_not_published(whole, tmp_path, line, message):
    for name in ("result.json", "metrics.jsonl"):
        shutil.copy(whole / name, tmp_path / name)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
        file.write(f"{line}\n")
    done = invoke("publish", tmp_path, "--to", tmp_path / "results")
    assert done.exit_code == 2
    assert re.search(rf"{tmp_path}/metrics\.jsonl .*{message}", done.output)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("text", ["null", "[]", "{}", '{"tag": 1, "model": 2}', "{"])
def test_a_result_without_a_checksum_is_not_published(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    done = invoke("publish", tmp_path, "--to", tmp_path / "results")
    assert done.exit_code == 2
    assert f"{path} " in done.output
    assert "damaged" in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"tag": 1, "model": 2},
        {"task": "digits", "model": "lstm", "tag": None, "seed": 1},
        {"task": "digits", "model": "lstm", "tag": ""},
        {"task": "digits", "model": "lstm", "tag": "", "seed": None},
    ],
)
def test_what_is_no_result_is_not_published(tmp_path, content):
    """Even with a correct checksum."""
    write_checked(tmp_path / "result.json", content)
    done = invoke("publish", tmp_path, "--to", tmp_path / "results")
    assert done.exit_code == 2
    assert "result.json is not" in done.output
    assert not (tmp_path / "results").exists()


def test_a_run_that_was_tested_keeps_its_result(whole, tmp_path):
    """Resumed elsewhere, or by a later version, it keeps the first result."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = folder / "result.json"
    write_checked(path, read_checked(path) | {"commit": "0123456", "gpu": "H200"})
    before = path.read_text()
    done = invoke("resume", folder, "--device", "cpu")
    assert done.exit_code == 0
    assert f"test accuracy {100 * json.loads(before)['test']:.2f} %" in done.output
    assert "Testing" not in done.output
    assert path.read_text() == before
    path.write_text("{")  # a damaged result is written again
    assert invoke("resume", folder, "--device", "cpu").exit_code == 0
    assert json.loads(path.read_text())["test"] == json.loads(before)["test"]


def test_the_model_of_a_config(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("task: digits\nmodel: lstm\nhidden_size: 4\nepochs: 1\n")
    for given, expected in (((), "lstm"), (("--model", "ln-lstm"), "ln-lstm")):
        folder = tmp_path / f"run-{expected}"
        options = ("--config", path, "--device", "cpu", "--out", folder)
        assert invoke("train", "digits", *given, *options).exit_code == 0
        assert result_of(folder)["model"] == expected


def test_folders_whose_names_look_like_markup(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/x[/red]y")
    done = invoke("train", "digits", *SMALL, "--device", "cpu", "--out", folder)
    assert done.exit_code == 0, done.output
    assert str(folder / "result.json") in done.output.replace("\n", "")
    assert "x[/red]y" in invoke("runs", "runs").output.replace("\n", "")


def test_a_damaged_curve_is_named(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "sec')
    done = invoke("publish", folder, "--to", tmp_path / "results")
    assert done.exit_code == 2
    assert "metrics.jsonl is damaged: " in done.output
    assert not (tmp_path / "results").exists()


def test_the_model_and_the_task_are_no_settings(tmp_path):
    """They determine which settings exist."""
    for key, instead in (("model=lstm", "use --model"), ("task=ptb", "first argument")):
        done = invoke("train", "digits", "--set", key, "--out", tmp_path / "run")
        assert done.exit_code == 2
        assert instead in done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [a]", "model .*lstm, "),
        ("model: 0", "model .*lstm, "),
        ("variants: {bn-lstm: {task: pydoc}}", "variants: bn-lstm .*task"),
        ("tag: \xe9", r"own\.yaml .*UTF-8"),
    ],
)
def test_configs_that_make_no_sense(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(f"task: digits\n{text}\n", encoding="latin-1")
    done = invoke("train", "digits", "--config", "own.yaml", "--device", "cpu")
    assert done.exit_code == 2
    assert re.search(message, done.output)
    assert not Path("runs").exists()


def test_configs_that_there_are(tmp_path):
    done = invoke("train", "digits", "--config", "ptbshort")
    assert done.exit_code == 2
    assert "ptbshort" in done.output
    assert "beyond/pmnist, beyond/ptb" in done.output


def test_one_sequence_is_no_minibatch(tmp_path):
    done = invoke("train", "digits", "--set", "population_batch=1", "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert re.search("population_batch .*2", done.output)


@pytest.mark.parametrize("setting", ["length=5", "valid_windows=3"])
def test_settings_of_texts_alone(setting, tmp_path):
    done = invoke("train", "digits", "--set", setting, "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert re.search(f"{setting.split('=')[0]} .*digits", done.output)


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for words in (("train", "digits", "--out"), ("resume",), ("report", "--out")):
        done = invoke(*words, file)
        assert done.exit_code == 2, done.output
        assert f"{file} is a file, not " in done.output.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", ""], "model .*name"),
        (["--out", ""], "out .*folder"),
        (["--device", "cpu:7"], "cpu:7"),
    ],
)
def test_empty_and_missing_names_are_refused(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "digits", "--set", "epochs=1", *options])
    assert done.exit_code == 2
    assert re.search(message, done.output)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to send to another process")
def test_sigterm_saves_and_says_how_to_resume(warm_process, tmp_path):
    folder = tmp_path / "run"
    words = ["train", "digits", "--set", "hidden_size=4", "--set", "epochs=5000"]
    words += ["--set", "evaluate_every=2", "--device", "cpu", "--out", folder]
    process = Command(warm_process, words, tmp_path, tmp_path)
    deadline = time.monotonic() + 240
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, errors = process.wait(120), process.errors
    assert code == 143, errors
    assert f"rbn resume {folder}" in errors
