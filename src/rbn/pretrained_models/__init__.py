"""Small trained models that come with the package, each in its run's folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal, get_args

from torch import nn

Name = Literal["digits", "pmnist", "pydoc"]
NAMES: tuple[str, ...] = get_args(Name)
PREFIX = "pretrained:"  # marks their names on the command line
_SHA256 = {
    "digits": "e7d641a2e7e4962c2c002d9ac23a2aafe75437c298527e9949158ed0c83e2ad2",
    "pmnist": "6a3637029d0f4cdfaebfbc54238559637ecfcdc3930e3adcbad67e6623f2b6cc",
    "pydoc": "bc41f1368915c80b95fa79e38fc346c924f65016709edd889a6d089d41832dfb",
}


def folder_of(name: str) -> Path:
    """The folder of a model, as ``rbn train`` writes it. Checks its weights."""
    folder = _folder(name)
    _read_weights(folder)
    return folder


def pretrained(name: Name) -> nn.Module:
    """A small trained BN-LSTM that comes with the package, in eval mode on the CPU.

    ``"digits"`` is a `rbn.models.SequenceClassifier` of the 8x8 digits of scikit-learn: it takes
    pixels from 0 to 1, ``[64, B, 1]``, and returns logits ``[B, 10]``.

    ``"pmnist"`` is a `rbn.models.SequenceClassifier` of permuted MNIST with 97.0 % test accuracy:
    it takes pixels from 0 to 1 in the order of `rbn.data.pmnist`, ``[784, B, 1]``, and returns
    logits ``[B, 10]``.

    ``"pydoc"`` is a `rbn.models.LanguageModel` of the text of Python's ``help()``: it takes
    characters as positions in its `alphabet`, integers ``[T, B]``, and returns logits
    ``[T, B, 96]`` of the next characters, and states.

    On the command line, use ``pretrained:digits``, ``pretrained:pmnist`` or ``pretrained:pydoc`` in
    place of a run with ``rbn evaluate``; the last one also works with ``rbn sample``.

    Args:
        name: ``"digits"``, ``"pmnist"`` or ``"pydoc"``.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: the model's file is damaged.
    """
    try:
        from safetensors.torch import load
    except ImportError as error:
        raise ImportError("rbn.pretrained needs safetensors: pip install safetensors") from error
    from rbn.data.pydoc import SYMBOLS
    from rbn.models import LanguageModel, SequenceClassifier
    from rbn.nn import BatchNormLSTM

    folder = _folder(name)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"]
    tensors = load(_read_weights(folder))
    weights = {key.removeprefix("model."): value for key, value in tensors.items()}
    inputs = weights["recurrent.weight_ih_l0"].shape[1]
    options = settings["layer"] | settings["normalization"]
    layer = BatchNormLSTM(inputs, settings["hidden_size"], **options)
    model: nn.Module
    if name == "pydoc":
        model = LanguageModel(layer, alphabet=SYMBOLS)
    else:
        model = SequenceClassifier(layer, len(weights["classifier.bias"]))
    model.load_state_dict(weights)
    return model.eval()


def _folder(name: str) -> Path:
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    return Path(__file__).parent / name


def _read_weights(folder: Path) -> bytes:
    """The bytes of a model's weights, checked against their SHA-256."""
    path = folder / "final.safetensors"
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != _SHA256[folder.name]:
        raise ValueError(f"{path} is damaged: its SHA-256 does not match the trained model")
    return content
