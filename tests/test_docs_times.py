"""The times in README and docs match the files in benchmarks/results."""

import csv
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from marked_numbers import numbers_at, text_at

ROOT = Path(__file__).parents[1]


def bench(name):
    """A module from the benchmarks folder."""
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def test_the_times_of_two_processes_are_those_of_the_file():
    with (ROOT / "benchmarks/results/scaling.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs/lab-notes/scaling.md").read_text()
    for sizes in {tuple(row[k] for k in "TBIH") for row in rows}:
        line = re.search(rf"^\| {', '.join(sizes)} \|(.*)\|$", page, flags=re.M)
        found = {
            f"{float(row[k]):.0f}"
            for row in rows
            if tuple(row[name] for name in "TBIH") == sizes
            for k in ("step_ms", "exchange_ms")
            if row[k]
        }
        assert line is not None
        assert {cell.strip() for cell in line.group(1).split("|")} == found


@pytest.mark.parametrize("page", bench("doc_tables").PAGES)
def test_the_tables_are_those_of_the_files(page):
    text = (ROOT / page).read_text()
    assert bench("doc_tables").MARKED.search(text), "there is no table"
    assert bench("doc_tables").filled(text) == text, "run python benchmarks/doc_tables.py"


def test_a_table_that_differs_from_its_file_is_found():
    page = (ROOT / bench("doc_tables").PAGES[0]).read_text()
    number = re.search(r"<!-- table: gpu -->.*?\*\*([\d.]+)\*\*", page, re.S)
    changed = page[: number.start(1)] + "9.9" + page[number.end(1) :]
    assert bench("doc_tables").filled(changed) == page


def test_all_times_on_a_gpu_are_from_one_run():
    rows = bench("doc_tables").read("gpu.csv").values()
    assert len({(row["commit"], row["date"], row["versions"], row["gpu"]) for row in rows}) == 1


def test_the_ranges_on_a_gpu_are_those_of_the_file():
    rows = bench("doc_tables").read("gpu.csv")
    own = {
        name: [rows[shape, "bf16", f"rbn.{name}"] for shape in bench("gpu_rows").SHAPES]
        for name in ("BatchNormLSTM", "LSTM")
    }
    speeds = [float(row["times_as_fast"]) for row in own["BatchNormLSTM"]]
    more = [
        float(bn["fwdbwd_ms"]) / float(plain["fwdbwd_ms"])
        for bn, plain in zip(own["BatchNormLSTM"], own["LSTM"], strict=True)
    ]
    page = "docs/explanation/kernels.md"
    earlier = bench("doc_tables").read("gpu-sweeps.csv")
    loops = [
        1 / float(earlier[shape, "bf16", bench("gpu_rows").COMPILED]["times_as_fast"])
        for shape in bench("gpu_rows").SHAPES
    ]
    for name, values, digits in (
        ("compiled-loop", loops, 0),
        ("beside-cudnn", speeds, 1),
        ("beside-our-lstm", more, 1),
    ):
        ends = [f"{end(values):.{digits}f}" for end in (min, max)]
        assert numbers_at(page, name, 2) == ends, name


def test_what_was_checked_on_a_gpu_is_in_the_file():
    found = json.loads((ROOT / "benchmarks/results/gpu-tests.json").read_text())
    notes = "docs/lab-notes/kernels.md"
    page = " ".join((ROOT / notes).read_text().split())
    assert text_at(notes, "tests-commit").startswith(found["commit"])
    assert numbers_at(notes, "tests-passed") == [str(found["passed"])]
    assert numbers_at(notes, "tests-seconds") == [f"{found['seconds']:.0f}"]
    for name, one in found["first_call"].items():
        assert f"{one['seconds']:.0f} s for {name.split(',')[0]}'s" in page
    assert found["tests"] == found["passed"]
    for name, checks in found["compute_sanitizer"].items():
        if name != "version":
            assert {check["outcome"] for check in checks.values()} == {"clean"}, name


