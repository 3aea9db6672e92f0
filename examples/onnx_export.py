"""Export a trained BN-LSTM to ONNX and run it with ONNX Runtime.

The file has dynamic batch size and length, and needs neither torch nor rbn to run.

Run (about ten seconds on a CPU):

    pip install . onnx onnxscript onnxruntime  # in a clone of the project
    python examples/onnx_export.py [tagger.onnx]
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import rbn

WORDS, TAGS = 50, 5


class Tagger(nn.Module):
    """Assigns a tag to every word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.lstm = rbn.BatchNormLSTM(16, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, TAGS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, tags]`` of tokens ``[B, T]``."""
        return self.head(self.lstm(self.embedding(tokens))[0])


def train(steps: int = 60) -> Tagger:
    """A tagger whose tags are those of the previous word, ``word % 5``."""
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        tokens = torch.randint(WORDS, (32, 12))
        logits = model(tokens)[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), (tokens[:, :-1] % TAGS).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main(path: Path) -> float:
    """Export, run on sentences of another size, and return the largest difference to torch."""
    model = train()
    example = torch.randint(WORDS, (2, 12))
    shapes = ({0: "batch", 1: "time"},)
    options = {"external_data": False, "verbose": False}  # one file, no messages
    torch.onnx.export(model, (example,), path, dynamo=True, dynamic_shapes=shapes, **options)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} kB")

    session = onnxruntime.InferenceSession(path)
    (name,) = (node.name for node in session.get_inputs())
    tokens = np.random.default_rng(0).integers(WORDS, size=(3, 40))
    (logits,) = session.run(None, {name: tokens})
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).numpy()
    difference = float(np.abs(logits - expected).max())
    accuracy = (logits[:, 1:].argmax(2) == tokens[:, :-1] % TAGS).mean()
    print(f"largest difference to torch: {difference:.1e}; accuracy: {accuracy:.1%}")
    return difference


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tagger.onnx"))
