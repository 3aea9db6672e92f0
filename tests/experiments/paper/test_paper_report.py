"""``rbn report``: the page and the text, and what a browser makes of the page."""

import base64
import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from made_up import fill, publish
from typer.testing import CliRunner

from rbn.cli.app import app
from rbn.experiments.paper.document import Grid, Heading, Items, Paragraph, markdown_page
from rbn.experiments.paper.draw import draw
from rbn.experiments.paper.figures import Shelf, figure
from rbn.experiments.paper.finding import Finding
from rbn.experiments.paper.lines import OURS, Line, Panel, read_csv, write_csv
from rbn.experiments.paper.plan import Job
from rbn.experiments.paper.question_baselines import QuestionBaselines, write_counts

ROOT = Path(__file__).parents[3]
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HEADLESS = (BROWSER, "--headless", "--no-sandbox", "--disable-gpu")
CHECK = """<!DOCTYPE html><body><iframe style="border:0;width:390px;height:900px"></iframe>
<pre></pre>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument;
  const images = [...page.images].map(i => [i.complete, i.naturalWidth, i.clientWidth]);
  const wide = page.documentElement.scrollWidth;
  const captions = [...page.querySelectorAll("caption")].map(c => c.getBoundingClientRect().right);
  document.querySelector("pre").textContent = JSON.stringify({images, wide, captions});
};
frame.src = "index.html";
</script></body>"""


