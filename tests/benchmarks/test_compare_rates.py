"""The comparison of learning rates, on a tiny task or on made-up runs, without a GPU."""

import csv
import json
import sys
import tarfile
import time
from types import SimpleNamespace

import pytest

SMALL = ("hidden_size=4", "batch_size=8", "epochs=1", "evaluate_every=4", "data.sizes=[96, 20, 20]")
RESULT = {"valid": 0.3, "test": 0.4, "test_cnn": 0.5, "steps": 8, "skipped": 0}


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def made_up(folder, figures, result=None, log=""):
    """A run's folder with these validation results, one every four steps."""
    folder.mkdir(parents=True)
    records = [
        {"step": 4 * k, "seconds": 2.0 * k, "valid_population": figure}
        for k, figure in enumerate(figures, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "log.txt").write_text(log)
    if result is not None:
        (folder / "result.json").write_text(json.dumps(RESULT | {"diverged_at": None} | result))


def test_a_run_of_rbn_train_is_read_as_it_is(bench, tmp_path):
    testing = pytest.importorskip("typer.testing")
    from rbn.cli.app import app

    compare = bench("compare_rates")
    words = [word for setting in SMALL for word in ("--set", setting)]
    options = compare._options(["cloze", "--models", "bi-lstm", "--device", "cpu", *words])
    (run,) = compare.runs_of(["bi-lstm"], {"bi-lstm": ["1e-3"]}, [2], tmp_path)
    command = compare.command_of(run, options)
    assert command[:4] == [sys.executable, "-m", "rbn", "train"]
    done = testing.CliRunner().invoke(app, command[3:])
    assert done.exit_code == 0, done.output
    (row,) = compare.rows_of([run], higher=False)
    result = json.loads((run.folder / "result.json").read_text())
    assert result["config"]["optimizer"]["lr"] == 1e-3
    assert (result["model"], result["seed"], result["tag"]) == ("bi-lstm", 2, "rate-1e-3")
    assert row["state"] == "finished"
    assert row["steps"] == row["common_step"] == result["steps"] == 12
    assert row["valid"] == min(r["valid_population"] for r in run.records())
    assert (row["result_valid"], row["test"]) == (result["valid"], result["test"])


# Stands in for rbn train: a run at rate 1 diverges, one at rate 3 trains until it is stopped.
PROCESS = """
import json, pathlib, sys, time
folder, rate = pathlib.Path(sys.argv[1]), sys.argv[2]
record = {"step": 4, "seconds": 1.0, "valid_population": float(rate)}
result = {"valid": 1, "test": 0.5, "steps": 4, "skipped": 0}
result["diverged_at"] = 3 if rate == "1" else None
try:
    (folder / "last.safetensors").touch()
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\\n")
    while rate == "3":
        time.sleep(0.05)
    (folder / "result.json").write_text(json.dumps(result))
except KeyboardInterrupt:
    print("stopped")
"""


def test_rates_then_seeds_at_the_best_rate(bench, tmp_path, capsys, monkeypatch):
    compare = bench("compare_rates")
    monkeypatch.setattr(
        compare,
        "command_of",
        lambda run, options: [sys.executable, "-c", PROCESS, str(run.folder), run.rate],
    )

    def clock():  # time is up as soon as three runs train and two of them are done
        counts = [len(list(tmp_path.rglob(name))) for name in ("metrics.jsonl", "result.json")]
        return 1e6 if counts == [3, 2] else 0.0

    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    grid, seeds, out = tmp_path / "grid", tmp_path / "seeds", tmp_path / "out"
    shared = ("--device", "cpu", "--processes", "3", "--minutes", "9")
    models = ("--models", "lstm", "--rates", "1,2,3", "--runs", str(grid), "--out", str(out))
    assert compare.main(["cloze", *models, *shared]) == 0
    states = [(row["rate"], row["state"]) for row in rows(grid / "rates.csv")]
    assert states == [("1", "diverged"), ("2", "finished"), ("3", "stopped")]
    assert "lstm 1 seed 1: diverged" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["rates.csv", "runs.tar.gz", "table.txt"]
    with tarfile.open(out / "runs.tar.gz") as tar:
        assert "lstm-2-seed1/result.json" in tar.getnames()
        assert not any("safetensors" in name for name in tar.getnames())
    best = ("--best", str(grid / "rates.csv"), "--seeds", "4,5", "--runs", str(seeds))
    assert compare.main(["cloze", *best, *shared]) == 0
    found = [(row["model"], row["rate"], row["seed"]) for row in rows(seeds / "rates.csv")]
    assert found == [("lstm", "2", "4"), ("lstm", "2", "5")]


def test_what_became_of_each_run(bench, tmp_path):
    compare = bench("compare_rates")
    runs = compare.runs_of(["a", "b*"], {"a": ["1", "2"], "b*": ["1", "2"]}, [1], tmp_path)
    finished, diverged, stopped, failed = runs
    assert failed.folder.name == "b-star-2-seed1"
    made_up(finished.folder, [0.5, 0.2, 0.1], {"steps": 12})
    made_up(diverged.folder, [0.6, float("nan")], {"diverged_at": 7})
    made_up(stopped.folder, [0.4, 0.3], log="epoch 1\nstopped at step 9\n")
    with (stopped.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "valid_popu')  # the process was killed while it wrote
    made_up(failed.folder, [], log="Traceback\nRuntimeError: no memory\n")
    found = compare.rows_of(runs, higher=False)
    assert [row["state"] for row in found] == [
        *("finished", "diverged", "stopped", "failed: RuntimeError: no memory")
    ]
    # The comparison is at step 8: the stopped run has no later one, and the others do not count.
    assert {row["common_step"] for row in found} == {8}
    assert [(row["valid"], row["valid_step"]) for row in found] == [
        *((0.2, 8), (0.6, 4), (0.3, 8), ("", ""))
    ]
    assert [row["steps"] for row in found] == [12, 8, 8, ""]
    assert [row["steps_per_second"] for row in found] == [2.0, 2.0, 2.0, ""]
    lines = compare.table_of(found, higher=False).splitlines()
    assert "| a | 20.0 / 40.0 / 50.0* | 60.0 / 40.0 / 50.0 (1 diverged) |" in lines
    assert "| b* | 30.0* | none |" in lines
    assert "a 2 seed 1: diverged" in lines
    assert "b* 2 seed 1: failed: RuntimeError: no memory" in lines


def test_the_first_step_that_reaches_a_target(bench, tmp_path):
    compare = bench("compare_rates")
    runs = compare.runs_of(["a"], {"a": ["1", "2", "3"]}, [1], tmp_path)
    made_up(runs[0].folder, [0.5, 0.2, 0.4], {})
    made_up(runs[1].folder, [float("nan"), 0.5, 0.3], {})
    made_up(runs[2].folder, [], log="stopped\n")
    for higher, steps in ((False, [8, 12, "never"]), (True, [4, 8, "never"])):
        found = compare.rows_of(runs, higher, 0.3)
        assert [row["target_step"] for row in found] == steps
        assert {row["target"] for row in found} == {0.3}
    assert {row["target_step"] for row in compare.rows_of(runs, False)} == {""}


def test_the_best_rate_is_one_that_did_not_diverge(bench):
    def row(rate, valid, state="finished", model="lstm"):
        return {"model": model, "rate": rate, "valid": valid, "state": state}

    best = bench("compare_rates").best_rates
    some = [row("1", 0.5), row("2", 0.4), row("3", 0.3, "diverged"), row("4", "")]
    assert best(some, higher=False) == {"lstm": "2"}
    assert best(some, higher=True) == {"lstm": "1"}
    assert best([row("3", 0.3, "diverged"), row("4", "")], higher=False) == {"lstm": "3"}
    # The mean over seeds counts, and each model has its own best rate.
    seeds = [row("1", 0.5), row("1", 0.1), row("2", 0.2), row("2", 0.3), row("2", 0, model="b")]
    assert best(seeds, higher=False) == {"lstm": "2", "b": "2"}


def test_the_best_rate_is_that_of_finished_runs(bench):
    """Not at the step that a slower model reached, unless the model has unfinished runs."""

    def row(rate, valid, result):
        return {"model": "lstm", "rate": rate, "valid": valid, "result_valid": result, "state": "x"}

    best = bench("compare_rates").best_rates
    early, late = row("1", 0.58, 0.69), row("2", 0.14, 0.95)
    assert best([early, late], higher=True) == {"lstm": "2"}
    assert best([early, late | {"result_valid": ""}], higher=True) == {"lstm": "1"}


def test_what_is_asked_for_must_be_clear(bench, capsys):
    for words, said in (
        ([], "give --models with --rates, or --best"),
        (["--models", "lstm", "--processes", "0"], "--processes must be positive, got 0"),
    ):
        with pytest.raises(SystemExit):
            bench("compare_rates").main(["cloze", *words])
        assert said in capsys.readouterr().err
