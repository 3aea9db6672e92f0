"""Train a BN-LSTM with PyTorch Lightning.

The layer needs no settings in the `Trainer`. The callback `ExactStatistics` is optional: it
computes population statistics from the whole training set before each evaluation.

Run (a few seconds on a CPU):

    pip install . lightning  # in a clone of the project
    python examples/lightning_module.py
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import rbn
from rbn.integrations.lightning import ExactStatistics


class Classifier(pl.LightningModule):
    """Tells whether a sequence has a positive sum."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = rbn.BatchNormLSTM(3, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[B, 2]`` of sequences ``[B, T, 3]``."""
        _, (h, _) = self.lstm(x)
        return self.head(h[-1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a minibatch."""
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy."""
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(epochs: int = 5) -> float:
    """Train, test, and return the accuracy."""
    pl.seed_everything(0, verbose=False)
    x = torch.randn(768, 10, 3)
    data = TensorDataset(x, (x.sum((1, 2)) > 0).long())
    train, test = random_split(data, [512, 256])
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[ExactStatistics()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, DataLoader(train, 32, shuffle=True, drop_last=True))
    (result,) = trainer.test(model, DataLoader(test, 256))
    return result["accuracy"]


if __name__ == "__main__":
    main()
