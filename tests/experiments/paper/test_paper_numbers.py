"""The paper's lines and tables, published results, and what the report makes of them."""

import json
import math
from dataclasses import replace

import pytest
from made_up import publish

from rbn.experiments.paper import curves, differences, tables
from rbn.experiments.paper.figures import figure
from rbn.experiments.paper.lines import OURS, PAPER, Line, Panel, read_csv, thinned, write_csv
from rbn.experiments.paper.numbers import TABLES
from rbn.experiments.paper.plan import FIGURE_TARGETS
from rbn.experiments.paper.published import mean_line, read_results
from rbn.experiments.paper.question_baselines import QuestionBaselines, read_counts, write_counts
from rbn.experiments.paper.result_set import ResultSet
from rbn.experiments.paper.trained_runs import STATISTICS


@pytest.mark.parametrize("name", curves.FIGURES)
def test_the_papers_lines(name):
    lines = curves.paper_lines(name)
    assert lines
    for line in lines.values():
        assert line.source == PAPER
        assert 10 <= len(line.x) == len(line.y) <= 100
        assert list(line.x) == sorted(line.x)
        assert all(map(math.isfinite, line.y))


def test_the_papers_lines_are_the_papers():
    assert curves.paper_lines("fig3a")["BN-LSTM"].y[0] == pytest.approx(1.674, abs=1e-3)
    assert curves.paper_lines("fig2-pmnist")["BN-LSTM"].x[-1] == 100_000
    assert len(curves.paper_lines("fig1a")) == 10
    assert "arXiv:1603.09025" in curves.source()
    with pytest.raises(ValueError, match=r"figure.* got 'fig9'"):
        curves.paper_lines("fig9")


def test_thinned_keeps_both_ends():
    assert thinned(range(1000), 5) == [0, 250, 500, 749, 999]
    assert thinned(range(3), 5) == [0, 1, 2]


def test_lines_come_back_from_a_file(tmp_path):
    band = Line("a, b", OURS, (1.0, 2.0), (0.5, 0.25), (0.25, 0.125), (1.0, 0.5))
    plain = Line("c", PAPER, (3.0,), (1e-20,))
    write_csv([Panel("p", "x", "y", (band, plain))], tmp_path / "lines.csv")
    assert read_csv(tmp_path / "lines.csv") == {"p": [band, plain]}
    (tmp_path / "bad.csv").write_text("panel,series\np,s\n")
    with pytest.raises(ValueError, match=r"bad\.csv is not a file of lines"):
        read_csv(tmp_path / "bad.csv")


def test_tables_have_mean_spread_and_difference(results):
    result_set = ResultSet.read(results)
    lstm, bn = tables.rows(TABLES["table2"], result_set.tasks, result_set.runs)
    assert lstm.values == pytest.approx([1.39, 1.41])
    assert lstm.cells[3:6] == ("1.38", "1.400 (1.390 to 1.410)", "+0.020")
    assert bn.cells[3:6] == ("1.32", "1.325 (1.320 to 1.330)", "+0.005")
    assert replace(lstm, results=(*lstm.results, *lstm.results)).ours == "1.400 ± 0.012"
    assert bn.command == "rbn train ptb --model bn-lstm --seeds 1,2"
    assert bn.settings == "ptb-short"
    assert (lstm.runs, bn.runs) == ("2", "2")
    first, second = lstm.results
    stopped = replace(first, values=first.values | {"diverged_at": 700})
    one = replace(lstm, results=(stopped, second))
    assert (one.ours, one.runs) == ("1.410", "1 (1 more diverged: 1.390)")
    assert (one.summary, lstm.summary) == ("1.410 (1 of 2 runs)", lstm.ours)
    none = replace(lstm, results=(stopped,))
    assert (none.ours, none.runs) == ("1.390", "1 (diverged)")
    assert lstm.time == "60 s (CPU)"
    seven, eight = (replace(first, values=first.values | {"together": n}) for n in (7, 8))
    assert replace(lstm, results=(eight, eight)).time == "60 s (CPU, 8 at once)"
    assert replace(lstm, results=(eight, seven)).time == "60 s (CPU, 7 to 8 at once)"
    near = replace(second, values=second.values | {"test": 1.3799})
    assert replace(lstm, results=(near,)).difference == "+0.000"  # not -0.000
    absent = tables.rows(TABLES["table3"], result_set.tasks, result_set.runs)
    assert [row.cells[4] for row in absent] == ["not trained yet"] * 2


