"""The comparison of learning rates, on a tiny task without a GPU."""

import csv
import json
import tarfile

import pytest

SMALL = ("hidden_size=4", "batch_size=8", "epochs=1", "evaluate_every=4", "data.sizes=[96, 20, 20]")


def call(bench, folder, *words):
    settings = [word for setting in SMALL for word in ("--set", setting)]
    place = ("--device", "cpu", "--processes", "2", "--runs", str(folder))
    return bench("compare_rates").main(["cloze", *words, *place, *settings])


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rates_and_then_seeds_at_the_best_rate(bench, tmp_path, capsys):
    grid, seeds, out = tmp_path / "grid", tmp_path / "seeds", tmp_path / "out"
    models = ("--models", "bi-lstm", "--rates", "1e-3,1e30")
    assert call(bench, grid, *models, "--out", str(out)) == 0
    found = rows(grid / "rates.csv")
    assert [(row["model"], row["rate"]) for row in found] == [
        ("bi-lstm", "1e-3"),
        ("bi-lstm", "1e30"),
    ]
    assert [row["state"] for row in found] == ["finished", "diverged"]
    assert "bi-lstm 1e30 seed 1: diverged" in capsys.readouterr().out
    folder, row = grid / "bi-lstm-1e-3-seed1", found[0]
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert float(row["valid"]) == min(r["valid_population"] for r in records)
    result = json.loads((folder / "result.json").read_text())
    assert float(row["test"]) == result["test"]
    assert int(row["common_step"]) == result["steps"] == 12
    assert result["config"]["optimizer"]["lr"] == 1e-3
    assert sorted(path.name for path in out.iterdir()) == ["rates.csv", "runs.tar.gz", "table.txt"]
    with tarfile.open(out / "runs.tar.gz") as tar:
        assert "bi-lstm-1e-3-seed1/result.json" in tar.getnames()
        assert not any("safetensors" in name for name in tar.getnames())
    assert (
        call(bench, seeds, "--best", str(grid / "rates.csv"), "--seeds", "2", "--minutes", "9") == 0
    )
    (row,) = rows(seeds / "rates.csv")
    assert (row["model"], row["rate"], row["seed"]) == ("bi-lstm", "1e-3", "2")


def test_the_best_rate_is_one_that_did_not_diverge(bench):
    def row(rate, valid, state="finished", model="lstm"):
        return {"model": model, "rate": rate, "valid": valid, "state": state}

    best = bench("compare_rates").best_rates
    some = [row("1", 0.5), row("2", 0.4), row("3", 0.3, "diverged"), row("4", "")]
    assert best(some, higher=False) == {"lstm": "2"}
    assert best(some, higher=True) == {"lstm": "1"}
    assert best([row("3", 0.3, "diverged"), row("4", "")], higher=False) == {"lstm": "3"}
    # The mean over seeds counts, and each model has a rate of its own.
    seeds = [row("1", 0.5), row("1", 0.1), row("2", 0.2), row("2", 0.3), row("2", 0, model="b")]
    assert best(seeds, higher=False) == {"lstm": "2", "b": "2"}


def test_what_is_asked_for_must_be_clear(bench, capsys):
    for words, said in (
        ([], "give --models with --rates, or --best"),
        (["--models", "lstm", "--processes", "0"], "--processes must be positive, got 0"),
    ):
        with pytest.raises(SystemExit):
            bench("compare_rates").main(["cloze", *words])
        assert said in capsys.readouterr().err
