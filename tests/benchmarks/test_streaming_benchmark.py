"""The streaming benchmark, on a small scale."""

import csv
import sys

import pytest


def test_a_row_for_each_module(bench, tmp_path, monkeypatch):
    out = tmp_path / "streaming.csv"
    words = ["streaming.py", "--repeats", "2", "--layer-repeats", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    streaming = bench("streaming")
    monkeypatch.setattr(streaming, "UNITS", (4,))
    monkeypatch.setattr(streaming, "SHAPES", [(3, 1, 2, 4)])
    streaming.main()
    rows = list(csv.DictReader(out.read_text().splitlines()))
    cells = [row["what"] for row in rows if row["T"] == "1"]
    assert len(cells) == 16
    assert cells[:8] == cells[8:]  # without a gradient and with one
    layers = [row["what"] for row in rows if row["T"] == "3"]
    assert layers == ["torch.nn.LSTM", "rbn.BatchNormLSTM", "rbn.FoldedLSTM"]
    medians = {(r["what"], r["mode"], r["T"]): float(r["median_us"]) for r in rows}
    for row in rows:
        theirs = medians[row["peer"], row["mode"], row["T"]]
        ours = medians[row["what"], row["mode"], row["T"]]
        # The medians were rounded to a tenth of a microsecond after the ratio was computed.
        assert float(row["ratio"]) == pytest.approx(ours / theirs, rel=0.05)
        assert row["device"]
        assert row["commit"]