def test_a_figure_says_which_runs_diverged(tmp_path):
    publish(tmp_path, task="pmnist", test=0.9, values=(0.5, 0.8, 0.9))
    assert "diverged" not in figure("fig2", ResultSet.read(tmp_path)).caption
    publish(tmp_path, task="pmnist", seed=2, test=0.8, values=(0.6, 0.8), diverged_at=250)
    found = figure("fig2", ResultSet.read(tmp_path))
    named = "LSTM on permuted MNIST, seed 2, after 250 steps"
    assert named in found.caption
    (ours,) = (line for line in found.panels[1].lines if line.source == OURS)
    assert (ours.x, ours.y) == ((100.0, 200.0, 300.0), (0.5, 0.8, 0.9))
    publish(tmp_path, task="pmnist", test=0.9, values=(0.5, 0.8, 0.9), diverged_at=350)
    found = figure("fig2", ResultSet.read(tmp_path))  # shown, because there are no others
    (ours,) = (line for line in found.panels[1].lines if line.source == OURS)
    assert ours.x == (100.0, 200.0)


def test_accuracies_and_error_rates(tmp_path):
    publish(tmp_path, task="pmnist", model="bn-lstm", test=0.951)
    publish(tmp_path, task="cnn-built", model="bn-e**", test=0.38, sentences=None, tag="full")
    publish(tmp_path, task="cnn-built", model="bn-e**", test=0.45, sentences=4, tag="")
    result_set = ResultSet.read(tmp_path)
    assert tables.rows(TABLES["table1"], result_set.tasks, result_set.runs)[3].ours == "95.1"
    errors = tables.rows(TABLES["table4"], result_set.tasks, result_set.runs)
    assert [row.ours for row in errors if row.results] == ["38.0", "38.0"]
    small = tables.rows(TABLES["fig4a"], result_set.tasks, result_set.runs)
    assert [row.ours for row in small if row.results] == ["45.0"]
    # Built questions appear under their task's name and are not compared with the paper's.
    assert small[-1].cells[0] == "cnn-built, four sentences, valid"
    assert (small[-1].cells[3], small[-1].difference) == ("43.9", "other data")
    assert small[0].cells[0] == "CNN, four sentences, valid"


def test_settings_of_several_kinds_have_rows_of_their_own(results):
    publish(results, model="bn-lstm", tag="", test=1.32)
    result_set = ResultSet.read(results)
    rows = tables.rows(TABLES["table2"], result_set.tasks, result_set.runs)
    assert [row.settings for row in rows] == ["ptb-short", "ptb", "ptb-short"]
    assert (
        "Settings: ptb-short. Seeds 1, 2." in figure("fig3a", result_set).caption
    )  # both models have them
    publish(results, model="lstm", tag="", test=1.38)
    found = figure("fig3a", ResultSet.read(results))
    assert "Settings: ptb. Seed 1." in found.caption  # closer to the paper's
    (line,) = [li for li in found.panels[0].lines if li.name == "BN-LSTM" and li.source == OURS]
    assert not line.low


def test_models_without_common_settings_are_shown_with_their_own(tmp_path):
    publish(tmp_path, model="lstm", tag="other")
    publish(tmp_path, model="bn-lstm", tag="short")
    publish(tmp_path, model="bn-lstm", tag="")
    task, results = ResultSet.read(tmp_path).tasks["ptb"], read_results(tmp_path)
    shown = task.comparable(results, ("lstm", "bn-lstm", "rnn"))
    settings = {model: [r.settings for r in found] for model, found in shown.items()}
    assert settings == {"lstm": ["ptb-other"], "bn-lstm": ["ptb"], "rnn": []}


