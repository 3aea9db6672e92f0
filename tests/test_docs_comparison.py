"""The tables on the comparison page and on the page about running averages match the data."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
from marked_numbers import numbers_at

ROOT = Path(__file__).parents[1]


def rows_of(name, **wanted):
    with (ROOT / "benchmarks" / "results" / name).open(newline="") as file:
        return [r for r in csv.DictReader(file) if all(r[k] == v for k, v in wanted.items())]


TASKS = ["ptb", "text8", "pmnist", "mnist"]


def shown(task, row, field="test"):
    value = float(row[field])
    return f"{value:.3f}" if task in ("ptb", "text8") else f"{100 * value:.1f}"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", ["lstm", "bn-lstm", "ln-lstm"])
def test_the_grid_is_that_of_the_file(task, model):
    page = (ROOT / "docs/results/comparison.md").read_text()
    every = rows_of("comparison.csv", task=task, phase="grid")
    if not any(row["model"] == model for row in every):
        pytest.skip("not run")
    cells = []
    for rate in sorted({row["rate"] for row in every}, key=float):
        (row,) = [row for row in every if (row["model"], row["rate"]) == (model, rate)]
        finished = row["state"] == "finished"
        cells.append(
            shown(task, row) if finished else f"{row['state']} at step {int(row['steps']):,}"
        )
    assert f"| {model} | {' | '.join(cells)} |" in page


NAMES = {"lstm": "LSTM", "bn-lstm": "BN-LSTM", "ln-lstm": "LayerNormLSTM"}


def result_of(task, row):
    if row["state"] == "finished":
        return shown(task, row)
    assert (row["state"], row["steps"]) == ("stopped", row["of_steps"])
    return f"not tested ({shown(task, row, 'valid')})"


def reached(runs):
    """The steps to the target, as on the page: one number, a range, or one per seed."""
    steps = [row["target_step"] for row in runs]
    if "never" in steps:
        return ", ".join(step if step == "never" else f"{int(step):,}" for step in steps)
    first, last = min(map(int, steps)), max(map(int, steps))
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", NAMES)
def test_the_best_rates_are_those_of_the_file(task, model):
    runs = rows_of("comparison.csv", task=task, phase="best", model=model)
    if not runs:
        pytest.skip("not run")
    (rate,) = {row["rate"] for row in runs}
    assert [row["seed"] for row in runs] == ["1", "2", "3"]
    values = ", ".join(result_of(task, row) for row in runs)
    page = (ROOT / "docs/results/comparison.md").read_text().replace("*", "")
    assert f"| {NAMES[model]} | {rate} | {values} | {reached(runs)} |" in page


def fresh(task):
    return rows_of("fresh_statistics.csv", task=task, rows="1024")


@pytest.mark.parametrize("task", ["digits", "pdigits", "pydoc", "pmnist", "ptb"])
def test_refreshed_statistics_are_close_to_exact_ones(task):
    """The page's claims hold in the committed measurement: 2 points, 0.01 bits."""
    found = fresh(task)
    assert len(found) >= 4
    assert all(abs(float(row["gap"])) <= (2 if row["unit"] == "%" else 0.01) for row in found)


def test_the_table_of_digits_is_that_of_the_file():
    page = (ROOT / "docs/explanation/running-averages.md").read_text()
    for column, name in (
        ("running", "running averages"),
        ("refreshed", "re-estimated, the default"),
        ("exact", "exact (whole training set)"),
    ):
        rows = [row for row in fresh("digits") if row["seed"] == "1"]
        cells = " | ".join(f"{float(row[column]):.0f}" for row in rows)
        assert f"| {name} | {cells} |" in page


def above_exact(estimate, encoder):
    """The least and the largest mean of the bits above exact statistics, as printed."""
    cases = {}
    for row in rows_of("decoder-statistics.csv"):
        if row["encoder"] in encoder:
            above = float(row[estimate]) - float(row["exact"])
            cases.setdefault((row["encoder"], row["batch"], row["rate"]), []).append(above)
    assert {len(values) for values in cases.values()} == {18}
    means = [sum(values) / len(values) for values in cases.values()]
    return [f"{min(means):.2f}", f"{max(means):.2f}"]


def test_numbers_of_decoders_are_those_of_the_file():
    why, how = "docs/explanation/running-averages.md", "docs/how-to/statistics.md"
    assert numbers_at(why, "decoders-lstm", 2) == above_exact("default", ["nn.LSTM"])
    assert numbers_at(why, "decoders-bn", 2) == above_exact("default", ["BatchNormLSTM"])
    every = above_exact("default", ["nn.LSTM", "BatchNormLSTM"])
    assert numbers_at(how, "decoders-default", 2) == every
    rows = rows_of("decoder-statistics.csv")
    largest = max(abs(float(row["current_256"]) - float(row["exact"])) for row in rows)
    for page in (why, how):
        assert numbers_at(page, "decoders-current") == [f"{largest:.2f}"]


def test_the_default_of_decoders_is_on_average_better_than_a_fixed_number_of_sequences():
    rows = rows_of("decoder-statistics.csv")
    totals = {k: sum(float(row[k]) for row in rows) for k in ("default", "kept_64", "kept_256")}
    assert totals["default"] == min(totals.values())


def steps_to_the_goal(task, model):
    """The least and the largest number of steps to the goal at the best rate, by seed."""
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.insert(0, str(ROOT / "benchmarks"))
    rates = {}
    for row in rows_of("state-tracking.csv", task=task, model=model):
        rates.setdefault(row["rate"], []).append(row)
    best = rates[importlib.import_module("doc_tables").best_tracking_rate(rates)]
    assert [row["seed"] for row in best] == ["1", "2", "3"]
    steps = [int(row["goal_step"]) for row in best]
    return [str(min(steps)), str(max(steps))]


@pytest.mark.parametrize(
    ("marker", "task", "model"),
    [
        ("tracking-bn", "one layer", "BatchNormLSTM"),
        ("tracking-lstm", "one layer", "nn.LSTM"),
        ("tracking-ln", "one layer", "LayerNormLSTM"),
        ("tracking-bn-128", "one layer, batches of 128", "BatchNormLSTM"),
        ("tracking-bn-in-loss", "one layer, 32 of 128 in the loss", "BatchNormLSTM"),
        ("tracking-lstm-128", "one layer, batches of 128", "nn.LSTM"),
        ("tracking-bn-two", "two bidirectional layers", "BatchNormLSTM"),
        ("tracking-lstm-two", "two bidirectional layers", "nn.LSTM"),
    ],
)
def test_steps_of_state_tracking_are_those_of_the_file(marker, task, model):
    found = numbers_at("docs/results/comparison.md", marker, 2)
    assert found == steps_to_the_goal(task, model)


def test_no_run_of_state_tracking_diverged():
    rows = rows_of("state-tracking.csv")
    assert len(rows) == 4 * 3 * 11
    assert {row["diverged_at"] for row in rows} == {""}
