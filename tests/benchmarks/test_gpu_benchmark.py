"""The parts of the GPU benchmark that need no GPU: its plan, rows, baselines and lower bound."""

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rbn

FOLDER = Path(__file__).parents[2] / "benchmarks"
FACTS = {"gpu": "a card", "versions": "rbn 0", "commit": "abc", "date": "2026-01-01"}


@pytest.fixture
def rates(bench):
    operations = {"tf32": 4e14, "bf16": 8e14, "fp16": 8e14}
    return bench("gpu_floor").Rates(operations, 4e12, 1e-6)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# The plan ---------------------------------------------------------------------------------------


def test_the_paper_comes_first_and_nothing_twice(bench):
    gpu, rows = bench("gpu"), bench("gpu_rows")
    plan = gpu.plan()
    assert [case[:2] for case in plan[:5]] == [(shape, "16 bits") for shape in rows.SHAPES]
    single = [(shape, *layer) for shape, _, layers in plan for layer in layers]
    assert len(single) == len(set(single))
    for shape in rows.ALL_SHAPES:
        for precision in rows.PRECISIONS:
            assert (shape, precision, rows.BN_LSTM) in single
    assert gpu.plan(["tf32"], ["peers"]) == [
        (shape, "tf32", rows.PEERS["tf32"]) for shape in rows.SHAPES
    ]
    assert gpu.plan(["tf32"], only=["B=2", "ptb"]) == [
        (shape, "tf32", layers["tf32"])
        for shape, layers in (("ptb", rows.LAYERS), ("B=2", rows.LAYERS), ("ptb", rows.PEERS))
    ]


def test_the_peer_in_16_bits_is_every_way_to_call_cudnn(bench):
    rows = bench("gpu_rows")
    assert len(set(rows.CUDNNS["16 bits"])) == 6
    assert ("fp16", "torch.nn.LSTM (cuDNN), autocast, batch first") in rows.CUDNNS["16 bits"]
    inputs = {(sizes[2], sizes[3]) for sizes in rows.SWEEPS.values()}
    assert {(64, 512), (512, 512), (64, 2048), (2048, 2048)} <= inputs


def test_the_shapes_of_the_paper(bench):
    shapes = bench("gpu_rows").SHAPES
    assert shapes["mnist"] == (784, 100, 1, 100, 1)
    assert shapes["ptb"] == (100, 64, 50, 1000, 1)
    assert shapes["text8"] == (180, 128, 27, 2000, 1)
    assert shapes["cnn"] == (300, 64, 240, 240, 1)
    assert shapes["cnn, both ways"] == (300, 64, 240, 240, 2)


# The rows ---------------------------------------------------------------------------------------


def row_of(rows, shape, precision, what, **figures):
    return {"shape": shape, **rows.sizes_of(shape), "precision": precision, "what": what} | figures


def test_a_row_is_on_disk_at_once_and_replaces_its_like(bench, tmp_path):
    rows = bench("gpu_rows")
    path = tmp_path / "results" / "gpu.csv"
    store = rows.Rows(path)
    store.put(row_of(rows, "ptb", "bf16", rows.BN_LSTM, fwdbwd_ms=2.0, commit="old"))
    store.put(row_of(rows, "mnist", "bf16", rows.LSTM, fwdbwd_ms=3.0, commit="old"))
    assert [r["shape"] for r in read(path)] == ["mnist", "ptb"]  # in the order of the shapes
    again = rows.Rows(path)  # another run, which ends before it reaches mnist
    again.put(row_of(rows, "ptb", "bf16", rows.BN_LSTM, fwdbwd_ms=1.0, commit="new"))
    found = {r["shape"]: (r["fwdbwd_ms"], r["commit"]) for r in read(path)}
    assert found == {"mnist": ("3.0", "old"), "ptb": ("1.0", "new")}
    rows.Rows(path, fresh=True).put(row_of(rows, "cnn", "tf32", rows.LSTM))
    assert [r["shape"] for r in read(path)] == ["cnn"]
    assert [p.name for p in path.parent.iterdir()] == ["gpu.csv"]


