"""The numbers on trained models in README and docs match the files in results."""

import csv
import json
import re
from pathlib import Path

import pytest
from marked_numbers import numbers_at, text_at

ROOT = Path(__file__).parents[1]
EXPERIMENTS = "docs/lab-notes/experiments.md"


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
    assert re.search(rf"\b{said}\b", (ROOT / "docs/lab-notes/experiments.md").read_text())
    if tag not in {"code", "no-momentum", "steady"}:
        assert f" {mean} " in (ROOT / "docs/results/index.md").read_text()
    if not tag:
        assert f" {mean} " in (ROOT / "README.md").read_text()


def shipped_beyond(task, tag, model="bn-lstm"):
    from rbn.experiments import config

    values = {**config.read_yaml(config.find(f"beyond/{task}")), "model": model, "tag": tag}
    there = config.with_settings(config.from_mapping(values), ["precision=bf16-mixed"])
    return json.loads(there.to_json())


def test_the_accuracy_past_the_paper_is_that_of_the_files():
    paths = (ROOT / "results/pmnist").glob("bn-lstm-zoneout-0.3-seed*.json")
    every = [json.loads(path.read_text()) for path in paths]
    found = [100 * values["test"] for values in every]
    mean, least, most = (f"{x:.1f}" for x in (sum(found) / 3, min(found), max(found)))
    assert len(found) == 3
    page = (ROOT / "docs/lab-notes/experiments.md").read_text()
    assert f"| {mean} ({least} to {most}; 3) |" in page
    results = (ROOT / "docs/results/index.md").read_text()
    row = rf"^\| with momentum and zoneout \|.*\| {mean} % \|$"
    assert re.search(row, results, flags=re.M)
    command = "rbn train pmnist --config beyond/pmnist --precision bf16-mixed --seeds 1,2,3"
    assert f"\n{command}\n" in results
    for values in every:
        assert values["diverged_at"] is None
        assert shipped_beyond("pmnist", "zoneout-0.3") == values["config"]


@pytest.mark.parametrize("tag", ["no-momentum", "steady"])
def test_the_accuracy_of_the_lstm_with_noise_is_that_of_the_files(tag):
    paths = (ROOT / "results/mnist").glob(f"lstm-{tag}-noise-seed*.json")
    every = [json.loads(path.read_text()) for path in paths]
    assert [run["config"]["layer"] for run in every] == [{"hidden_noise": 0.1}] * 3
    found = [100 * run["test"] for run in every]
    page = (ROOT / "docs/lab-notes/experiments.md").read_text()
    name = "mnist-steady" if tag == "steady" else tag
    noisy = f"{sum(found) / 3:.1f} % ({min(found):.1f} to {max(found):.1f})"
    assert f"| `{name}` | {accuracy('mnist', 'lstm', tag):.1f} % | {noisy} |" in page


MODELS = ("lstm", "bn-lstm")


def accuracy(task, model, tag=""):
    """Test results in %: the mean of three seeds."""
    name = f"{model}-{tag}" if tag else model
    paths = [ROOT / f"results/{task}/{name}-seed{seed}.json" for seed in (1, 2, 3)]
    return sum(100 * json.loads(path.read_text())["test"] for path in paths) / 3


