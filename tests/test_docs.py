"""The pages under docs say what is so."""

import csv
import json
import re
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_of(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), flags=re.S)


def test_your_own_data(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (300,), generator=generator)
    slopes = torch.linspace(-1, 1, 12) * (2 * labels[:, None] - 1)
    series = slopes + 0.3 * torch.randn(300, 12, generator=generator)
    lines = [
        ",".join(f"{v:.4f}" for v in row) + f",{label}"
        for row, label in zip(series.tolist(), labels.tolist(), strict=True)
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "series.csv").write_text("\n".join(lines) + "\n")
    (example,) = code_of("experiments.md")
    assert len([line for line in example.splitlines() if line and "import" not in line]) <= 15
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the file is closed when the list is made
        exec(compile(example, "experiments.md", "exec"), names)
    assert names["accuracy"] > 0.9
    assert (tmp_path / "runs" / "series" / "metrics.jsonl").exists()


def test_the_small_sweep(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    from typer.testing import CliRunner

    from rbn.cli.app import app

    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "sweeps.md").read_text()
    small, one_at_a_time = re.findall(r"```yaml\n(.*?)```", text, flags=re.S)
    (tmp_path / "digits-lr.yaml").write_text(small)
    (commands,) = re.findall(r"```sh\n(.*?)```", text, flags=re.S)
    for command in commands.splitlines():
        done = CliRunner().invoke(app, command.split()[1:])
        assert done.exit_code == 0, done.output
        assert "digits-lr: 5 of 5 trials finished" in done.output
    assert (tmp_path / "digits-lr.svg").exists()
    assert (tmp_path / "runs/digits-lr/trial-0004/metrics.jsonl").exists()

    from rbn.experiments.search import file as files

    (tmp_path / "lines.yaml").write_text(one_at_a_time)
    assert files.read("lines.yaml").trials == 5
    for name, trials in re.findall(r"^\| (`.*-table5`) \| (\d+) \|", text, flags=re.M):
        for each in re.findall(r"`([^`]+)`", name):
            assert files.read(each).trials == int(trials)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, place = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if place:
            assert place in anchors(target.read_text()), link


