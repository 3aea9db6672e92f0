"""The times in README and docs are those of the files in benchmarks/results."""

import csv
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


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


SHAPES = ("mnist", "ptb", "text8", "cnn", "cnn, both ways")
CUDNN = ("torch.nn.LSTM (cuDNN)", "torch.nn.LSTM (cuDNN), batch first")


@pytest.fixture
def on_a_gpu():
    """The rows of the GPU's benchmark by shape, precision and layer; cuDNN's is the faster one."""
    with (ROOT / "benchmarks/results/gpu.csv").open(newline="") as file:
        found = {(row["shape"], row["precision"], row["what"]): row for row in csv.DictReader(file)}
    for shape, precision, _ in list(found):
        for way in ("", ", CUDA graph"):
            layouts = [found[shape, precision, f"{what}{way}"] for what in CUDNN]
            fastest = min(layouts, key=lambda row: float(row["fwdbwd_ms"]))
            found[shape, precision, f"cuDNN{way}"] = fastest
    return found


def test_the_ratios_on_a_gpu_are_those_of_the_file(on_a_gpu):
    lines = iter((ROOT / "docs/results/speed.md").read_text().splitlines())
    for shape in SHAPES:
        for precision in ("bf16", "fp16", "tf32"):

            def of(what, column="ratio_to_cudnn", key=(shape, precision)):
                return float(on_a_gpu[(*key, what)][column])

            cells = []
            for way in ("", ", CUDA graph"):
                cells.append(f"{of(f'cuDNN{way}', 'fwdbwd_ms'):.1f}")
                ours = (of(f"rbn.{name}{way}") for name in ("BatchNormLSTM", "LSTM"))
                cells += [f"{1 / ratio:.1f}" for ratio in ours]
            cells.append(f"{of('rbn.BatchNormLSTM', 'memory_ratio'):.1f}")
            wanted = f" | {precision} | {' | '.join(cells)} |"
            assert any(line.endswith(wanted) for line in lines), (shape, wanted)


def test_the_ranges_on_a_gpu_are_those_of_the_file(on_a_gpu):
    def ratios(precision, way):
        what = f"rbn.BatchNormLSTM{way}"
        return [float(on_a_gpu[shape, precision, what]["ratio_to_cudnn"]) for shape in SHAPES]

    every = {
        (precision, way): ratios(precision, way)
        for precision in ("bf16", "tf32")
        for way in ("", ", CUDA graph")
    }
    text = " ".join((ROOT / "docs/results/speed.md").read_text().split())
    times = [f"{1 / ratio:.1f}" for way in every for ratio in (max(every[way]), min(every[way]))]
    slow, fast, slow_graph, fast_graph = times[:4]
    assert f"bf16: {slow} (text8) to {fast} times as fast in eager mode" in text
    assert f"eager mode, {slow_graph} to {fast_graph} times in a CUDA graph" in text
    kernels = " ".join((ROOT / "docs/explanation/kernels.md").read_text().split())
    assert f"{slow} to {fast} times as fast as cuDNN's" in kernels
    plain = [float(on_a_gpu[shape, "bf16", "rbn.LSTM"]["ratio_to_cudnn"]) for shape in SHAPES]
    more = [ours / other for ours, other in zip(every["bf16", ""], plain, strict=True)]
    assert f"takes {min(more):.1f} to {max(more):.1f} times as long as one of our" in kernels


