"""``rbn report``: the page, the Markdown, and the page in a browser."""

import base64
import json
import re
from pathlib import Path

import pytest
from made_up import fill, publish
from typer.testing import CliRunner

from rbn.cli.app import app
from rbn.experiments.paper.comparison import (
    commands,
    compare,
    exceptions,
    rate_table,
    read_comparison,
)
from rbn.experiments.paper.document import (
    Fold,
    Grid,
    Heading,
    Items,
    Paragraph,
    html_page,
    markdown_page,
)
from rbn.experiments.paper.draw import draw
from rbn.experiments.paper.figures import figure
from rbn.experiments.paper.finding import Finding
from rbn.experiments.paper.lines import OURS, Line, Panel, read_csv, write_csv
from rbn.experiments.paper.plan import Job
from rbn.experiments.paper.question_baselines import QuestionBaselines, write_counts
from rbn.experiments.paper.result_set import ResultSet

ROOT = Path(__file__).parents[3]


def write(results, out, comparison=None):
    command = ["report", "--results", str(results), "--out", str(out)]
    command += ["--comparison", str(comparison)] if comparison else []
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = fill(tmp_path_factory.mktemp("report") / "results")
    publish(folder, task="mnist", model="bn-lstm", test=0.985, values=(0.5, 0.9))
    columns, rows = ("a", "b"), (("1", "x < y"),)
    Finding("small-gamma", "S.", "D.", columns, rows, "O.", "c", 1.0, "v").write(folder)
    return folder


@pytest.fixture
def no_pixels(monkeypatch):
    """Draw figures as SVG only, with empty PNG files: each takes as long as the other."""
    picture = pytest.importorskip("matplotlib.figure").Figure
    save = picture.savefig

    def save_svg(self, file, **options):
        if options.get("format") == "svg":
            save(self, file, **options)
        else:
            Path(file).touch()

    monkeypatch.setattr(picture, "savefig", save_svg)


@pytest.fixture(scope="module")
def report(results):
    out = results.with_name("report")
    write(results, out)
    return out


