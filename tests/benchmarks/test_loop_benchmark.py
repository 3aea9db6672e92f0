"""The benchmark of the training loop, on a small scale and without a GPU."""

import csv
import re
import sys

import pytest


def test_a_row_for_each_model(bench, tmp_path, monkeypatch):
    small = ["hidden_size=8", "batch_size=4", "length=6"]
    sets = [word for setting in small for word in ("--set", setting)]
    out = tmp_path / "loop.csv"
    words = ["loop.py", "--device", "cpu", "--precision", "32-true", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", [*words, *sets, "--out", str(out)])
    loop = bench("loop")
    monkeypatch.setattr(loop, "TEXTS", {name: (n, 500) for name, (n, _) in loop.TEXTS.items()})
    loop.main()
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(row["task"], row["model"]) for row in rows] == [
        (task, model) for task in ("ptb", "text8") for model in ("lstm", "bn-lstm")
    ]
    for row in rows:
        assert row["hidden_size"] == "8"
        layer, step = float(row["layer_ms"]), float(row["step_ms"])
        assert layer > 0
        assert step > 0
        # Both were rounded to a thousandth of a millisecond before the division here.
        assert float(row["overhead"]) == pytest.approx(step / layer - 1, abs=0.02)


def test_a_config_that_is_no_text(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["loop.py", "--device", "cpu", "--configs", "mnist"])
    with pytest.raises(SystemExit):
        bench("loop").main()
    assert re.search("mnist .*ptb .*text8", capsys.readouterr().err)