def test_the_columns(bench, tmp_path):
    rows = bench("gpu_rows")
    path = tmp_path / "gpu.csv"
    rows.Rows(path).put(row_of(rows, "ptb", "bf16", rows.CUDNN))
    wanted = "shape,T,B,I,H,directions,precision,what,fwd_ms,fwdbwd_ms,infer_ms,peak_mb,"
    wanted += "times_as_fast,fastest_cudnn"
    assert path.read_text().startswith(wanted)
    with pytest.raises(ValueError, match="unknown columns: colour"):
        rows.Rows(path).put(row_of(rows, "ptb", "bf16", rows.CUDNN, colour="red"))


def test_median_and_spread(bench):
    rows = bench("gpu_rows")
    assert rows.median_and_spread([9.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, 1.0)
    found = rows.figures_of({"fwdbwd": [2.0] * 3, "peak_mb": 1.26}, {"fwdbwd": 0.5})
    assert found == {
        "fwdbwd_ms": 2.0,
        "fwdbwd_spread": 0.0,
        "fwdbwd_floor": 0.25,
        "peak_mb": 1.3,
    }


# A run ------------------------------------------------------------------------------------------


def fake_measure(rows, slow=()):
    """A training step takes 8 ms in cuDNN, 6 with batch first, 3 in ours; half in a graph."""
    times = {rows.CUDNN: 8.0, rows.LSTM: 2.0, rows.BN_LSTM: 3.0}

    def measure(what, shape, precision):
        if what in slow:
            raise RuntimeError("out of memory")
        ms = next((ms for name, ms in times.items() if what.startswith(name)), 60.0)
        ms -= 2.0 * (rows.BATCH_FIRST in what)
        yield what, {name: [ms] * 3 for name in ("fwd", "fwdbwd", "infer")} | {"peak_mb": ms}
        yield what + rows.GRAPH, {"fwdbwd": [ms / (4 if what == rows.BN_LSTM else 2)] * 3}

    return measure


def run(bench, rates, path, *todo, slow=(), time_left=lambda: 1):
    gpu, rows = bench("gpu"), bench("gpu_rows")
    measure = fake_measure(rows, slow)
    return gpu.run(list(todo), rows.Rows(path), rates, FACTS, measure, time_left)


def test_a_run_compares_like_with_like(bench, rates, tmp_path, capsys):
    rows = bench("gpu_rows")
    path = tmp_path / "gpu.csv"
    todo = [("ptb", "16 bits", each["16 bits"]) for each in (rows.LAYERS, rows.PEERS)]
    assert run(bench, rates, path, *todo) == ([], [])
    found = {(r["precision"], r["what"]): r for r in read(path)}
    assert len(found) == 2 * (6 + 5 + 2)
    assert float(found["fp16", rows.CUDNN]["times_as_fast"]) == 0.75
    first = found["bf16", rows.CUDNN + rows.BATCH_FIRST]
    assert (first["times_as_fast"], first["fastest_cudnn"]) == ("1.0", "bf16, batch first")
    ours = found["fp16", rows.BN_LSTM]
    assert ours["times_as_fast"] == "2.0"  # compared with the fastest eager one
    assert found["bf16", rows.BN_LSTM + rows.GRAPH]["times_as_fast"] == "4.0"  # 3 / 0.75
    assert ours["memory_ratio"] == "0.5"
    assert found["bf16", rows.SCRIPTED]["times_as_fast"] == "0.1"
    assert all(r["commit"] == "abc" for r in found.values())
    assert "rbn.BatchNormLSTM, CUDA graph" in capsys.readouterr().out


def test_the_fastest_configuration_of_cudnn_is_named(bench):
    rows = bench("gpu_rows")
    cudnn = [
        {"what": rows.CUDNN + option, "precision": precision, "fwdbwd_ms": ms}
        for precision, option, ms in (
            *(("fp16", "", 4.0), ("fp16", rows.AUTOCAST, 3.0), ("bf16", rows.GRAPH, 1.0)),
            ("bf16", rows.PACKED, 0.5),
        )
    ]
    ours = {"what": rows.BN_LSTM, "precision": "bf16", "fwdbwd_ms": 2.0}
    assert rows.beside_cudnn(ours, cudnn) == {
        "times_as_fast": 1.5,
        "fastest_cudnn": "fp16, autocast",
    }
    for option in (rows.PACKED, rows.LENGTHS):  # rows for variable lengths
        found = rows.beside_cudnn(ours | {"what": rows.BN_LSTM + option}, cudnn)
        assert found["fastest_cudnn"] == "bf16, PackedSequence"


def test_peers_alone_bring_their_own_cudnn(bench, rates, tmp_path):
    rows = bench("gpu_rows")
    path = tmp_path / "gpu.csv"
    run(bench, rates, path, ("cnn", "tf32", rows.PEERS["tf32"]))
    found = {r["what"]: r["times_as_fast"] for r in read(path)}
    assert found[rows.COMPILED] == "0.1"
    assert rows.CUDNN in found


def test_a_failure_costs_its_own_row_alone(bench, rates, tmp_path):
    rows = bench("gpu_rows")
    path = tmp_path / "gpu.csv"
    todo = ("cnn", "tf32", rows.LAYERS["tf32"])
    failed, missed = run(bench, rates, path, todo, slow=(rows.LSTM,))
    assert failed == ["cnn, tf32, rbn.LSTM: RuntimeError: out of memory"]
    assert missed == []
    whats = {r["what"] for r in read(path)}
    assert rows.BN_LSTM in whats
    assert rows.LSTM not in whats


def test_a_run_ends_with_its_time(bench, rates, tmp_path):
    rows = bench("gpu_rows")
    path, left = tmp_path / "gpu.csv", iter([3, 2, 1])
    todo = [(shape, "tf32", rows.LAYERS["tf32"]) for shape in ("ptb", "cnn")]
    failed, missed = run(bench, rates, path, *todo, time_left=lambda: next(left, 0))
    assert not failed
    assert missed == [
        ("ptb", "tf32", rows.LSTM),
        *(("cnn", *layer) for layer in rows.CUDNNS["tf32"] + rows.LAYERS["tf32"]),
    ]
    assert {r["shape"] for r in read(path)} == {"ptb"}


def test_slow_calls_are_sampled_less(bench, monkeypatch):
    timing, seconds = bench("gpu_timing"), [0.0]

    def call_of_two_seconds():
        seconds[0] += 2

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = seconds[0]

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "SECONDS", 5)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    assert len(timing.sample(lambda: None, 15)) == 15
    assert timing.sample(call_of_two_seconds, 15) == [2000, 2000, 2000]


