"""Run a trained BN-LSTM on a stream, one step at a time, and fold it for serving.

A cell keeps the state between the steps, so each new value costs one step. `rbn.fold` turns the
normalization into scales and shifts for the fastest inference on whole sequences.

Run (a few seconds on a CPU):

    pip install .  # in a clone of the project
    python examples/streaming.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import rbn


def sensor(steps: int, batch: int) -> Tensor:
    """Noisy sine waves ``[T, B, 1]`` of different frequency and phase."""
    time = torch.arange(steps)[:, None]
    waves = torch.sin(time * (0.1 + 0.3 * torch.rand(batch)) + 6.3 * torch.rand(batch))
    return (waves + 0.1 * torch.randn(steps, batch))[..., None]


def train(steps: int = 100) -> tuple[rbn.BatchNormLSTM, nn.Linear]:
    """A model that predicts the next value of a wave."""
    torch.manual_seed(0)
    lstm, head = rbn.BatchNormLSTM(1, 32), nn.Linear(32, 1)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=0.01)
    for _ in range(steps):
        x = sensor(41, 32)
        output, _ = lstm(x[:-1])
        loss = nn.functional.mse_loss(head(output), x[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return lstm.eval(), head


def predictions(lstm: rbn.BatchNormLSTM, head: nn.Linear, stream: Tensor) -> Iterator[float]:
    """The prediction after each value ``[1]`` of a stream that may never end."""
    (cell,) = lstm.to_cells()
    state = None  # starts from the learned initial state
    for step, value in enumerate(stream):
        # The step chooses the statistics; later steps than in training use the last ones.
        state = cell(value[None], state, step)
        yield float(head(state[0]))


def main() -> tuple[float, float]:
    """Predict a stream, and return the differences of cell and folded layer to the layer."""
    lstm, head = train()
    stream = sensor(200, 1)
    folded = rbn.fold(lstm)
    with torch.inference_mode():
        expected = head(lstm(stream)[0]).flatten()
        by_step = torch.tensor(list(predictions(lstm, head, stream[:, 0])))
        at_once = head(folded(stream)[0]).flatten()
    error = (by_step[:-1] - stream[1:, 0, 0]).square().mean().sqrt()
    print(
        f"error of the prediction: {error:.3f}; standard deviation of the data: {stream.std():.3f}"
    )
    cell_difference = float((by_step - expected).abs().max())
    fold_difference = float((at_once - expected).abs().max())
    print(f"largest difference, step by step: {cell_difference:.1e}, folded: {fold_difference:.1e}")
    return cell_difference, fold_difference


if __name__ == "__main__":
    main()
