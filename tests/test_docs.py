"""The examples and links in the README and the pages under docs work."""

import math
import os
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

# Other tests run the same lines, and tracing exporters is slow.
pytestmark = pytest.mark.no_cover

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_of(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), flags=re.S)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs all examples of a page, in order, in an empty folder; returns their names."""
    monkeypatch.chdir(tmp_path)

    def run(page):
        torch.manual_seed(0)
        names = {"__name__": "page"}
        examples = code_of(page)
        assert examples
        for example in examples:
            exec(compile(example, page, "exec"), names)
        return names

    return run


# Every other page with Python code has its own test, here or in one of these files.
ELSEWHERE = {
    "how-to/multiple-gpus.md": "distributed/population_cases.py",
    "how-to/integrations/accelerate.md": "integrations/test_pages.py",
    "how-to/integrations/averaging.md": "integrations/test_pages.py",
    "how-to/integrations/skorch.md": "integrations/test_pages.py",
    "how-to/integrations/transformers.md": "integrations/test_pages.py",
    "tutorials/lightning.md": "integrations/test_pages.py",
}


def test_every_example_is_run():
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}
    examples = {page for page in pages if code_of(page)}
    here = {page for page in examples if f'"{page}")' in Path(__file__).read_text()}
    assert here | ELSEWHERE.keys() == examples
    for page, file in ELSEWHERE.items():
        text = (ROOT / "tests" / file).read_text()
        assert page in text or f'"{Path(page).stem}"' in text


def test_get_started(run):
    names = run("index.md")
    assert names["loss"] < 0.01
    assert names["output"].shape == (30, 1, 32)


@pytest.mark.slow
def test_replacing_a_layer(run):
    names = run("tutorials/replace-lstm.md")
    assert names["found"] > 0.85
    assert isinstance(names["back"], torch.nn.LSTM)


@pytest.mark.slow
def test_sequences_of_different_length(run):
    names = run("tutorials/variable-length.md")
    assert names["accuracy"] > 0.75
    assert len(names["model"].lstm.stats_h_l0.count) > 35


@pytest.mark.slow
def test_a_character_model(run):
    names = run("tutorials/character-model.md")
    assert names["bits"] < 0.6 * math.log2(len(names["data"].symbols))
    assert len(names["written"]) == 204


def test_statistics(run):
    names = run("how-to/statistics.md")
    assert names["prediction"].shape == (1, 1)
    assert names["layer"].stats_h_l0.count.tolist() == [10] * 20  # exact, from 10 batches


@pytest.mark.slow
def test_compiling(run, monkeypatch):
    # Needs no C++ compiler, and saves its time.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    names = run("how-to/torch-compile.md")
    assert names["prediction"].shape == (1, 2)


def test_the_loaders_of_data_sets(run):
    if "RBN_DATA" not in os.environ:
        pytest.skip("RBN_DATA does not name a folder with MNIST and Penn Treebank")
    names = run("reference/data-sets.md")
    assert names["targets"].shape == (99, 64)


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
    (example,) = code_of("how-to/your-own-data.md")
    assert len([line for line in example.splitlines() if line and "import" not in line]) <= 15
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # closed when the list is built
        exec(compile(example, "your-own-data.md", "exec"), names)
    assert names["accuracy"] > 0.9
    assert (tmp_path / "runs" / "series" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # from the exporter
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_export(run):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="the page exports and runs a model")
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 8):
        pytest.skip("the page needs torch 2.8")
    names = run("how-to/export.md")  # which compares the results
    assert names["scores"].shape == (1, 35, 5)


@pytest.mark.slow
def test_the_small_sweep(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    from typer.testing import CliRunner

    from rbn.cli.app import app
    from rbn.experiments.search import sweep_file

    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/how-to/sweeps.md").read_text()
    small, one_at_a_time = re.findall(r"```yaml\n(.*?)```", text, flags=re.S)
    (tmp_path / "digits-lr.yaml").write_text(small)
    (commands,) = re.findall(r"```sh\n(.*?)```", text, flags=re.S)
    for command in commands.splitlines():
        done = CliRunner().invoke(app, command.split()[1:])
        assert done.exit_code == 0, done.output
        assert "digits-lr: 5 of 5 trials finished" in done.output
    assert (tmp_path / "digits-lr.svg").exists()
    assert (tmp_path / "runs/digits-lr/trial-0004/metrics.jsonl").exists()

    (tmp_path / "lines.yaml").write_text(one_at_a_time)
    assert sweep_file.read("lines.yaml").trials == 5
    for name, trials in re.findall(r"^\| (`.*-table5`) \| (\d+) \|", text, flags=re.M):
        for each in re.findall(r"`([^`]+)`", name):
            assert sweep_file.read(each).trials == int(trials)


def test_streaming_and_folding(run):
    names = run("how-to/streaming.md")
    assert names["difference"] < 1e-5
    assert names["size"]["served"] < names["size"]["trained"]
    x, layer = names["sequence"], names["layer"]
    wanted = layer(x)[0]
    for module in (names["same"], names["served"], names["loaded"], names["program"].module()):
        torch.testing.assert_close(module(x)[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, place = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if place and not place.startswith("rbn."):  # those are generated by mkdocstrings
            assert place in anchors(target.read_text()), link


def anchors(text):
    """The anchors of a page, as GitHub derives them from headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