def steps_to(share, run, figure="valid_population"):
    with (ROOT / f"results/mnist/{run}.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        return next(int(r["step"]) for r in rows if float(r[figure]) >= share)


def test_what_is_said_of_the_settings_of_the_authors_code():
    page = " ".join((ROOT / "docs/lab-notes/experiments.md").read_text().split())
    lstm = ", ".join(f"{steps_to(0.95, f'lstm-code-seed{seed}'):,}" for seed in (1, 2, 3))
    found = {steps_to(0.95, f"bn-lstm-code-seed{seed}") for seed in (1, 2, 3)}
    assert f"| `mnist-code` | 500 | {lstm} | {min(found):,} to {max(found):,} | |" in page
    with (ROOT / "results/mnist/lstm-code-seed3.csv").open(newline="") as file:
        rows = {int(r["step"]): float(r["valid_population"]) for r in csv.DictReader(file)}
    fall = [f"{100 * rows[step]:.1f}" for step in (57_000, 57_500)]
    assert numbers_at(EXPERIMENTS, "code-fall", 2) == fall
    for model in MODELS:
        gain = accuracy("pmnist", model, "code") - accuracy("pmnist", model)
        assert numbers_at(EXPERIMENTS, f"code-gain-{model}") == [f"{gain:.1f}"]
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
    page = " ".join((ROOT / "docs/lab-notes/experiments.md").read_text().split())
    slow = f"{min(lstm):,} to {max(lstm):,}"
    fast = max(bn_lstm)
    index = "docs/results/index.md"
    assert numbers_at(index, "steps-bn-lstm") == [f"{fast:,}"]
    assert numbers_at(index, "steps-lstm", 2) == [f"{min(lstm):,}", f"{max(lstm):,}"]
    found = {steps_to(0.95, f"bn-lstm-seed{seed}", "valid_batch") for seed in (1, 2, 3)}
    minibatch = f"{min(found):,} to {max(found):,}"
    assert f"| `mnist` | 500 | {slow} | {min(bn_lstm):,} to {fast:,} | {minibatch} |" in page
    (slow,), (fast,) = rate_falls, bn_rate_falls
    line = rf"\| `mnist-rmsprop` \| 2,500 \| {slow:,}[^|]* \| {fast:,} \| \|"
    assert re.search(line, page)


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
    (said,) = numbers_at(EXPERIMENTS, f"ptb-apart-{model}")
    assert apart <= float(said) < apart + 0.003


def test_the_accuracy_of_gammas_is_that_of_the_files():
    found = []
    for gamma in ("0.1", "0.3", "0.5", "0.7", "1"):
        path = ROOT / f"results/pmnist/bn-lstm-gamma-{gamma}-seed1.json"
        found.append(100 * json.loads(path.read_text())["test"])
    page = (ROOT / "docs/lab-notes/experiments.md").read_text()
    shown = [f"{value:.1f}" for value in found]
    assert row_of(page, "decay 0.5, no momentum, 20,000 steps") == shown


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
    page = " ".join((ROOT / "docs/lab-notes/experiments.md").read_text().split())
    assert last["diverged_at"] is None
    best = [f"{100 * run['test']:.1f}" for run in (last, second, first)]
    assert "| {} (1, two more diverged, at best {} and {}) |".format(*best) in page
    assert f"| {best[0]} % (1 of 3 seeds) |" in (ROOT / "docs/results/index.md").read_text()
    for run in (first, second):
        step = f"{run['diverged_at']:,}"
        assert numbers_at(EXPERIMENTS, f"diverged-seed-{run['seed']}") == [step]
    for name in ("lstm-beyond", "bn-lstm-zoneout-0.3"):
        found = [after(30_000, f"{name}-seed{seed}") for seed in (1, 2, 3)]
        assert numbers_at(EXPERIMENTS, name, 3) == found
    for run in every:
        assert run["config"] == shipped_beyond("pmnist", "beyond", "lstm")


def test_the_accuracy_of_long_runs_with_more_zoneout_is_that_of_the_files():
    from rbn.experiments import config

    settings = ["tag=beyond-long", "epochs=160", "decay_from=0.5", "layer.zoneout=[0.5,0.05]"]
    page = (ROOT / "docs/lab-notes/experiments.md").read_text()
    means = []
    for name, seeds, extra, row in (
        ("bn-lstm-zoneout-0.3", (1, 2, 3), None, "BN-LSTM, zoneout 0.3, 50,000 steps"),
        ("bn-lstm-beyond-long", (1, 2, 3), [], "BN-LSTM, zoneout 0.5, 80,000 steps"),
        ("lstm-beyond-long", (1,), ["model=lstm", "optimizer.lr=3e-4"], "LSTM, zoneout 0.5"),
    ):
        paths = [ROOT / f"results/pmnist/{name}-seed{seed}.json" for seed in seeds]
        runs = [json.loads(path.read_text()) for path in paths]
        valid, test = (", ".join(f"{100 * run[k]:.1f}" for run in runs) for k in ("valid", "test"))
        means.append(sum(100 * run["test"] for run in runs) / len(runs))
        assert re.search(rf"^\| {row}.* \| {valid} \| {test} \|", page, flags=re.M)
        if extra is not None:
            values = {**config.read_yaml(config.find("beyond/pmnist")), "model": "bn-lstm"}
            every = [*settings, *extra, "precision=bf16-mixed"]
            there = config.with_settings(config.from_mapping(values), every)
            assert [run["config"] for run in runs] == [json.loads(there.to_json())] * len(seeds)
    assert (
        f"| {means[2]:.1f} % (one seed) | | {means[1]:.1f} % |"
        in (ROOT / "docs/results/index.md").read_text()
    )


def format_duration(seconds):
    return f"{seconds / 60:.0f} min" if seconds > 100 else f"{seconds:.0f} s"


@pytest.mark.parametrize(
    ("task", "tag", "name"),
    [("ptb", "decay-0.05", "Penn Treebank"), ("text8", "beyond", "text8")],
)
def test_the_numbers_past_the_paper_are_those_of_the_files(task, tag, name):
    found = json.loads((ROOT / f"results/{task}/bn-lstm-{tag}-seed1.json").read_text())
    plain = json.loads((ROOT / f"results/{task}/lstm-beyond-seed1.json").read_text())
    epochs = found["config"]["epochs"]
    ours, other = (
        rf"{run['test']:.3f} \({format_duration(run['seconds'])}.*\)" for run in (found, plain)
    )
    line = rf"^\| {name} \|.*\| {ours} \| {other} \|.*, {epochs} epochs \|$"
    assert re.search(line, (ROOT / "docs/lab-notes/experiments.md").read_text(), flags=re.M)
    results = (ROOT / "docs/results/index.md").read_text()
    row = rf"^\| with zoneout .*\| \| {plain['test']:.3f} \| \| {found['test']:.3f} \|$"
    assert re.search(row, results, flags=re.M)
    assert f"\nrbn train {task} --config beyond/{task} --precision bf16-mixed\n" in results
    assert shipped_beyond(task, tag) == found["config"]
    assert shipped_beyond(task, "beyond", "lstm") == plain["config"]


def percent(rate):
    return f"{100 * rate:.1f}%"


@pytest.mark.parametrize(
    ("tag", "models"),
    [("", ("lstm", "bn-lstm", "bn-everywhere", "bn-e*", "bn-e**")), ("full", ("lstm", "bn-e**"))],
)
def test_the_readers_numbers_are_those_of_the_files(tag, models):
    page, folder = (ROOT / "docs/lab-notes/reading.md").read_text(), ROOT / "results/cnn-built"
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
    page = (ROOT / "docs/lab-notes/reading.md").read_text()
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


@pytest.mark.parametrize(
    "model", ["lstm", "bi-lstm", "bn-lstm", "bn-everywhere", "bn-e*", "bn-e**"]
)
def test_the_readers_in_short_runs_are_those_of_the_files(model):
    page = (ROOT / "docs/lab-notes/reading.md").read_text()
    folder = ROOT / "results/dailymail-built"
    name, figures = model.replace("*", "-star"), ("valid", "test", "test_cnn")
    grid = {
        rate: json.loads((folder / f"{name}-rate-{rate}-seed1.json").read_text())
        for rate in ("8e-5", "2.5e-4", "8e-4", "2.5e-3")
    }
    cells = [" / ".join(f"{100 * run[k]:.1f}" for k in figures) for run in grid.values()]
    assert f"| `{model}` | {' | '.join(cells)} |" in page
    assert {run["diverged_at"] for run in grid.values()} == {None}
    assert {run["steps"] for run in grid.values()} == {6_888}


@pytest.mark.parametrize(
    "model", ["lstm", "bi-lstm", "bn-lstm", "bn-everywhere", "bn-e*", "bn-e**"]
)
def test_the_readers_at_all_rates_are_those_of_the_file(model):
    page = (ROOT / "docs/lab-notes/reading.md").read_text().replace("**4", "4").replace("**3", "3")
    with (ROOT / "benchmarks/results/comparison.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["task"] == "dailymail-built"]
    own = {(r["rate"], r["seed"]): r for r in rows if r["model"] == model}
    assert {(r["state"], r["steps"]) for r in own.values()} == {("finished", "20664")}

    def shown(figure, rate):
        found = [100 * float(r[figure]) for (of, _), r in own.items() if of == rate]
        spread = f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else ""
        return f"{sum(found) / len(found):.1f}{spread}"

    plain = page.replace("**", "")
    name, direction = f"`{model}`".replace("**", ""), "two" if model[:2] == "bi" else "one"
    direction = "two" if model == "bn-e**" else direction
    cells = [direction, *(shown("test", rate) for rate in ("8e-4", "2.5e-3", "8e-3"))]
    assert f"| {name} | {' | '.join(cells)} |" in plain
    best = [r for r in rows if (r["model"], r["phase"]) == (model, "best")]
    (rate,) = {r["rate"] for r in best}
    steps = ", ".join(f"{int(r['target_step']):,}" for r in best)
    cells = [rate, *(shown(figure, rate) for figure in ("valid", "test", "test_cnn")), steps]
    assert f"| {name} | {' | '.join(cells)} |" in plain
    if model in ("lstm", "bn-lstm", "bn-e*", "bi-lstm", "bn-e**"):
        readme = (ROOT / "README.md").read_text()
        assert shown("test", rate).partition(" ")[0] in readme


def test_the_counts_of_held_out_questions_are_those_of_the_files():
    page = (ROOT / "docs/lab-notes/reading.md").read_text()
    path = ROOT / "results/dailymail-built/questions-4-sentences.json"
    names = {"train": "training", "valid": "validation"}
    for found in json.loads(path.read_text())["parts"]:
        shown = " | ".join(percent(found[k]) for k in ("ceiling", "frequent", "frequent_unasked"))
        part = names.get(found["part"], found["part"])
        assert f"| {part} | {found['questions']:,} | {shown} |" in page


def test_how_many_runs_without_momentum_there_are():
    every = [
        json.loads(path.read_text())
        for task in ("mnist", "pmnist")
        for path in (ROOT / "results" / task).glob("*-seed*.json")
    ]
    runs = [run for run in every if run["tag"] in ("", "rmsprop")]
    assert {run["diverged_at"] for run in runs} == {None}
    for page in ("docs/reference/index.md", EXPERIMENTS):
        assert numbers_at(page, "paper-runs") == [str(len(runs))]


def row_of(page, first):
    """The cells after the first one of a table row."""
    (line,) = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", page, flags=re.M)
    return [cell.strip() for cell in line.split("|")]


@pytest.mark.parametrize(
    ("task", "first", "factor", "digits"),
    [("pmnist", "test accuracy, %", 100, 1), ("ptb", "test, bits per character", 1, 3)],
)
def test_what_initial_gammas_lead_to(task, first, factor, digits):
    page = (ROOT / "docs/explanation/gamma.md").read_text()
    found = []
    for gamma in ("0.1", "0.3", "0.5", "0.7", "1"):
        path = ROOT / f"results/{task}/bn-lstm-gamma-{gamma}-seed1.json"
        found.append(f"{factor * json.loads(path.read_text())['test']:.{digits}f}")
    assert row_of(page, first) == found


def line_of_figure(name, panel, series):
    with (ROOT / f"docs/report/{name}.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "ours"]
    return {
        float(r["x"]): float(r["y"])
        for r in rows
        if (r["panel"] == panel or panel is None) and r["series"] == series
    }


def test_the_gradients_on_the_page_about_gamma():
    page = (ROOT / "docs/explanation/gamma.md").read_text()
    derivatives = line_of_figure("fig1b", None, "mean derivative")
    shown = [f"{derivatives[deviation]:.2f}" for deviation in (0, 0.5, 1)]
    assert row_of(page, "mean derivative") == shown
    for gamma in (0.1, 0.5, 0.7):
        norms = line_of_figure("fig1a", "identity, terms together", f"gamma={gamma:.2f}")
        last, first = row_of(page, str(gamma))
        assert float(last) == float(f"{norms[783]:.0e}")
        assert float(first) == float(f"{norms[0]:.0e}")


def test_what_averaged_statistics_cost():
    page = (ROOT / "docs/explanation/per-step-statistics.md").read_text()
    with (ROOT / "benchmarks/results/claims.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    for task, start, first, factor, digits in (
        ("mnist", "noise", "MNIST in order, 20,000 steps, accuracy in %", 100, 1),
        ("ptb", "none", "Penn Treebank, 12 epochs, bits per character", 1, 3),
    ):
        own = sorted(
            (run for run in runs if (run["task"], run["start"]) == (task, start)),
            key=lambda run: run["seed"],
        )
        wanted = [
            ", ".join(f"{factor * float(run[name]):.{digits}f}" for run in own)
            for name in ("test", "test_averaged")
        ]
        assert row_of(page, first)[:2] == wanted


def test_longer_windows_on_the_page_about_steps():
    page = "docs/explanation/per-step-statistics.md"
    bits = line_of_figure("fig3b", "Penn Treebank", "BN-LSTM population statistics")
    for length in (100, 1000):
        assert numbers_at(page, f"windows-{length}") == [f"{bits[length]:.3f}"]
    with (ROOT / "docs/report/fig5.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for panel, step in (("recurrent mean", 10), ("cell mean", 10), ("cell mean", 50)):
        lines = {}
        for row in rows:
            if row["panel"] == panel:
                lines.setdefault(row["series"], []).append(float(row["y"]))
        ends = [sum(line[-20:]) / 20 for line in lines.values()]
        away = sum(abs(line[step] - end) for line, end in zip(lines.values(), ends, strict=True))
        share = 100 * away / sum(map(abs, ends))
        (said,) = map(int, numbers_at(page, f"{panel.replace(' ', '-')}-{step}"))
        assert share < said <= share + 1 if panel == "recurrent mean" else round(share) == said


def test_other_gammas_and_constant_steps():
    found = json.loads((ROOT / "results/findings/small-gamma.json").read_text())
    assert [row[4] for row in found["rows"]] == ["0"] * 3
    for gamma, accuracy, *_ in found["rows"]:
        assert numbers_at("docs/explanation/gamma.md", f"gamma-{gamma}") == [accuracy]
    found = json.loads((ROOT / "results/findings/no-noise.json").read_text())
    (without,) = [row for row in found["rows"] if row[0] == "0"]
    assert without[1] == "nan"
    assert without[3] == "0"
    assert text_at("docs/explanation/constant-steps.md", "no-noise").startswith("NaN")