def test_what_was_measured_on_a_model_is_shown_beside_newer_results(results):
    rows = "length,statistics,bits\n100,population,1.5\n200,population,1.45\n"
    (results / "ptb/lengths-bn-lstm-short-seed1.csv").write_text(rows)
    titles = ",".join(f"{title} 0" for title in STATISTICS)
    (results / "ptb/statistics-bn-lstm-short-seed2.csv").write_text(f"step,{titles}\n1,0,0,1,1\n")
    publish(results, model="bn-lstm", tag="", test=1.32)  # closer to the paper, but not measured
    lengths, statistics = (figure(name, ResultSet.read(results)) for name in ("fig3b", "fig5"))
    assert "Settings: ptb-short. Seed 1." in lengths.caption
    (missing,) = lengths.missing
    assert missing.startswith("LSTM, ")
    assert "Penn Treebank" in missing
    (line,) = (line for line in lengths.panels[0].lines if line.source == OURS)
    assert (line.x, line.y) == ((100, 200), (1.5, 1.45))
    assert "Settings: ptb-short. Seed 2." in statistics.caption
    assert [panel.title for panel in statistics.panels] == list(STATISTICS)
    assert not statistics.missing


def test_curves_are_means_with_a_range(results):
    publish(results, model="lstm", seed=2, values=(2.1, 1.7, 1.4, 1.3))
    found = figure("fig3a", ResultSet.read(results))
    (line,) = [li for li in found.panels[0].lines if li.name == "LSTM" and li.source == OURS]
    assert line.x == (100, 200, 300)
    assert line.y == pytest.approx((2.0, 1.6, 1.4))
    assert line.low == pytest.approx((1.9, 1.5, 1.4))
    assert line.high == pytest.approx((2.1, 1.7, 1.4))
    names = [li.name for li in found.panels[0].lines if li.source == OURS]
    assert names == ["LSTM", "BN-LSTM", "BN-LSTM, population statistics"]
    assert not found.missing


@pytest.mark.parametrize("name", FIGURE_TARGETS)
def test_what_is_missing_is_named(name, tmp_path):
    found = figure(name, ResultSet.read(tmp_path))
    assert found.missing
    assert not found.has_ours


def test_the_sweep(results):
    found = figure("fig6", ResultSet.read(results))
    valid = found.panels[3]
    (line,) = [li for li in valid.lines if li.source == OURS]
    assert line.series == "gamma=0.30"
    assert line.y[0] == pytest.approx(1.9 * math.log(2))
    assert "gamma 0.1 on Penn Treebank" in found.missing
    assert "gamma 0.3 on Penn Treebank" not in found.missing
    assert "Seed 1." in found.caption
    publish(results, model="bn-lstm", tag="gamma-0.3", seed=2)
    assert "Seeds 1, 2." in figure("fig6", ResultSet.read(results)).caption


def test_the_sweep_on_images(tmp_path):
    """Shows the loss if it was recorded; older curves without it can be read, and are named."""
    runs = {"task": "pmnist", "model": "bn-lstm", "test": 0.9, "values": (0.5, 0.8, 0.9)}
    publish(tmp_path, tag="gamma-0.1", nats=(1.5, 0.7, 0.3), **runs)
    publish(tmp_path, tag="gamma-0.3", **runs)
    result_set = ResultSet.read(tmp_path)
    train, valid = figure("fig6", result_set).panels[:2]
    assert [li.series for li in train.lines if li.source == OURS] == ["gamma=0.10", "gamma=0.30"]
    assert train.note == ""
    (line,) = [li for li in valid.lines if li.source == OURS]
    assert (line.series, line.y) == ("gamma=0.10", (1.5, 0.7, 0.3))
    assert valid.title == "permuted MNIST, validation"
    assert len([li for li in valid.lines if li.source == PAPER]) == 5
    assert valid.note == "no loss recorded for gamma 0.3"


