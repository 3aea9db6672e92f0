"""Models that come with the package."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import rbn
from rbn import pretrained_models
from rbn.cli.app import app
from rbn.data.pydoc import SYMBOLS
from rbn.data.text import encode
from rbn.experiments import run_folder, trained_models
from rbn.models import LanguageModel

CPU = torch.device("cpu")


def invoke(*arguments):
    return CliRunner().invoke(app, [*arguments, "--device", "cpu"])


def test_digits():
    pytest.importorskip("sklearn")
    model = rbn.pretrained("digits")
    _, task = trained_models.open_task(pretrained_models.folder_of("digits"), CPU)
    images, labels = task.splits.test.inputs, task.splits.test.labels
    with torch.no_grad():
        logits = model(images)
        torch.testing.assert_close(logits, task.model(images), rtol=0, atol=0)
        one = model(images[:, :1])  # a batch of one uses the training set's statistics
    torch.testing.assert_close(one, logits[:1], rtol=1e-4, atol=1e-4)
    accuracy = float((logits.argmax(-1) == labels).float().mean())
    assert accuracy > 0.95
    done = invoke("evaluate", "pretrained:digits")
    assert done.exit_code == 0, done.output
    assert f"{100 * accuracy:.2f} %" in done.output


def test_pmnist():
    if not os.environ.get("RBN_DATA"):
        pytest.skip("RBN_DATA does not name a folder with MNIST")
    model = rbn.pretrained("pmnist")
    test = rbn.data.pmnist().test
    images, labels = test.inputs[:, :200], test.labels[:200]
    with torch.no_grad():
        logits = model(images)
        # Logits are about 30; another order of rounding changes them by 0.1.
        torch.testing.assert_close(model(images[:, :1]), logits[:1], rtol=0, atol=0.5)
    assert (logits.argmax(-1) == labels).float().mean() > 0.93


def test_the_settings_of_pmnist_are_those_of_its_run():
    """In full precision: its statistics are estimated in float32."""
    config, seed = run_folder.read_config(pretrained_models.folder_of("pmnist"))
    path = Path(__file__).parents[1] / f"results/pmnist/{config.name}-seed{seed}.json"
    wanted = json.loads(path.read_text())["config"] | {"precision": "32-true"}
    assert json.loads(config.to_json()) == wanted


def test_pydoc():
    model = rbn.pretrained("pydoc")
    assert isinstance(model, LanguageModel)
    assert model.alphabet == SYMBOLS
    other, symbols = trained_models.open_language_model(pretrained_models.folder_of("pydoc"), CPU)
    assert symbols == SYMBOLS
    read = encode("The statement can be used in a function definition.", SYMBOLS).long()[:, None]
    with torch.no_grad():
        logits, _ = model(read[:-1])
        torch.testing.assert_close(logits, other(read[:-1])[0], rtol=0, atol=0)
        nats, _ = model(read[:-1], targets=read[1:])
    assert nats / torch.tensor(2.0).log() < 3  # bits per character; 6.6 without a model
    done = invoke("sample", "pretrained:pydoc", "--prompt", "The ", "--length", "20")
    assert done.exit_code == 0, done.output
    assert len(done.output) == len("The ") + 20 + 1


def test_they_can_be_trained_further():
    model = rbn.pretrained("pydoc").train()
    symbols = torch.randint(96, (5, 3))
    loss, _ = model(symbols, targets=symbols)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_wrong_name():
    with pytest.raises(ValueError, match="one of digits, pmnist, pydoc, got 'mnist'"):
        rbn.pretrained("mnist")
    done = invoke("evaluate", "pretrained:mnist")
    assert done.exit_code == 2
    assert "digits, pmnist, pydoc" in done.output


def test_a_damaged_file(monkeypatch):
    monkeypatch.setitem(pretrained_models._SHA256, "digits", "0" * 64)
    with pytest.raises(ValueError, match=r"final\.safetensors is damaged"):
        rbn.pretrained("digits")
    assert invoke("evaluate", "pretrained:digits").exit_code == 2


def test_without_safetensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        rbn.pretrained("digits")


def test_an_alphabet_of_another_size():
    with pytest.raises(ValueError, match=r"alphabet.* 3.*characters.* 2"):
        LanguageModel(rbn.LSTM(3, 4), alphabet="ab")
