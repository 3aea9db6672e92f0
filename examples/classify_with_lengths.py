"""Classify sequences of different lengths with a BN-LSTM.

Each sequence is noise with one marked step; its class is the value at that step. The sequences
have 5 to 20 steps and are padded to the longest of the minibatch. `lengths` tells the layer where
each one ends, so that padding has no effect on outputs, gradients or statistics.

Run (a few seconds on a CPU):

    pip install .  # in a clone of the project
    python examples/classify_with_lengths.py
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import rbn

CLASSES = 4


class Classifier(nn.Module):
    """A BN-LSTM, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = rbn.BatchNormLSTM(2 + CLASSES, 32, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of padded sequences ``[B, T, features]``."""
        _, (h, _) = self.lstm(x, lengths=lengths)
        return self.head(h[-1])  # the state after the last step of each sequence


def make_batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Padded sequences ``[B, T, features]``, their lengths and their classes."""
    lengths = torch.randint(5, 21, (size,))
    labels = torch.randint(CLASSES, (size,))
    sequences = []
    for length, label in zip(lengths.tolist(), labels.tolist(), strict=True):
        x = torch.randn(length, 2 + CLASSES)
        marked = int(torch.randint(length, ()))
        x[:, 0] = 0  # the mark
        x[marked, 0] = 3
        x[marked, 2:] = 0
        x[marked, 2 + label] = 3
        sequences.append(x)
    return pad_sequence(sequences, batch_first=True), lengths, labels


def main(steps: int = 150) -> float:
    """Train, evaluate on new sequences, and return the accuracy."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        x, lengths, labels = make_batch(64)
        loss = nn.functional.cross_entropy(model(x, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    model.eval()  # from here on with population statistics, so single sequences work, too
    with torch.no_grad():
        x, lengths, labels = make_batch(500)
        accuracy = float((model(x, lengths).argmax(1) == labels).float().mean())
    print(f"accuracy on new sequences: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