# The lower bound --------------------------------------------------------------------------------


def test_the_floor_is_the_longest_of_three(bench, rates):
    floors = bench("gpu_floor").floors
    mnist = floors((784, 100, 1, 100, 1), "bf16", rates)
    assert mnist["fwd"] == pytest.approx(0.784)  # 784 barriers of a microsecond each
    assert mnist["fwdbwd"] == pytest.approx(2 * 0.784)
    text8 = floors((180, 128, 27, 2000, 1), "tf32", rates)
    rows, gates = 180 * 128, 8000
    assert text8["fwd"] == pytest.approx(2 * rows * gates * 2027 / 4e14 * 1e3)
    assert text8["fwdbwd"] == pytest.approx(2 * rows * gates * (3 * 2000 + 2 * 27) / 4e14 * 1e3)
    assert text8["infer"] == text8["fwd"]
    # One step of a wide layer: its weights are read once forward, read and written once backward.
    wide = floors((1, 2, 64, 4096, 1), "bf16", rates)
    weights = 2 * 4 * 4096 * (64 + 4096)
    assert wide["fwd"] == pytest.approx(weights / 4e12 * 1e3, rel=1e-3)
    assert wide["fwdbwd"] == pytest.approx(3 * weights / 4e12 * 1e3, rel=1e-3)


