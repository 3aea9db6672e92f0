"""The demo: from training to the page, and sentences that match the numbers."""

import base64
import csv
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from rich.console import Console

from rbn.data import Splits, digits
from rbn.experiments.demo import Result, Settings, Trained, run_demo
from rbn.experiments.demo.figure import draw
from rbn.experiments.demo.page import write_page
from rbn.experiments.demo.result import Record
from rbn.experiments.demo.summary import expectation, faster, headline, on_reach, outcome
from rbn.experiments.demo.terminal import NOTE, rows
from rbn.experiments.demo.train import build, fit, reach
from rbn.training import Diverged

SMALL = Settings(epochs=2, hidden_size=8, batch_size=20, evaluate_every=2)


@pytest.fixture(scope="module")
def few() -> Splits:
    data = digits()
    return Splits(data.train.first(60), data.valid.first(30), data.test.first(30))


@pytest.fixture(scope="module")
def demo(few: Splits, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path, str]:
    """One small run: its result, folder and output."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    console = Console(width=100, record=True, file=io.StringIO())
    result = run_demo(SMALL, out, data=few, console=console)
    return result, out, console.export_text()


def course(name: str, accuracies: list[float], *, test: float, pace: float = 0.1) -> Trained:
    """A model with given validation accuracies at steps 10, 20, ..."""
    records = [
        Record(10 * (k + 1), pace * 10 * (k + 1), 1.0, accuracy, accuracy)
        for k, accuracy in enumerate(accuracies)
    ]
    return Trained(name, 1000, tuple(records), test, 0.5)


def outcome_of(
    lstm: list[float], bn_lstm: list[float], *, tests: tuple[float, float] = (0.7, 0.9)
) -> Result:
    return Result(
        Settings(),
        (1200, 297, 300),
        course("LSTM", lstm, test=tests[0]),
        course("BN-LSTM", bn_lstm, test=tests[1], pace=0.15),
        {"torch": "2.x"},
        90.0,
    )


BN_FIRST = outcome_of([0.2, 0.5, 0.81, 0.85], [0.5, 0.85, 0.91, 0.92])
LSTM_FIRST = outcome_of([0.5, 0.85, 0.91, 0.92], [0.2, 0.5, 0.81, 0.85], tests=(0.9, 0.7))


# The training ------------------------------------------------------------------------------------


def test_both_models_start_from_the_same_weights() -> None:
    plain, normalized = (build(name, Settings()).state_dict() for name in ("LSTM", "BN-LSTM"))
    shared = plain.keys() & normalized.keys()
    assert {"recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "classifier.weight"} <= shared
    for name in shared:
        assert torch.equal(plain[name], normalized[name]), name
    assert plain.keys() <= normalized.keys()


@pytest.mark.parametrize("name", ["LSTM", "BN-LSTM"])
def test_same_seed_same_numbers_bit_for_bit(name: str, few: Splits) -> None:
    def numbers(settings: Settings) -> list[tuple[float, ...]]:
        trained = fit(name, settings, few)
        seen = [(r.train_loss, r.valid_batch, r.valid_population) for r in trained.records]
        return [*seen, (trained.test_accuracy, trained.reach)]

    before = torch.get_rng_state()
    first = numbers(SMALL)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's generator does not change
    torch.rand(3)
    assert numbers(SMALL) == first
    assert numbers(replace(SMALL, seed=2)) != first


def test_divergence_names_no_files_that_are_gone(few: Splits) -> None:
    with pytest.raises(Diverged) as caught:
        fit("BN-LSTM", replace(SMALL, epochs=1, learning_rate=1e30), few)
    assert re.search(r"BN-LSTM diverged at step \d+", str(caught.value))


def test_data_can_be_moved(few: Splits) -> None:
    moved = few.to("meta")
    assert moved.valid.inputs.device == moved.test.labels.device == torch.device("meta")
    assert moved.train.inputs.shape == few.train.inputs.shape


def test_reach_compares_the_gradients_of_first_and_last_pixels(few: Splits) -> None:
    model = build("LSTM", replace(SMALL, hidden_noise=0.0))
    inputs = few.train.inputs[:, :20].clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(model(inputs), few.train.labels[:20])
    loss.backward()
    assert inputs.grad is not None
    expected = inputs.grad[:8].norm() / inputs.grad[56:].norm()
    # The same operations in the same order.
    assert reach(model, few.train, 20) == expected.item()


# The complete demo -------------------------------------------------------------------------------


def test_files(demo: tuple[Result, Path, str]) -> None:
    result, out, _ = demo
    assert {path.name for path in out.iterdir()} == {
        *("index.html", "curves.png", "curves.csv", "result.json")
    }
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    saved = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert saved["command"] == "rbn demo --epochs 2"
    assert saved["images"] == {"train": 60, "valid": 30, "test": 30}
    assert saved["environment"]["torch"] == torch.__version__
    for model in result.models:
        entry = saved["models"][model.name]
        assert entry["test_accuracy"] == model.test_accuracy
        assert entry["steps"] == 6
        assert entry["parameters"] == model.parameters
        assert entry["steps_to_valid"] == {"80%": None, "90%": None}
    with (out / "curves.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["model"], int(line["step"])) for line in lines] == [
        *((name, step) for name in ("LSTM", "BN-LSTM") for step in (2, 4, 6))
    ]
    assert [float(line["valid_population"]) for line in lines] == [
        r.valid_population for model in result.models for r in model.records
    ]


def test_terminal_shows_progress_table_and_outcome(demo: tuple[Result, Path, str]) -> None:
    result, _, shown = demo
    words = " ".join(shown.split())
    assert "6/6" in words
    assert "steps/s" in words
    assert "steps to 80%" in words
    for row in rows(result):
        for cell in row:
            assert cell in words
    assert headline(result) in words
    assert "index.html" in words
    # Right below the numbers it explains.
    assert words.index(rows(result)[1][-1]) < words.index(NOTE) < words.index(headline(result))


class Page(HTMLParser):
    """Checks that all elements are closed in order, and collects text and references."""

    VOID = frozenset({"meta", "img", "br", "hr", "link", "input"})

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        names = ("src", "href", "srcset", "data", "action", "poster", "xlink:href")
        self.references += [value or "" for name, value in attrs if name in names]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_valid_and_needs_nothing_else(demo: tuple[Result, Path, str]) -> None:
    result, out, _ = demo
    markup = (out / "index.html").read_text(encoding="utf-8")
    page = Page(markup)
    assert page.open == []
    assert markup.startswith("<!DOCTYPE html>")
    (picture,) = page.references
    assert picture.startswith("data:image/png;base64,")
    encoded = picture.partition(",")[2]
    assert base64.b64decode(encoded, validate=True) == (out / "curves.png").read_bytes()
    rest = markup.replace(encoded, "")
    assert "://" not in rest
    assert "url(" not in rest
    assert "@import" not in rest
    assert "<script" not in rest
    assert not re.search(r"\$\w", rest)  # every placeholder is replaced
    assert str(out) not in markup
    assert rest.count("<mtr>") == 3  # the three equations
    words = " ".join(page.text.split())
    for sentence in (headline(result), *outcome(result), result.settings.command):
        assert sentence in words
    assert f"torch{torch.__version__}" in page.text


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_in_a_browser(
    demo: tuple[Result, Path, str], dark: bool, check_page: Callable[..., Any]
) -> None:
    for values in check_page(demo[1] / "index.html", dark).values():
        assert len(values["images"]) == 1


def test_validation_uses_statistics_of_the_current_weights() -> None:
    """Running averages, which lag behind the weights, would be about 17 points lower here."""
    settings = Settings(epochs=1, hidden_size=40)
    (record,) = fit("BN-LSTM", settings, digits()).records
    assert record.valid_population > record.valid_batch - 0.1


def test_nothing_is_trained_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr("rbn.experiments.demo.run.fit", lambda *_: pytest.fail("it trained"))
    with pytest.raises(OSError, match=r"file: .*file"):
        run_demo(SMALL, tmp_path / "file")
    with pytest.raises(OSError, match=r"below: Not a directory"):
        run_demo(SMALL, tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


def test_nothing_is_trained_without_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in ("rich", "sklearn") else object()
    )
    message = r"rich.*scikit-learn.*'recurrent-batchnorm\[demo\]'"
    with pytest.raises(ImportError, match=message):
        run_demo(SMALL, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_picture_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"recurrent-batchnorm\[demo\]"):
        draw(BN_FIRST, tmp_path / "curves.png")


def test_threads_are_set_and_put_back(
    few: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    seen = []

    def watched(*arguments: Any) -> Trained:
        seen.append(torch.get_num_threads())
        if len(seen) == 2:
            raise KeyboardInterrupt
        return BN_FIRST.lstm

    monkeypatch.setattr("rbn.experiments.demo.run.fit", watched)
    settings = replace(SMALL, threads=before + 1)
    with pytest.raises(KeyboardInterrupt):
        run_demo(settings, tmp_path, data=few, console=Console(quiet=True))
    assert seen == [before + 1, before + 1]
    assert torch.get_num_threads() == before


# The sentences -----------------------------------------------------------------------------------


def parts(sentence: str) -> list[str]:
    """Models and numbers of a sentence, in order."""
    return re.findall(r"BN-LSTM|LSTM|\d[\d.]*\b%?", sentence)


def test_words_where_the_normalized_model_is_faster() -> None:
    assert faster(BN_FIRST) is BN_FIRST.bn_lstm
    assert "batch-normalized LSTM" in headline(BN_FIRST)
    at80, at90, cost, test = outcome(BN_FIRST)
    assert parts(at80) == ["BN-LSTM", "80%", "20", "3", "LSTM", "30", "3", "1.5"]
    assert parts(at90) == ["BN-LSTM", "90%", "30", "4", "LSTM", "40", "4", "85.0%"]
    assert "did not reach it" in at90
    assert parts(cost) == ["100", "LSTM", "150", "BN-LSTM", "1.5"]
    assert parts(test)[-2:] == ["BN-LSTM", "20.0"]
    assert "reports the same" in expectation(BN_FIRST)


def test_words_where_the_plain_model_is_faster() -> None:
    assert faster(LSTM_FIRST) is LSTM_FIRST.lstm
    assert "plain LSTM" in headline(LSTM_FIRST)
    at80, at90, _, test = outcome(LSTM_FIRST)
    assert parts(at80)[:3] == ["LSTM", "80%", "20"]
    assert "BN-LSTM after 30 steps" in at80
    assert parts(at90)[:2] == ["LSTM", "90%"]
    assert "BN-LSTM did not reach it" in at90
    assert parts(test)[-2:] == ["LSTM", "20.0"]
    assert "does not show it" in expectation(LSTM_FIRST)


def test_words_where_nobody_is_faster() -> None:
    same = outcome_of([0.5, 0.85, 0.95], [0.6, 0.87, 0.91], tests=(0.90, 0.91))
    assert faster(same) is None
    assert "neither" in headline(same)
    at80, at90, _, test = outcome(same)
    for sentence, reached, steps in ((at80, "80%", "20"), (at90, "90%", "30")):
        assert "Both" in sentence
        assert parts(sentence) == [reached, steps]
    assert "too close to tell apart" in test
    slow = outcome_of([0.5, 0.6], [0.6, 0.7])
    assert faster(slow) is None
    assert headline(slow).endswith("neither model reached 80%")
    neither, _, _ = outcome(slow)  # 90% is not mentioned
    assert "Neither" in neither
    assert parts(neither) == ["80%", "60.0%", "LSTM", "70.0%", "BN-LSTM"]


@pytest.mark.parametrize(
    ("reach_of_lstm", "said"),
    [(1.31, "131%"), (0.25, "25%"), (2.345e-5, "1/43,000"), (0.0312, "1/32"), (0.0, "nothing")],
)
def test_reach_in_words(reach_of_lstm: float, said: str) -> None:
    result = replace(BN_FIRST, lstm=replace(BN_FIRST.lstm, reach=reach_of_lstm))
    assert f" {said} of its norm" in on_reach(result)
    assert "in the LSTM, and 50% in the BN-LSTM" in on_reach(result)


@pytest.mark.parametrize("result", [BN_FIRST, LSTM_FIRST], ids=["BN first", "LSTM first"])
def test_page_follows_the_numbers(result: Result, tmp_path: Path) -> None:
    draw(result, tmp_path / "curves.png")
    write_page(result, tmp_path / "curves.png", tmp_path / "index.html")
    page = Page((tmp_path / "index.html").read_text(encoding="utf-8"))
    words = " ".join(page.text.split())
    other = LSTM_FIRST if result is BN_FIRST else BN_FIRST
    assert headline(result) in words
    assert headline(other) not in words
    assert expectation(result) in words
    assert expectation(other) not in words
    for sentence in outcome(result):
        assert sentence in words


# The options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs.* 1, got 0"),
        ({"seed": -1}, "seed.* 0, got -1"),
        ({"seed": 2**63}, f"seed.*{2**63 - 1}, got {2**63}"),
        ({"threads": 0}, "threads.* 1, got 0"),
        ({"threads": 10**12}, "threads.* 1024, got 1000000000000"),
        ({"learning_rate": 0.0}, "learning_rate.*positive, got 0.0"),
        ({"learning_rate": 1e38}, r"learning_rate.* 1e\+30, got 1e\+38"),
        ({"learning_rate": float("nan")}, "learning_rate.*positive, got nan"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**options)


def test_command_repeats_the_run() -> None:
    assert Settings().command == "rbn demo"
    settings = Settings(permuted=True, seed=7, epochs=3, threads=2, learning_rate=0.01)
    assert settings.command == (
        "rbn demo --permuted --seed 7 --epochs 3 --threads 2 --learning-rate 0.01"
    )
