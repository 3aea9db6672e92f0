"""Examples and links of README and the pages under docs work."""

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


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # the exporter's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_export_to_onnx(tmp_path, monkeypatch):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason="the page exports and runs a model")
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 8):
        pytest.skip("the page needs torch 2.8")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for example in code_of("onnx.md"):  # the last line compares
        exec(compile(example, "onnx.md", "exec"), names)
    assert names["scores"].shape == (1, 35, 5)


@pytest.mark.slow
def test_the_small_sweep(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    from typer.testing import CliRunner

    from rbn.cli.app import app
    from rbn.experiments.search import sweep_file

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

    (tmp_path / "lines.yaml").write_text(one_at_a_time)
    assert sweep_file.read("lines.yaml").trials == 5
    for name, trials in re.findall(r"^\| (`.*-table5`) \| (\d+) \|", text, flags=re.M):
        for each in re.findall(r"`([^`]+)`", name):
            assert sweep_file.read(each).trials == int(trials)


def test_streaming_and_folding():
    torch.manual_seed(0)
    names = {}
    for example in code_of("streaming.md"):
        exec(compile(example, "streaming.md", "exec"), names)
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
        if place:
            assert place in anchors(target.read_text()), link


def anchors(text):
    """The places of a page that a link can name, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