def test_the_times_on_x86_are_those_of_the_file():
    with (ROOT / "benchmarks/results/cpu-x86.csv").open() as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs/results/speed.md").read_text()
    for what in ("BatchNormLSTM", "LSTM", "LayerNormLSTM"):
        cells = [
            f"{1 / float(row['ratio_to_nn_lstm']):.2f}"
            for row in rows
            if row["what"] == f"rbn.{what}"
        ]
        assert len(cells) == 4
        assert f"| `{what}` | {' | '.join(cells)} |" in page


def test_what_a_step_takes_beside_its_layer():
    """As in `loop.csv`, and at most 15 %."""
    with (ROOT / "benchmarks/results/loop.csv").open() as file:
        found = {
            (row["task"], row["model"]): float(row["overhead"]) for row in csv.DictReader(file)
        }
    assert max(found.values()) <= 0.15
    for task in ("ptb", "text8"):
        for model in ("bn-lstm", "lstm"):
            (number,) = numbers_at("docs/lab-notes/experiments.md", f"loop-{task}-{model}")
            assert float(number) == pytest.approx(100 * found[task, model], abs=0.5), (task, model)


def test_the_times_of_the_simple_rnn_are_those_of_the_file():
    with (ROOT / "benchmarks/results/gpu-rnn.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["commit"] for row in rows}) == 1
    speed = (ROOT / "docs/results/speed.md").read_text()
    notes = (ROOT / "docs/lab-notes/kernels/rnn.md").read_text()
    of = {(row["shape"], row["precision"], row["what"]): row for row in rows}
    at = {page: page.index("precision | cuDNN eager") for page in (notes,)}
    at[speed] = speed.index("`BatchNormRNN` beside cuDNN")
    for shape, precision in dict.fromkeys(key[:2] for key in of):
        cudnn = of[shape, precision, "torch.nn.RNN (cuDNN)"]
        ours = of[shape, precision, "rbn.BatchNormRNN"]
        steps = of[shape, precision, "rbn.BatchNormRNN, step by step"]
        ratios = [
            cell
            for way in ("called_ms", "graph_ms")
            for cell in (
                f"{float(cudnn[way]):.2f}",
                f"{float(ours[way]):.2f}",
                f"{float(cudnn[way]) / float(ours[way]):.2f}",
            )
        ]
        times = [float(row["called_ms"]) for row in (cudnn, ours, steps)]
        times += [float(row["graph_ms"]) for row in (cudnn, ours)]
        for page, cells in ((speed, ratios), (notes, [f"{time:.2f}" for time in times])):
            line = f"| {precision} | {' | '.join(cells)} |"
            assert line in page[at[page] :], (shape, line)
            at[page] = page.index(line, at[page])  # in the order of the file


def test_the_times_of_the_layer_normalized_lstm_are_those_of_the_file():
    with (ROOT / "benchmarks/results/gpu-ln.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    (commit,) = {row["commit"] for row in rows}
    page = (ROOT / "docs/lab-notes/kernels/layer-norm.md").read_text()
    assert f"commit {commit}" in page
    at = page.index("precision | cuDNN eager")
    for shape, precision in dict.fromkeys((row["shape"], row["precision"]) for row in rows):
        if precision == "fp16":  # cuDNN's, next to our bf16
            continue
        allowed = ("bf16", "fp16") if precision == "bf16" else (precision,)
        own = [row for row in rows if row["shape"] == shape and row["precision"] in allowed]
        cells = []
        for way in ("called_ms", "graph_ms"):
            cells.append(min(float(row[way]) for row in own if "cuDNN" in row["what"]))
            cells += [float(row[way]) for row in own if row["what"] == "rbn.LayerNormLSTM"]
        line = f"| {precision} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"
        assert line in page[at:], (shape, line)
        at = page.index(line, at)  # in the order of the file