def test_the_kernel_that_meets(bench):
    pytest.importorskip("triton", reason="the kernel needs triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def time_one(function):
        function()
        return 6.0

    rounds = 2000 if device == "cuda" else 3
    assert bench("gpu_floor").time_of_a_meeting(time_one, device) == pytest.approx(6e-3 / rounds)


# The baselines ----------------------------------------------------------------------------------


def as_they_are(function):
    return function


def test_the_compiled_cell_is_the_batch_normalized_lstm(bench):
    torch.manual_seed(0)
    peer = bench("gpu_layers").CompiledCellBatchNormLSTM(3, 5, compile=as_they_are)
    layer = rbn.BatchNormLSTM(3, 5, initial_state="zeros", refresh_stats=False)
    for name, parameter in peer.named_parameters():
        parameter.data.normal_(0.5, 0.2)
        layer.get_parameter(f"{name}_l0").data.copy_(parameter)
    x = torch.randn(4, 7, 3)
    # float32, a few steps: last digits, magnified where a variance is small
    torch.testing.assert_close(peer(x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)
    for name in "xhc":
        for moment in ("mean", "var"):
            rows = getattr(layer.get_submodule(f"stats_{name}_l0"), moment)
            rows[:] = rows[-1]
            getattr(peer, f"{moment}_{name}").copy_(rows[-1])
    layer.eval()
    peer.eval()
    torch.testing.assert_close(peer(x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)


def test_the_scripted_layer_is_itself(bench):
    layers, rows = bench("gpu_layers"), bench("gpu_rows")
    torch.manual_seed(0)
    scripted = layers.make_layer(rows.SCRIPTED, (4, 7, 3, 5, 1))
    plain = layers.ScriptedLayerNormLSTM(3, 5)
    plain.load_state_dict(scripted.state_dict())
    x = torch.randn(4, 7, 3)
    torch.testing.assert_close(scripted(x)[0], plain(x)[0])


@pytest.mark.parametrize("directions", [1, 2])
def test_every_layer_has_the_shape_of_cudnns(bench, directions, monkeypatch):
    layers, rows = bench("gpu_layers"), bench("gpu_rows")
    monkeypatch.setattr(layers.torch, "compile", as_they_are)
    monkeypatch.setattr(layers.CompiledCellBatchNormLSTM.__init__, "__defaults__", (as_they_are,))
    x = torch.randn(4, 7, 3)
    every = (rows.CUDNNS, rows.LAYERS, rows.OPTIONS, rows.PEERS)
    for what in {what for each in every for kind in each.values() for _, what in kind}:
        layer = layers.make_layer(what, (4, 7, 3, 6, directions))
        first = rows.BATCH_FIRST in what
        output = layer(x.transpose(0, 1) if first else x)[0]
        assert output.shape == (*((7, 4) if first else (4, 7)), 6 * directions), what
        output.sum().backward()
        assert all(p.grad is not None for p in layer.parameters()), what
    with pytest.raises(ValueError, match="no layer 'other'"):
        layers.make_layer("other", (4, 7, 3, 6, 1))


@pytest.mark.parametrize("what", [", autocast, batch first", ", PackedSequence", ""])
@pytest.mark.parametrize("name", ["torch.nn.LSTM (cuDNN)", "rbn.BatchNormLSTM"])
def test_what_is_timed_runs_forward_and_backward(bench, name, what, monkeypatch):
    timing = bench("gpu_timing")
    monkeypatch.setattr(timing, "DEVICE", "cpu")
    if name == "rbn.BatchNormLSTM":
        what = what.replace(", batch first", "")
    ready = timing.Ready(name + what, (4, 7, 3, 6, 1), "bf16")
    for _, function in ready.each():
        function()
    assert all(p.grad is not None for p in ready.layer.parameters())


# The plot and the command -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_picture(bench, rates, tmp_path):
    gpu, rows, plot = bench("gpu"), bench("gpu_rows"), bench("gpu_plot")
    store = rows.Rows(tmp_path / "gpu.csv")
    plot.draw(store.sorted(), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    todo = [(shape, "16 bits", rows.LAYERS["16 bits"]) for shape in ("ptb", "H=32")]
    gpu.run(todo, store, rates, FACTS, fake_measure(rows), lambda: 1)
    plot.draw(rows.Rows(tmp_path / "gpu.csv").sorted(), tmp_path / "part.png")
    plot.draw(rows.Rows(FOLDER / "results" / "gpu.csv").sorted(), tmp_path / "all.png")
    for name in ("part", "all"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--classes", "tf32,int8"], "got int8"),
        (["--parts", "all"], "got all"),
        (["--repeats", "2"], "--repeats must be at least 3"),
    ],
)
def test_wrong_options_are_named(bench, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    with pytest.raises(SystemExit):
        bench("gpu").main()
    assert words in capsys.readouterr().err