@pytest.mark.parametrize("shape", ["mnist", "mnist, tf32", "ptb", "text8", "cnn"])
def test_the_times_on_a_gpu_are_those_of_the_file(shape, on_a_gpu):
    def times(what, key):
        found = [
            float(on_a_gpu[(*key, f"{what}{way}")]["fwdbwd_ms"]) for way in (", CUDA graph", "")
        ]
        return ", ".join(f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" for ms in found)

    page = (ROOT / "docs/lab-notes/kernels.md").read_text()
    name, _, precision = shape.partition(", ")
    key = (name, precision or "bf16")
    line = re.search(rf"^\| {shape} \| .* \+ .* \| (.*) \| (.*) \|$", page, flags=re.M)
    ours, cudnn = line.groups()
    assert ours == times("rbn.BatchNormLSTM", key)
    assert cudnn.split(" (")[0] == times("cuDNN", key)
    commits = {on_a_gpu[(*key, what)]["commit"] for what in ("rbn.BatchNormLSTM", "cuDNN")}
    assert commits == set(re.findall(r"called \(\[`gpu\.csv`\]\(.*?\),\ncommit (\w+)\)", page))


@pytest.mark.parametrize(
    ("shape", "name", "exchange", "slow"),
    [
        ("ptb", "Penn Treebank", 0.06, 0.68),
        ("cnn", "CNN, one encoder", 0.01, 0.07),
        ("mnist", "MNIST", 0.0, 0.0),
        ("text8", "text8", 0.22, 2.6),
    ],
)
def test_when_a_second_gpu_pays_follows_from_the_file(shape, name, exchange, slow, on_a_gpu):
    """exchange, slow: ms at 300 and 25 GB/s, about; what is shown is rounded."""
    rows = [on_a_gpu[shape, "bf16", f"rbn.BatchNormLSTM{way}"] for way in ("", ", CUDA graph")]
    eager, graph = (float(row["fwdbwd_ms"]) for row in rows)
    batch = int(rows[0]["B"])
    page = (ROOT / "docs/lab-notes/scaling.md").read_text()
    line = re.search(rf"^\| {name} \| {batch} \| (.*) \|$", page, flags=re.M)
    *times, shown, whole, half, far = map(float, line.group(1).split(" | "))
    assert times == [round(eager, 2), round(graph, 2)]
    assert shown == exchange
    for found, cost, part in ((whole, exchange, 1), (half, exchange, 0.5), (far, slow, 0.5)):
        expected = 2 * batch * (eager - graph + cost) / (part * graph)
        assert found == pytest.approx(expected, rel=0.03)
    assert {row["commit"] for row in rows} == set(re.findall(r"gpu\.csv\) \(commit (\w+)\)", page))


def test_the_times_of_other_sizes_are_those_of_the_file(on_a_gpu):
    page = (ROOT / "docs/lab-notes/kernels.md").read_text()
    shapes = {shape for shape, *_ in on_a_gpu if "=" in shape}
    columns = (
        ("cuDNN, CUDA graph", "fwdbwd_ms"),
        ("rbn.BatchNormLSTM, CUDA graph", "ratio_to_cudnn"),
    )
    columns += (("rbn.LSTM, CUDA graph", "ratio_to_cudnn"), ("rbn.BatchNormLSTM", "ratio_to_cudnn"))
    assert len(shapes) == 16
    for shape in shapes:
        cells = []
        for precision in ("bf16", "tf32"):
            rows = [on_a_gpu.get((shape, precision, what)) for what, _ in columns]
            names = [column for _, column in columns]
            cells += [f"{float(r[k]):.2f}" if r else "" for r, k in zip(rows, names, strict=True)]
        assert f"| {shape.replace('=', ' = ')} | {' | '.join(cells)} |" in page


def test_what_was_checked_on_a_gpu_is_in_the_file():
    found = json.loads((ROOT / "benchmarks/results/gpu-tests.json").read_text())
    page = " ".join((ROOT / "docs/lab-notes/kernels.md").read_text().split())
    ran = f"In the run of commit {found['commit']} all {found['passed']} tests passed, in "
    assert f"{ran}{found['seconds']:.0f} s" in page
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
    """As `loop.csv` has it, and at most 15 %."""
    with (ROOT / "benchmarks/results/loop.csv").open() as file:
        found = {
            (row["task"], row["model"]): float(row["overhead"]) for row in csv.DictReader(file)
        }
    assert max(found.values()) <= 0.15
    page = " ".join((ROOT / "docs/lab-notes/experiments.md").read_text().split())
    (numbers,) = re.findall(
        r"takes ([\d.]+) % more on Penn Treebank for the BN-LSTM and ([\d.]+) % for the LSTM, "
        r"and ([\d.]+) and ([\d.]+) % on text8",
        page,
    )
    order = [(task, model) for task in ("ptb", "text8") for model in ("bn-lstm", "lstm")]
    for number, which in zip(numbers, order, strict=True):
        assert float(number) == pytest.approx(100 * found[which], abs=0.5), which


def test_the_times_of_the_simple_rnn_are_those_of_the_file():
    with (ROOT / "benchmarks/results/gpu-rnn.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["commit"] for row in rows}) == 1
    speed = (ROOT / "docs/results/speed.md").read_text()
    notes = (ROOT / "docs/lab-notes/kernels/rnn.md").read_text()
    of = {(row["shape"], row["precision"], row["what"]): row for row in rows}
    at = {page: page.index("precision | cuDNN called") for page in (notes,)}
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
    at = page.index("precision | cuDNN called")
    for shape, precision in dict.fromkeys((row["shape"], row["precision"]) for row in rows):
        if precision == "fp16":  # of cuDNN, beside our bf16
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
