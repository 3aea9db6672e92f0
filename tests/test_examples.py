"""The scripts in examples run and do what they claim."""

import runpy
from pathlib import Path

import pytest
import torch

# Other tests run the same lines, and tracing exporters is slow.
pytestmark = pytest.mark.no_cover

EXAMPLES = Path(__file__).parents[1] / "examples"
MOST_LINES = 80


def main_of(name, *needed):
    """The main function of an example; skips if a required library is missing."""
    for library in needed:
        pytest.importorskip(library, reason=f"{library} is not installed")
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_classification_with_lengths():
    assert main_of("classify_with_lengths")(steps=100) > 0.95


@pytest.mark.slow
def test_character_model(tmp_path, capsys):
    text = "the quick brown fox jumps over the lazy dog. " * 40
    (tmp_path / "text.txt").write_text(text)
    assert main_of("character_model")(tmp_path / "text.txt", steps=60) < 1.5
    sample = capsys.readouterr().out.splitlines()[-1]
    assert len(sample) == 230
    assert sample.startswith(text[:30])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
def test_lightning_module():
    with torch.random.fork_rng():
        assert main_of("lightning_module", "lightning")() > 0.8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # from the exporter
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_onnx_export(tmp_path):
    main = main_of("onnx_export", "numpy", "onnx", "onnxscript", "onnxruntime")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        pytest.skip("the exporter of torch before 2.8 does not know Scan")
    # float32 on both sides; logits are below 20, and rounding adds up over 40 steps.
    assert main(tmp_path / "tagger.onnx") < 1e-4


def test_streaming():
    by_step, folded = main_of("streaming")()
    assert by_step < 1e-5
    assert folded < 1e-5


def test_examples_are_short_and_say_how_to_run_them():
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 5
    for script in scripts:
        text = script.read_text()
        assert len(text.splitlines()) < MOST_LINES, script.name
        assert f"python examples/{script.name}" in text