def anchors(text):
    """The places of a page that a link can name, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("model", ["lstm", "bn-lstm"])
@pytest.mark.parametrize(
    ("task", "tag", "factor", "digits"),
    [
        ("ptb", "", 1, 3),
        ("ptb", "short", 1, 3),
        ("text8", "", 1, 3),
        ("text8", "short", 1, 3),
        ("mnist", "", 100, 1),
        ("mnist", "rmsprop", 100, 1),
        ("mnist", "code", 100, 1),
        ("mnist", "no-momentum", 100, 1),
        ("mnist", "steady", 100, 1),
        ("pmnist", "", 100, 1),
        ("pmnist", "rmsprop", 100, 1),
        ("pmnist", "code", 100, 1),
        ("pmnist", "short", 100, 1),
    ],
)
def test_the_published_numbers_are_those_of_the_files(task, tag, factor, digits, model):
    name = f"{model}-{tag}" if tag else model
    paths = sorted((ROOT / "results" / task).glob(f"{name}-seed*.json"))
    every = [json.loads(path.read_text()) for path in paths]
    assert len(every) == (1 if task == "text8" else 3)
    found = [factor * values["test"] for values in every if values["diverged_at"] is None]
    ends = sum(found) / len(found), min(found), max(found)
    mean, least, most = (f"{x:.{digits}f}" for x in ends)
    spread = f"{least} to {most}; " if len(found) > 1 else ""
    said = re.escape(f"{mean} ({spread}{len(found)}")
    assert re.search(rf"\b{said}\b", (ROOT / "docs/experiments.md").read_text())
    if tag not in {"code", "no-momentum", "steady"}:
        assert f" {mean} " in (ROOT / "README.md").read_text()


def shipped_beyond(task, tag, model="bn-lstm"):
    from rbn.experiments import config

    values = {**config.read(config.find(f"beyond/{task}")), "model": model, "tag": tag}
    there = config.with_settings(config.from_mapping(values), ["precision=bf16-mixed"])
    return json.loads(there.to_json())


def test_the_accuracy_past_the_paper_is_that_of_the_files():
    paths = (ROOT / "results/pmnist").glob("bn-lstm-zoneout-0.3-seed*.json")
    every = [json.loads(path.read_text()) for path in paths]
    found = [100 * values["test"] for values in every]
    mean, least, most = (f"{x:.1f}" for x in (sum(found) / 3, min(found), max(found)))
    assert len(found) == 3
    assert f"| {mean} ({least} to {most}; 3) |" in (ROOT / "docs/experiments.md").read_text()
    command = "`rbn train pmnist --config beyond/pmnist --precision bf16-mixed --seeds 1,2,3`"
    assert f"| {mean} % | {command} |" in (ROOT / "README.md").read_text()
    for values in every:
        assert values["diverged_at"] is None
        assert shipped_beyond("pmnist", "zoneout-0.3") == values["config"]


@pytest.mark.parametrize("tag", ["no-momentum", "steady"])
def test_the_accuracy_of_the_lstm_with_noise_is_that_of_the_files(tag):
    paths = (ROOT / "results/mnist").glob(f"lstm-{tag}-noise-seed*.json")
    every = [json.loads(path.read_text()) for path in paths]
    assert [run["config"]["layer"] for run in every] == [{"hidden_noise": 0.1}] * 3
    found = [100 * run["test"] for run in every]
    said = f"{sum(found) / 3:.1f} % ({min(found):.1f} to {max(found):.1f})"
    assert said in (ROOT / "docs/experiments.md").read_text()


MODELS = ("lstm", "bn-lstm")


def accuracy(task, model, tag=""):
    """Of the test set, in %: the mean of three seeds."""
    name = f"{model}-{tag}" if tag else model
    paths = [ROOT / f"results/{task}/{name}-seed{seed}.json" for seed in (1, 2, 3)]
    return sum(100 * json.loads(path.read_text())["test"] for path in paths) / 3


def steps_to(share, run, figure="valid_population"):
    with (ROOT / f"results/mnist/{run}.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        return next(int(r["step"]) for r in rows if float(r[figure]) >= share)


def test_what_is_said_of_the_settings_of_the_authors_code():
    page = " ".join((ROOT / "docs/experiments.md").read_text().split())
    first, second, third = (steps_to(0.95, f"lstm-code-seed{seed}") for seed in (1, 2, 3))
    assert f"after {first:,}, {second:,} and {third:,} steps (seeds 1, 2, 3)" in page
    found = {steps_to(0.95, f"bn-lstm-code-seed{seed}") for seed in (1, 2, 3)}
    assert f"The BN-LSTM has 95 % after {min(found):,} to {max(found):,} steps" in page
    with (ROOT / "results/mnist/lstm-code-seed3.csv").open(newline="") as file:
        rows = {int(r["step"]): float(r["valid_population"]) for r in csv.DictReader(file)}
    assert f"fell from {100 * rows[57_000]:.1f} to {100 * rows[57_500]:.1f} % after 57,500" in page
    gains = [accuracy("pmnist", model, "code") - accuracy("pmnist", model) for model in MODELS]
    assert "the LSTM by {:.1f} points and the BN-LSTM by {:.1f}".format(*gains) in page
    every = [
        json.loads(path.read_text()) for path in (ROOT / "results").glob("*/*-code-seed*.json")
    ]
    assert len(every) == 12
    assert {run["diverged_at"] for run in every} == {None}
    assert sorted(run["skipped"] for run in every) == [0] * 11 + [7]


def test_the_steps_to_95_percent_are_those_of_the_files():
    lstm, bn_lstm, rate_falls, bn_rate_falls = (
        {steps_to(0.95, f"{name}-seed{seed}") for seed in (1, 2, 3)}
        for name in ("lstm", "bn-lstm", "lstm-rmsprop", "bn-lstm-rmsprop")
    )
    readme, page = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/experiments.md")
    )
    slow = f"{min(lstm):,} to {max(lstm):,}"
    fast = max(bn_lstm)
    assert (
        f"MNIST in order within {fast:,} steps (population statistics) where the LSTM takes {slow}"
        in readme
    )
    assert f"95 % on validation after {slow} steps (the paper's" in page
    assert f"the BN-LSTM after {min(bn_lstm):,} to {fast:,} (an evaluation every 500)" in page
    found = {steps_to(0.95, f"bn-lstm-seed{seed}", "valid_batch") for seed in (1, 2, 3)}
    assert f"after {min(found):,} to {max(found):,} with the statistics of the minibatch" in page
    (slow,), (fast,) = rate_falls, bn_rate_falls
    assert f"with `mnist-rmsprop` the LSTM after {slow:,}, when the rate" in page
    assert f"the BN-LSTM after {fast:,} (every 2,500; all seeds)" in page


@pytest.mark.parametrize(("model", "name"), [("lstm", "LSTM"), ("bn-lstm", "BN-LSTM")])
def test_penn_treebanks_curve_is_as_near_to_the_papers_as_said(model, name):
    pytest.importorskip("yaml")
    from rbn.experiments.paper.curves import paper_lines

    curves = []
    for seed in (1, 2, 3):
        with (ROOT / f"results/ptb/{model}-seed{seed}.csv").open(newline="") as file:
            curves.append([float(row["valid_batch"]) for row in csv.DictReader(file)])
    ours = [sum(column) / 3 for column in zip(*curves, strict=False)]  # epochs all of them have
    paper = paper_lines("fig3a")[name]
    assert [round(x / 790) for x in paper.x[: len(ours)]] == list(range(1, len(ours) + 1))
    apart = max(abs(a - b) for a, b in zip(ours, paper.y, strict=False))
    page = " ".join((ROOT / "docs/experiments.md").read_text().split())
    (said,) = re.findall(
        rf"within (0\.\d+)(?: bits of the paper's line at every epoch)? for the {name}\b", page
    )
    assert apart <= float(said) < apart + 0.003


def test_the_accuracy_of_gammas_is_that_of_the_files():
    found = []
    for gamma in ("0.1", "0.3", "0.5", "0.7", "1"):
        path = ROOT / f"results/pmnist/bn-lstm-gamma-{gamma}-seed1.json"
        found.append(100 * json.loads(path.read_text())["test"])
    page = " ".join((ROOT / "docs/experiments.md").read_text().split())
    assert "the test accuracy is {:.1f}, {:.1f}, {:.1f}, {:.1f} and {:.1f} %".format(*found) in page


def after(step, run):
    with (ROOT / f"results/pmnist/{run}.csv").open(newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if int(row["step"]) == step)
    return f"{100 * float(row['valid_population']):.1f}"


def test_the_accuracy_of_the_lstm_past_the_paper_is_that_of_the_files():
    folder = ROOT / "results/pmnist"
    every = [
        json.loads((folder / f"lstm-beyond-seed{seed}.json").read_text()) for seed in (1, 2, 3)
    ]
    last, first, second = sorted(every, key=lambda run: run["diverged_at"] or 0)
    page = " ".join((ROOT / "docs/experiments.md").read_text().split())
    assert last["diverged_at"] is None
    best = [f"{100 * run['test']:.1f}" for run in (last, second, first)]
    assert "| {} (1, two more diverged, at best {} and {}) |".format(*best) in page
    assert f"| {best[0]} % (1 of 3 seeds) |" in (ROOT / "README.md").read_text()
    for run in (first, second):
        assert f"seed {run['seed']} at step {run['diverged_at']:,}" in page
    for name, start in (("lstm-beyond", "the LSTM had"), ("bn-lstm-zoneout-0.3", "the BN-LSTM")):
        found = (after(30_000, f"{name}-seed{seed}") for seed in (1, 2, 3))
        assert f"{start} " + "{}, {} and {} %".format(*found) in page
    for run in every:
        assert run["config"] == shipped_beyond("pmnist", "beyond", "lstm")


def spoken(seconds):
    return f"{seconds / 60:.0f} min" if seconds > 100 else f"{seconds:.0f} s"


@pytest.mark.parametrize(
    ("task", "tag", "name"),
    [("ptb", "decay-0.05", "Penn Treebank"), ("text8", "beyond", "text8")],
)
def test_the_numbers_past_the_paper_are_those_of_the_files(task, tag, name):
    found = json.loads((ROOT / f"results/{task}/bn-lstm-{tag}-seed1.json").read_text())
    plain = json.loads((ROOT / f"results/{task}/lstm-beyond-seed1.json").read_text())
    epochs = found["config"]["epochs"]
    ours, other = (rf"{run['test']:.3f} \({spoken(run['seconds'])}.*\)" for run in (found, plain))
    line = rf"^\| {name} \|.*\| {ours} \| {other} \|.*, {epochs} epochs \|$"
    assert re.search(line, (ROOT / "docs/experiments.md").read_text(), flags=re.M)
    command = f"`rbn train {task} --config beyond/{task} --precision bf16-mixed`"
    row = f"| | {plain['test']:.3f} | | {found['test']:.3f} | {command} |"
    assert row in (ROOT / "README.md").read_text()
    assert shipped_beyond(task, tag) == found["config"]
    assert shipped_beyond(task, "beyond", "lstm") == plain["config"]


def percent(rate):
    return f"{100 * rate:.1f}%"


@pytest.mark.parametrize(
    ("tag", "models"),
    [("", ("lstm", "bn-lstm", "bn-everywhere", "bn-e*", "bn-e**")), ("full", ("lstm", "bn-e**"))],
)
def test_the_readers_numbers_are_those_of_the_files(tag, models):
    page, folder = (ROOT / "docs/reading.md").read_text(), ROOT / "results/cnn-built"
    for model in models:
        name = "-".join(part for part in (model.replace("*", "-star"), tag, "seed1") if part)
        found = json.loads((folder / f"{name}.json").read_text())
        with (folder / f"{name}.csv").open(newline="") as file:
            looks = list(csv.DictReader(file))
        (look,) = [look for look in looks if look["step"] == "16000"] if not tag else looks[-1:]
        rates = f"{percent(found['valid'])} | {percent(found['test'])}"
        loss = f"{float(look['train']):.2f}"
        assert f"| `{model}` | {rates} | {loss} | {found['steps']:,} |" in page


@pytest.mark.parametrize("text", ["4-sentences", "whole"])
def test_the_counts_of_questions_are_those_of_the_files(text):
    page = (ROOT / "docs/reading.md").read_text()
    path = ROOT / "results/cnn-built" / f"questions-{text}.json"
    parts = {each["part"]: each for each in json.loads(path.read_text())["parts"]}
    names = {"train": "training", "valid": "validation", "test": "test"}
    for part, found in parts.items():
        shown = " | ".join(percent(found[k]) for k in ("ceiling", "frequent", "frequent_unasked"))
        title = text.replace("-", " ")
        assert re.search(
            rf"^\| {title} \| {names[part]} \| [^|]* \| {re.escape(shown)} \|$", page, re.M
        )
        assert re.search(rf"^\| {names[part]} \(.*\| {found['questions']:,} \|$", page, re.M)
    errors = " | ".join(percent(1 - parts[k]["frequent_unasked"]) for k in ("valid", "test"))
    assert f"| the most frequent entity not in the question | {errors} | | |" in page


def test_the_times_of_two_processes_are_those_of_the_file():
    with (ROOT / "benchmarks/results/scaling.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs/scaling.md").read_text()
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
    lines = iter((ROOT / "README.md").read_text().splitlines())
    for shape in SHAPES:
        for precision in ("bf16", "fp16", "tf32"):

            def of(what, column="ratio_to_cudnn", key=(shape, precision)):
                return float(on_a_gpu[(*key, what)][column])

            cells = []
            for way in ("", ", CUDA graph"):
                cells.append(f"{of(f'cuDNN{way}', 'fwdbwd_ms'):.1f}")
                cells += [f"{of(f'rbn.{name}{way}'):.2f}" for name in ("BatchNormLSTM", "LSTM")]
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
    least, most = ({k: f"{end(v):.2f}" for k, v in every.items()} for end in (min, max))
    text = " ".join((ROOT / "README.md").read_text().split())
    called, graph = (
        [f"{least[p, way]} to {most[p, way]}" for p in ("bf16", "tf32")]
        for way in ("", ", CUDA graph")
    )
    assert f"{called[0]} of the time of cuDNN's plain `torch.nn.LSTM` in bf16 and" in text
    assert f"and {called[1]} in float32 (tf32) when called" in text
    assert f"{' and '.join(graph)} in a CUDA graph" in text
    times = [f"{1 / ratio:.1f}" for way in every for ratio in (max(every[way]), min(every[way]))]
    slow, fast, slow_graph, fast_graph = times[:4]
    assert f"bf16: {slow} (text8) to {fast} times as fast called" in text
    assert f"called, {slow_graph} to {fast_graph} times in a CUDA graph" in text


@pytest.mark.parametrize("shape", ["mnist", "mnist, tf32", "ptb", "text8", "cnn"])
def test_the_times_on_a_gpu_are_those_of_the_file(shape, on_a_gpu):
    def times(what, key):
        found = [
            float(on_a_gpu[(*key, f"{what}{way}")]["fwdbwd_ms"]) for way in (", CUDA graph", "")
        ]
        return ", ".join(f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" for ms in found)

    page = (ROOT / "docs/kernels.md").read_text()
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
    page = (ROOT / "docs/scaling.md").read_text()
    line = re.search(rf"^\| {name} \| {batch} \| (.*) \|$", page, flags=re.M)
    *times, shown, whole, half, far = map(float, line.group(1).split(" | "))
    assert times == [round(eager, 2), round(graph, 2)]
    assert shown == exchange
    for found, cost, part in ((whole, exchange, 1), (half, exchange, 0.5), (far, slow, 0.5)):
        expected = 2 * batch * (eager - graph + cost) / (part * graph)
        assert found == pytest.approx(expected, rel=0.03)
    assert {row["commit"] for row in rows} == set(re.findall(r"gpu\.csv\) \(commit (\w+)\)", page))


def test_the_times_of_other_sizes_are_those_of_the_file(on_a_gpu):
    page = (ROOT / "docs/kernels.md").read_text()
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
    page = " ".join((ROOT / "docs/kernels.md").read_text().split())
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
    text = " ".join((ROOT / "README.md").read_text().split())
    for what in ("BatchNormLSTM", "LSTM"):
        *most, last = (
            f"{float(row['ratio_to_nn_lstm']):.2f}" for row in rows if row["what"] == f"rbn.{what}"
        )
        assert len(most) == 3
        assert f"{', '.join(most)} and {last} for `{what}`" in text


def test_what_a_step_takes_beside_its_layer():
    """As `loop.csv` has it, and at most 15 %."""
    with (ROOT / "benchmarks/results/loop.csv").open() as file:
        found = {
            (row["task"], row["model"]): float(row["overhead"]) for row in csv.DictReader(file)
        }
    assert max(found.values()) <= 0.15
    page = " ".join((ROOT / "docs/experiments.md").read_text().split())
    (numbers,) = re.findall(
        r"takes ([\d.]+) % more on Penn Treebank for the BN-LSTM and ([\d.]+) % for the LSTM, "
        r"and ([\d.]+) and ([\d.]+) % on text8",
        page,
    )
    order = [(task, model) for task in ("ptb", "text8") for model in ("bn-lstm", "lstm")]
    for number, which in zip(numbers, order, strict=True):
        assert float(number) == pytest.approx(100 * found[which], abs=0.5), which


def test_how_many_runs_without_momentum_there_are():
    every = [
        json.loads(path.read_text())
        for task in ("mnist", "pmnist")
        for path in (ROOT / "results" / task).glob("*-seed*.json")
    ]
    runs = [run for run in every if run["tag"] in ("", "rmsprop")]
    assert {run["diverged_at"] for run in runs} == {None}
    assert f"so none of {len(runs)} runs did" in (ROOT / "README.md").read_text()
    page = " ".join((ROOT / "docs/experiments.md").read_text().split())
    assert f"none of {len(runs)} runs diverged" in page