@pytest.mark.slow
def test_what_is_written(report):
    page, text = (report / "index.html").read_text(), (report / "report.md").read_text()
    for found in (page, text):
        assert "1.325 (1.320 to 1.330)" in found
        assert "+0.005" in found
        assert "98.5" in found
        assert "rbn train ptb --model bn-lstm --seeds 1,2" in found
        assert "LSTM on MNIST in order" in found  # not there yet
    assert "x &lt; y" in page
    assert len(re.findall(r"<img ", page)) == len(re.findall(r"!\[", text)) == 3
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert text.index("(fig2.svg)") < text.index("\n## ")
    pictures = re.findall(r"base64,([^\"]+)", page)
    assert all(base64.b64decode(p).startswith(b"<?xml") for p in pictures)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (report / link).exists()
    for name in ("fig2", "fig3a", "fig6"):
        lines = read_csv(report / f"{name}.csv")
        assert {line.source for panel in lines.values() for line in panel} == {"paper", "ours"}
        assert (report / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_same_numbers_give_the_same_files(results, report, tmp_path):
    for path in draw(figure("fig3a", ResultSet.read(results)), tmp_path):
        assert path.read_bytes() == (report / path.name).read_bytes(), path.name


COMPARISON = """task,phase,model,rate,seed,state,steps,of_steps,valid,target,target_step,test,seconds,gpu,torch,commit
ptb,grid,lstm,1e-3,1,finished,790,790,1.51,1.5,never,1.41,10,G,2,abc
ptb,grid,lstm,2e-3,1,finished,790,790,1.5,1.5,790,1.4,10,G,2,abc
ptb,grid,bn-lstm,1e-3,1,finished,790,790,1.4,1.5,90,1.3,15,G,2,abc
ptb,grid,bn-lstm,2e-3,1,finished,790,790,1.3,1.5,90,1.2,15,G,2,abc
ptb,grid,ln-lstm,1e-3,1,diverged,90,790,,1.5,never,,1,G,2,abc
ptb,best,lstm,2e-3,1,finished,790,790,1.5,1.5,790,1.4,10,G,2,abc
ptb,best,lstm,2e-3,2,finished,790,790,1.6,1.5,never,1.5,20,G,2,abc
ptb,best,bn-lstm,1e-3,1,finished,790,790,1.4,1.5,90,1.3,15,G,2,abc
ptb,best,bn-lstm,1e-3,2,finished,790,790,1.3,1.5,90,1.27,15,G,2,abc
ptb,other,bn-lstm,2e-3,2,diverged,500,790,1.3,1.5,90,,15,G,2,abc
ptb,other,lstm,4e-3,2,diverged,500,790,1.3,1.5,90,,15,G,2,abc
pmnist,grid,bn-lstm,1e-3,1,finished,500,500,0.9,0.9,500,0.91,15,G,2,abc
"""  # noqa: E501


def test_the_fair_comparison(results, tmp_path):
    path = tmp_path / "comparison.csv"
    path.write_text(COMPARISON)
    rows = read_comparison(path)
    (found,) = compare(rows)  # no model was trained at its best rate on pmnist
    assert "790" in found.title
    assert found.rows == (
        ("LSTM", "1.400, 1.500", "2e-3", "790 / never", "1.0"),
        ("BN-LSTM", "1.300, 1.270", "1e-3", "90", "1.5"),
        ("LN-LSTM", "diverges at every rate", "", "", ""),
    )
    assert found.verdict.index("BN-LSTM 1.285") < found.verdict.index("LSTM 1.450")
    assert rate_table(rows, "ptb") == (
        ["model", "1e-3", "2e-3"],
        [
            ["LSTM", "1.410", "1.400"],
            ["BN-LSTM", "1.300", "1.200"],
            ["LN-LSTM", "diverged at step 90", ""],
        ],
    )
    lucky, not_best, highest = exceptions(rows)
    assert "LSTM: 2e-3" in lucky  # 1.5 and 1.6: worse than 1.51 at the other rate
    assert "(1.550)" in lucky
    assert "1e-3 (1.510)" in lucky
    assert "BN-LSTM: 2e-3" in not_best
    assert "seed 2 diverged at step 500" in not_best
    assert "LSTM (2e-3; at 4e-3 1 of 1 seeds diverge)" in highest
    assert "BN-LSTM" not in highest
    assert len(commands(rows)) == 4
    (results / "only").mkdir()
    publish(results / "only", model="bn-lstm", tag="short")
    write(results / "only", tmp_path / "report", path)
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| BN-LSTM | 1.300, 1.270 | 1e-3 | 90 | 1.5 |" in text
    places = ["1.300, 1.270", "<details", not_best, "## The paper and ours"]
    assert sorted(places, key=text.index) == places


def test_runs_without_a_test_result_are_named(tmp_path):
    path = tmp_path / "comparison.csv"
    path.write_text(
        COMPARISON.splitlines()[0]
        + """
text8,best,lstm,1e-3,1,finished,790,790,1.5,1.6,90,1.7,10,G,2,abc
text8,best,lstm,1e-3,2,stopped,790,790,1.52,1.6,100,,30,G,2,abc
text8,best,lstm,1e-3,3,diverged,300,790,1.9,1.6,never,,5,G,2,abc
text8,best,bn-lstm,1e-3,1,stopped,200,790,1.9,1.6,never,,5,G,2,abc
"""
    )
    (found,) = compare(read_comparison(path))
    lstm, bn, ln = found.rows
    cells = "1.700, not tested (validation 1.520), diverged at step 300"
    assert lstm == ("LSTM", cells, "1e-3", "90 / 100 / never", "1.0")
    assert bn == ("BN-LSTM", "stopped at step 200", "1e-3", "never", "")
    assert ln == ("LN-LSTM", "not run", "", "", "")
    assert "LSTM 1.700 (1 of 3 seeds)" in found.verdict
    assert "1.60" in found.title


def test_readers_in_the_fair_comparison(tmp_path):
    path = tmp_path / "comparison.csv"
    path.write_text(
        COMPARISON.splitlines()[0]
        + """
dailymail-built,grid,lstm,1e-3,1,finished,400,400,0.41,0.45,200,0.4,10,G,2,abc
dailymail-built,grid,lstm,2e-3,1,finished,400,400,0.4,0.45,200,0.4,10,G,2,abc
dailymail-built,grid,bn-e**,2e-3,1,finished,400,400,0.3,0.45,never,0.3,25,G,2,abc
dailymail-built,best,lstm,1e-3,1,finished,400,400,0.41,0.45,200,0.4,10,G,2,abc
dailymail-built,best,lstm,1e-3,2,finished,400,400,0.45,0.45,200,0.5,90,G,2,abc
dailymail-built,best,bn-e**,2e-3,1,finished,400,400,0.3,0.45,never,0.3,25,G,2,abc
dailymail-built,other,lstm,2e-3,2,finished,400,400,0.6,0.45,never,0.6,10,G,2,abc
dailymail-built,other,bn-e**,4e-3,1,finished,400,400,0.35,0.45,never,0.3,10,G,2,abc
"""
    )
    rows = read_comparison(path)
    (found,) = compare(rows)
    trained = [row for row in found.rows if row[1] != "not run"]
    assert trained == [
        (
            "LSTM",
            "40.0, 50.0",
            "1e-3",
            "200",
            "1.0",
        ),  # time: the runs of the grid, which shared the GPU
        ("BN-e**", "30.0", "2e-3", "never", "2.5"),
    ]
    (lucky,) = exceptions(rows)  # a higher rate of BN-e** is worse: 2e-3 is no edge
    assert "LSTM: 2e-3" in lucky
    assert "(50.0 against 43.0)" in lucky
    (*_, command) = commands(rows)
    assert "--best" in command
    assert "dailymail-built --models 'lstm,bn-e**' --rates 1e-3,2e-3" in commands(rows)[0]


def test_a_file_that_is_no_comparison(tmp_path):
    path = tmp_path / "comparison.csv"
    path.write_text("task,model\nptb,lstm\n")
    with pytest.raises(ValueError, match=r"comparison\.csv .*phase"):
        read_comparison(path)
    publish(tmp_path / "results")
    command = ["report", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*command, "--comparison", str(tmp_path / "none.csv")])
    assert done.exit_code == 2
    assert "none.csv" in "".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_nothing_published(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    out = tmp_path / "report"
    publish(folder, task="digits")
    for each in (folder, folder / "digits"):
        done = CliRunner().invoke(app, ["report", "--results", str(each), "--out", str(out)])
        assert done.exit_code == 2
        assert "rbn: no results " in " ".join(done.output.split())
    assert not out.exists()
    write_csv(
        [Panel("p", "x", "y", (Line("a", OURS, (1.0,), (1.0,)),))], folder / "figures/fig1b.csv"
    )
    write(folder, out)
    text = (out / "report.md").read_text()
    assert "No run of the paper's tasks has been published yet." in text
    done = CliRunner().invoke(app, ["report", "--results", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "the folder of results" in done.output
    assert "name another with --results" in " ".join(done.output.split())


def test_a_figure_without_any_line_is_drawn(tmp_path):
    paths = draw(figure("fig5", ResultSet.read(tmp_path)), tmp_path / "out")
    assert all(path.exists() for path in paths)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pixels")
def test_readers_that_err_more_often_than_counting(tmp_path):
    folder = tmp_path / "results"
    publish(folder, task="cnn-built", model="lstm", test=0.8, sentences=4, tag="")
    publish(folder, task="cnn-built", model="bn-e**", test=0.6, sentences=4, tag="")
    best = {"task": "dailymail-built", "sentences": 4, "tag": "best-rate"}
    publish(folder, model="lstm", test=0.412, **best)
    publish(folder, model="bn-e**", test=0.389, **best)
    counts = [QuestionBaselines("cnn-built", 4, "valid", 1200, 0.85, 0.2, 0.347)]
    write_counts(counts, "rbn data questions", folder / "cnn-built" / "questions.json")
    write(folder, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    named = "LSTM on cnn-built, four sentences, valid (80.0 against 65.3; 300 steps, paper "
    assert f"Readers with a higher error rate than the better baseline: {named}" in text
    main, _, folded = text.partition("### Attentive Reader")[2].partition("<details")
    assert "38.9" in main
    assert "80.0" not in main  # at the paper's rates
    assert "80.0" in folded


@pytest.mark.slow
@pytest.mark.usefixtures("no_pixels")
def test_models_are_compared_with_settings_that_did_not_diverge(tmp_path):
    folder = tmp_path / "results"

    def run(task, model, tag="", **more):
        job = Job(task, model, f"{task}-{tag}" if tag else task)
        config = json.loads(job.config().to_json())
        return publish(folder, task=task, model=model, tag=tag, config=config, **more)

    for model in ("lstm", "bn-lstm"):
        run("mnist", model, "rmsprop", test=0.98)
    run("mnist", "bn-lstm", test=0.99)
    run("mnist", "lstm", test=0.9, diverged_at=250)
    other = run("pmnist", "lstm", test=0.8, diverged_at=250)
    write(folder, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    compared = [line for line in text.splitlines() if line.startswith("- ") and "(paper" in line]
    (first,) = (line for line in compared if line.startswith("- MNIST in order"))
    assert "LSTM 98.0 (paper 98.9), BN-LSTM 98.0 (paper 99.0)" in first
    assert "mnist-rmsprop" in first
    assert "beats the LSTM on 0 of 1 tasks, in the paper on 1." in text  # 98.0 and 98.0
    (second,) = (line for line in compared if line.startswith("- Permuted MNIST"))
    assert "LSTM 80.0 (before diverging) (paper 90.2)" in second
    assert "    rbn reproduce table1  # mnist-rmsprop\n" in text
    assert "    rbn reproduce table1 --recipe paper  # mnist, pmnist\n" in text
    # Runs with other settings than the recipe's are not reproduced by its command.
    other.write_text(other.read_text().replace('"epochs": 200', '"epochs": 20'))
    write(folder, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "    rbn reproduce table1 --recipe paper  # mnist\n" in text


def test_readers_of_different_questions_are_not_drawn_together(tmp_path):
    publish(tmp_path, task="cnn", model="lstm", test=0.5, sentences=None, tag="full")
    publish(tmp_path, task="cnn-built", model="bn-e**", test=0.4, sentences=None, tag="full")
    found = figure("fig4b", ResultSet.read(tmp_path))
    assert found.title == "The Attentive Reader, CNN, whole documents"
    assert "Settings: cnn-full. Seed 1." in found.caption
    assert "build-cloze" not in found.caption
    assert found.missing == ("BN-e** on CNN, whole documents",)


def test_a_commit_is_named_by_its_first_digits(tmp_path):
    publish(tmp_path / "results", commit="0123456789abcdef0123456789abcdef01234567")
    publish(tmp_path / "results", seed=2, commit="0123456789-dirty")
    write(tmp_path / "results", tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| 0123456 |" in text
    assert "| 0123456-dirty |" in text


def test_stars_and_bars_in_markdown():
    blocks = [Paragraph("BN-e**"), Items(["a*b"]), Grid("c", ["x"], [["a|b"]])]
    text = markdown_page("t", blocks)
    assert "BN-e\\*\\*" in text
    assert "- a\\*b" in text
    assert "| a\\|b |" in text


def test_a_table_with_titles_is_several_tables_in_markdown():
    head = "| x | y |\n|---|---|\n"
    for first, row in (([], ""), ([("1", "2")], head + "| 1 | 2 |\n\n")):
        text = Grid("c", ["x", "y"], [*first, ("a*",), ("3", "4"), ("b",), ("5", "6")]).markdown()
        assert text == f"**c**\n\n{row}a\\*\n\n{head}| 3 | 4 |\n\nb\n\n{head}| 5 | 6 |"


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.usefixtures("no_pixels")
def test_the_committed_report_is_of_the_committed_results(tmp_path):
    results, committed = ROOT / "results", ROOT / "docs" / "report"
    if not committed.exists():
        pytest.skip("the source distribution comes without docs")
    write(results, tmp_path, ROOT / "benchmarks" / "results" / "comparison.csv")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in committed.iterdir()}
    assert (tmp_path / "report.md").read_text() == (committed / "report.md").read_text()
    for path in tmp_path.glob("*.csv"):
        assert path.read_text() == (committed / path.name).read_text(), path.name


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("which", ["made up", "committed"])
def test_in_a_browser(which, dark, report, check_page):
    folder = report if which == "made up" else ROOT / "docs" / "report"
    if not folder.exists():
        pytest.skip("the source distribution comes without docs")
    measured = check_page(folder / "index.html", dark)
    pictures = (folder / "index.html").read_text().count("<img ")
    for values in measured.values():
        assert len(values["images"]) == pictures > 0
        assert len(values["anchors"]) > 3


def test_markdown_has_no_html_of_a_results_file():
    cruel = "<script>alert(1)</script>\n# a [link](javascript:x)\x1b[2J\x9b1m"
    blocks = [Heading(cruel), Paragraph(cruel), Items([cruel]), Grid(cruel, [cruel], [[cruel]])]
    text = markdown_page("title", [*blocks, Items([cruel], code=True)])
    *lines, code = text.splitlines()
    assert "<script" not in Fold(cruel, [Paragraph(cruel)]).markdown()
    assert code.startswith("    <script>")  # shown unchanged
    for line in lines:
        assert "<" not in line
        assert "[" not in line.replace("\\[", "")
    for page in (text, html_page("title", blocks)):
        assert "<script" not in page.replace(code, "")
        assert not {"\x1b", "\x9b"} & set(page)
    assert sum(line.startswith("#") for line in lines) == 2
