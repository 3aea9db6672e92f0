"""The examples on the pages about other libraries run."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    page.stem: page
    for page in (DOCS / "tutorials/lightning.md", *(DOCS / "how-to/integrations").glob("*.md"))
}
NEEDS = {
    "accelerate": ["accelerate"],
    "averaging": ["lightning"],
    "lightning": ["lightning"],
    "skorch": ["skorch"],
    "transformers": ["transformers", "accelerate"],
}


def test_every_page_has_its_place():
    assert PAGES.keys() == NEEDS.keys()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs all examples of a page, in order, in an empty folder; returns their names."""

    def run(page):
        for tool in NEEDS[page]:
            pytest.importorskip(tool, reason=f"{tool} is not installed")
        monkeypatch.chdir(tmp_path)
        torch.manual_seed(0)
        names = {"__name__": f"page_{page}"}
        examples = re.findall(r"```python\n(.*?)```", PAGES[page].read_text(), flags=re.S)
        assert examples
        for example in examples:
            exec(compile(example, f"{page}.md", "exec"), names)
        return names

    return run


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.filterwarnings("ignore:.*population statistics")  # from the sanity check
def test_lightning(run):
    names = run("lightning")
    assert names["result"][0]["accuracy"] > 0.6
    assert names["model"].lstm.stats_h_l0.count.tolist() == [6] * 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_transformers(run):
    names = run("transformers")
    x = names["x"][:5]
    with torch.no_grad():
        expected = names["trainer"].model.eval()(x)["logits"]
        assert torch.equal(names["model"](x)["logits"], expected)


def test_accelerate(run):
    names = run("accelerate")
    x = names["x"][:5]
    with torch.no_grad():
        assert torch.equal(names["new"].eval()(x), names["model"](x))


def test_skorch(run):
    names = run("skorch")
    assert names["probabilities"].shape == (256, 2)
    assert names["net"].history[-1, "valid_acc"] > 0.6
    assert Path("classifier.pt").exists()


def test_averaging(run):
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this version of lightning has no EMAWeightAveraging")
    names = run("averaging")
    prediction, exact = names["prediction"], names["exact_prediction"]
    assert prediction.isfinite().all()
    torch.testing.assert_close(prediction, exact)  # all batches were still kept