def test_a_curve_without_one_of_its_columns_is_refused(tmp_path):
    table = publish(tmp_path).with_suffix(".csv")
    table.write_text(table.read_text().replace("valid_batch", "else"))
    with pytest.raises(ValueError, match=r"learning curve.*valid_batch"):
        read_results(tmp_path)


def test_errors_of_readers(tmp_path):
    publish(tmp_path, task="cnn", model="lstm", sentences=4, tag="", values=(0.8, 0.6))
    found = figure("fig4a", ResultSet.read(tmp_path))
    losses, errors = found.panels
    (line,) = losses.lines
    assert line.y == pytest.approx((2.0, 1.0))
    (line,) = [li for li in errors.lines if li.source == OURS]
    assert line.y == pytest.approx((0.8, 0.6))
    assert errors.log_x
    assert min(x for li in errors.lines for x in li.x) > 0
    assert "BN-e** on CNN, four sentences" in found.missing
    assert "made from articles" not in found.caption


def test_errors_on_other_questions_than_the_papers(tmp_path):
    publish(tmp_path, task="cnn-built", model="lstm", sentences=4, tag="")
    found = figure("fig4a", ResultSet.read(tmp_path))
    assert "cnn-built, four sentences" in found.title
    assert "cnn-built" in found.caption


def test_readers_at_their_best_rates_come_first(tmp_path):
    for model, tag, value in (
        *(("lstm", "best-rate", 0.4), ("bn-e**", "best-rate", 0.3), ("bi-lstm", "best-rate", 0.35)),
        ("lstm", "rate-8e-4", 0.7),
    ):
        same = {"task": "dailymail-built", "sentences": 4, "values": (0.9, value)}
        publish(tmp_path, model=model, tag=tag, valid=value, **same)
    for model in ("lstm", "bn-e**"):
        publish(tmp_path, task="cnn-built", model=model, sentences=4, tag="", values=(0.9, 0.8))
    result_set = ResultSet.read(tmp_path)
    found = figure("fig4a", result_set)
    assert found.title == "The Attentive Reader, dailymail-built, four sentences"
    ours = {(line.series, line.y[-1]) for line in found.panels[1].lines if line.source == OURS}
    assert ours >= {("LSTM", 0.4), ("BN-e**", 0.3), ("BiLSTM", 0.35)}
    assert len({series for series, _ in ours}) == 3
    rows = tables.rows(TABLES["fig4a"], result_set.tasks, result_set.runs)
    trained = [(row.cells[1], row.settings) for row in rows if row.results]
    assert trained == [
        *(("LSTM", "dailymail-built-best-rate"), ("LSTM", "cnn-built")),
        *(("BN-e**", "dailymail-built-best-rate"), ("BN-e**", "cnn-built")),
    ]


def test_counts_come_back_from_a_file(tmp_path):
    counts = [
        QuestionBaselines("cnn-built", 4, "valid", 1200, 0.85, 0.2, 0.347),
        QuestionBaselines("cnn-built", None, "test", 7, 1.0, 0.25, 0.5),
    ]
    write_counts(counts, "rbn data questions cnn-built", tmp_path / "cnn-built" / "questions.json")
    assert read_counts(tmp_path) == (counts, ["rbn data questions cnn-built"])
    assert counts[0].cells[1:4] == ("4 sentences", "valid", "1,200")
    assert counts[0].cells[4:] == ("15.0", "80.0", "65.3")
    assert counts[1].cells[1] == "whole documents"
    (tmp_path / "cnn-built" / "questions-2.json").write_text('{"parts": [{}], "command": ""}')
    with pytest.raises(ValueError, match=r"questions-2\.json"):
        read_counts(tmp_path)


