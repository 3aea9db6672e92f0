"""Train a character model on a text file and let it write.

The layer takes characters as integers `[T, B]`, which stand for one-hot vectors.

Run (about ten seconds on a CPU; the default text is a module of Python itself):

    pip install .  # in a clone of the project
    python examples/character_model.py [FILE]
"""

import sys
import textwrap
from pathlib import Path

import torch
from torch import Tensor, nn

import rbn

LENGTH, BATCH, UNITS = 50, 32, 96


class CharacterModel(nn.Module):
    """Predicts the next character."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.lstm = rbn.BatchNormLSTM(symbols, UNITS)
        self.head = nn.Linear(UNITS, symbols)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[T, B, symbols]`` for the characters after those of ``[T, B]``."""
        return self.head(self.lstm(x)[0])


def write(model: CharacterModel, start: Tensor, count: int) -> list[int]:
    """Continue a text of symbols ``[T]``, one character at a time."""
    (cell,) = model.lstm.to_cells()
    text, state = start.tolist(), None
    with torch.inference_mode():
        for step in range(len(text) + count - 1):
            x = nn.functional.one_hot(torch.tensor([text[step]]), cell.input_size)
            state = cell(x.float(), state, step)
            if step + 1 == len(text):
                probabilities = model.head(state[0][0]).softmax(0)
                text.append(int(probabilities.multinomial(1)))
    return text


def main(path: Path, steps: int = 200) -> float:
    """Train on a file, print a sample, and return the last loss in bits per character."""
    torch.manual_seed(0)
    text = path.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    symbols = torch.tensor([alphabet.index(c) for c in text])
    model = CharacterModel(len(alphabet))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        starts = torch.randint(len(symbols) - LENGTH, (BATCH,))
        window = torch.stack([symbols[s : s + LENGTH + 1] for s in starts.tolist()], dim=1)
        logits = model(window[:-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: {loss.item() / 0.6931:.2f} bits per character")

    model.eval()
    print("".join(alphabet[k] for k in write(model, symbols[:30], 200)))
    return loss.item() / 0.6931


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else textwrap.__file__))