def write(results, out):
    done = CliRunner().invoke(app, ["report", "--results", str(results), "--out", str(out)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = fill(tmp_path_factory.mktemp("report") / "results")
    publish(folder, task="mnist", model="bn-lstm", test=0.985, values=(0.5, 0.9))
    columns, rows = ("a", "b"), (("1", "x < y"),)
    Finding("small-gamma", "S.", "D.", columns, rows, "O.", "c", 1.0, "v").write(folder)
    return folder


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
    assert not re.search(r'(?:src|href)="(?!data:)', page)
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
    for path in draw(figure("fig3a", Shelf.of(results)), tmp_path):
        assert path.read_bytes() == (report / path.name).read_bytes(), path.name


def test_nothing_published(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    out = tmp_path / "report"
    publish(folder, task="digits")
    for each in (folder, folder / "digits"):
        done = CliRunner().invoke(app, ["report", "--results", str(each), "--out", str(out)])
        assert done.exit_code == 2
        assert "there is nothing of the paper in" in " ".join(done.output.split())
    assert not out.exists()
    write_csv(
        [Panel("p", "x", "y", (Line("a", OURS, (1.0,), (1.0,)),))], folder / "figures/fig1b.csv"
    )
    write(folder, out)
    text = (out / "report.md").read_text()
    assert "No run of the paper's tasks has been published yet." in text
    done = CliRunner().invoke(app, ["report", "--results", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "there is no folder" in done.output


def test_a_figure_without_any_line_is_drawn(tmp_path):
    paths = draw(figure("fig5", Shelf.of(tmp_path)), tmp_path / "out")
    assert all(path.exists() for path in paths)


@pytest.mark.slow
def test_readers_that_err_more_often_than_counting(tmp_path):
    folder = tmp_path / "results"
    publish(folder, task="cnn-built", model="lstm", test=0.8, sentences=4, tag="")
    publish(folder, task="cnn-built", model="bn-e**", test=0.6, sentences=4, tag="")
    counts = [QuestionBaselines("cnn-built", 4, "valid", 1200, 0.85, 0.2, 0.347)]
    write_counts(counts, "rbn data questions", folder / "cnn-built" / "questions.json")
    write(folder, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    named = "LSTM on cnn-built, four sentences, valid (80.0 against 65.3; 300 steps, the paper's "
    assert f"Readers that err more often than the better of both: {named}" in text


@pytest.mark.slow
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
    assert "- MNIST in order (mnist-rmsprop), accuracy, %: LSTM 98.0, BN-LSTM 98.0 (the" in text
    assert "- permuted MNIST (pmnist), accuracy, %: LSTM 80.0 (before diverging) (the" in text
    assert "    rbn reproduce table1  # mnist-rmsprop\n" in text
    assert "    rbn reproduce table1 --recipe paper  # mnist, pmnist\n" in text
    # What was not made with the recipe's settings is not made again by its command.
    other.write_text(other.read_text().replace('"epochs": 200', '"epochs": 20'))
    write(folder, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "    rbn reproduce table1 --recipe paper  # mnist\n" in text


def test_readers_of_different_questions_are_not_drawn_together(tmp_path):
    publish(tmp_path, task="cnn", model="lstm", test=0.5, sentences=None, tag="full")
    publish(tmp_path, task="cnn-built", model="bn-e**", test=0.4, sentences=None, tag="full")
    found = figure("fig4b", Shelf.of(tmp_path))
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


@pytest.mark.slow
def test_the_committed_report_is_of_the_committed_results(tmp_path):
    results, committed = ROOT / "results", ROOT / "docs" / "report"
    if not committed.exists():
        pytest.skip("the source distribution comes without docs")
    write(results, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in committed.iterdir()}
    assert (tmp_path / "report.md").read_text() == (committed / "report.md").read_text()
    for path in tmp_path.glob("*.csv"):
        assert path.read_text() == (committed / path.name).read_text(), path.name


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """The options to start Chromium with, where there is one that starts."""
    if BROWSER is None:
        pytest.skip("no Chromium to open the page with")
    profile = tmp_path_factory.mktemp("first")
    command = [*HEADLESS, f"--user-data-dir={profile}", "--dump-dom", "data:text/html,<p>here</p>"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{BROWSER} does not come to an end with a page of one word")
    if "<p>here</p>" not in done.stdout:
        pytest.skip(f"{BROWSER} does not start here: {done.stderr[-300:]}")
    return HEADLESS


@pytest.mark.slow
@pytest.mark.parametrize("which", ["made up", "committed"])
def test_in_a_browser(which, report, browser, tmp_path):
    """On a phone's width: every picture is there, nothing sticks out, no word on the console."""
    folder = report if which == "made up" else ROOT / "docs" / "report"
    if not folder.exists():
        pytest.skip("the source distribution comes without docs")
    shown = tmp_path / "shown"
    shown.mkdir()
    shutil.copy(folder / "index.html", shown)
    (shown / "check.html").write_text(CHECK)
    handler = functools.partial(Quiet, directory=str(shown))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run(
            [
                *browser,
                *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"),
                *("--virtual-time-budget=8000", "--dump-dom"),
                f"http://127.0.0.1:{server.server_port}/check.html",
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        server.shutdown()
    (found,) = re.findall(r"<pre>(\{.*\})</pre>", done.stdout)
    values = json.loads(found)
    assert values["wide"] <= 390
    assert 0 < max(values["captions"]) <= 390  # read without scrolling the table
    pictures = (folder / "index.html").read_text().count("<img ")
    assert len(values["images"]) == pictures > 0
    for complete, natural, wide in values["images"]:
        assert complete
        assert natural > 100
        assert wide > 300  # beyond 390 it scrolls by itself
    assert "CONSOLE" not in done.stderr


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()


def test_markdown_has_no_html_of_a_results_file():
    cruel = "<script>alert(1)</script>\n# a [link](javascript:x)"
    blocks = [Heading(cruel), Paragraph(cruel), Items([cruel]), Grid(cruel, [cruel], [[cruel]])]
    text = markdown_page("title", [*blocks, Items([cruel], code=True)])
    *lines, code = text.splitlines()
    assert code.startswith("    <script>")  # shown as it is
    for line in lines:
        assert "<" not in line.replace("\\<", "")
        assert "[" not in line.replace("\\[", "")
    assert sum(line.startswith("#") for line in lines) == 2