def test_differences_are_read_from_the_settings(results):
    found = differences.sentences(read_results(results))
    assert found == []
    path = publish(results, seed=3)
    path.write_text(path.read_text().replace('"clip": 1.0', '"clip": 5.0'))
    (sentence,) = differences.sentences(read_results(results))
    assert "ptb-short (LSTM, seed 3): clip is 5.0" in sentence
    assert "1.0" in sentence
    path.write_text(path.read_text().replace('"clip": 5.0', '"clip": 1.0'))
    path.write_text(path.read_text().replace('"lr": 0.002', '"lr": 0.001'))
    (sentence,) = differences.sentences(read_results(results))
    assert "ptb-short (LSTM, seed 3): optimizer.lr is 0.001" in sentence
    assert "0.002" in sentence


def test_a_momentum_that_is_not_named_is_none_at_all(tmp_path):
    """`mnist` sets it to 0, `mnist-code` omits it."""
    path = publish(tmp_path, task="mnist", model="lstm", tag="code")
    path.write_text(path.read_text().replace(', "momentum": 0}', "}"))
    assert "momentum" not in read_results(tmp_path)[0].config["optimizer"]
    assert "optimizer.momentum" not in " ".join(differences.sentences(read_results(tmp_path)))


def test_differences_name_the_models_that_have_them(tmp_path):
    """Not named if several models have it in common."""
    for model in ("lstm", "bn-lstm"):
        for seed in (1, 2):
            path = publish(tmp_path, task="ptb", tag="clipped", model=model, seed=seed)
            path.write_text(path.read_text().replace('"clip": 1.0', '"clip": 5.0'))
    assert differences.sentences(read_results(tmp_path)) == [
        "ptb-clipped: clip is 5.0 instead of 1.0."
    ]
    for path in sorted((tmp_path / "ptb").glob("lstm-*.json")):
        path.write_text(path.read_text().replace('"clip": 5.0', '"clip": 1.0'))
    assert differences.sentences(read_results(tmp_path)) == [
        "ptb-clipped (BN-LSTM): clip is 5.0 instead of 1.0."
    ]


def test_runs_that_start_from_other_gammas_are_named_together(tmp_path):
    for gamma in (0.1, 0.5):
        path = publish(tmp_path, task="ptb", model="bn-lstm", tag=f"gamma-{gamma}")
        found = path.read_text().replace('"clip": 1.0', '"clip": 5.0')
        path.write_text(found.replace('"gamma": 0.1', f'"gamma": {gamma}'))
    assert differences.sentences(read_results(tmp_path)) == [
        "ptb-gamma-* (BN-LSTM): clip is 5.0 instead of 1.0."
    ]


def test_questions_that_were_made_are_held_against_the_papers_settings(tmp_path):
    publish(tmp_path, task="cnn-built", model="lstm", tag="")
    found = differences.sentences(read_results(tmp_path))
    shown = "epochs is 13 instead of 135", "layer.output is entities instead of vocabulary"
    for each in shown:
        assert any(each in sentence for sentence in found), found


def test_results_that_are_none(tmp_path):
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "lstm-seed1.json").write_text("{}")
    with pytest.raises(ValueError, match=r"lstm-seed1\.json is not the result of a run"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("config", None, "its config is None"),
        ("config", {"data": None}, "its config.data is None"),
        ("command", None, "its command is None"),
        ("test", None, "its test is None"),
        ("test", math.nan, "its test is not finite"),
        ("test", "abc", "its test is 'abc'"),
        ("test", True, "its test is True"),
        ("seconds", None, "its seconds is None"),
        ("seed", "x", "its seed is 'x'"),
        ("diverged_at", "x", "its diverged_at is 'x'"),
        ("together", "x", "its together is 'x'"),
        ("model", "zzz", "its model is 'zzz', not one of lstm"),
    ],
)
def test_results_with_a_wrong_value(name, value, said, tmp_path):
    path = publish(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=rf"seed1\.json .*{said}"):
        read_results(tmp_path)


def test_lines_of_different_points_have_no_mean():
    lines = [Line("a", OURS, (1.0,), (1.0,)), Line("a", OURS, (2.0,), (1.0,))]
    with pytest.raises(ValueError, match="lines of a have different x"):
        mean_line(lines)
