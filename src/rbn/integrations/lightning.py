"""PyTorch Lightning: exact population statistics before validation, test and saving."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from rbn.integrations.training_batches import (
    check_batches,
    check_loader,
    kept_random_state,
    read,
)
from rbn.nn.batch_forms import check_batch, default_forward, trained_with_lengths
from rbn.nn.batch_normalized import BatchNormalized
from rbn.nn.population import Batch, update_population_stats
from rbn.nn.statistics import PopulationStatistics

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:  # the trainers of both packages accept either callback
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise ImportError(
                "rbn.integrations.lightning needs lightning: pip install lightning"
            ) from error


class ExactStatistics(Callback):
    """Computes exact population statistics before validation, test, prediction and saving.

    Without it, a batch-normalized layer evaluates with statistics estimated from its last training
    batches. This callback instead runs the model on the training data, at the current weights, with
    `rbn.update_population_stats`. It does nothing if the model has not trained since the last
    update. Training gives the same results with and without it: random states, the order of the
    training data, its position in the epoch, logged values and gradients do not change. Works with
    gradient accumulation, every precision, and several processes, each of which reads its own part
    of the training data.

    Lightning calls no callback when it saves only the weights (``save_weights_only=True``). Such
    checkpoints have exact statistics if validation ran after the last training step.

    Args:
        batches: the training data; by default the trainer's training dataloader. Each update makes
            one pass, so it must be an iterable that can be read many times.
        max_batches: how many batches each update reads, in each process. By default all, up to the
            trainer's `limit_train_batches`.
        forward: ``forward(module, batch)`` runs the module on a batch that is on its device. By
            default calls the module's `forward`, as `rbn.update_population_stats` does.
    """

    def __init__(
        self,
        batches: Iterable[Batch] | None = None,
        max_batches: int | None = None,
        forward: Callable[[LightningModule, Batch], object] | None = None,
    ) -> None:
        super().__init__()
        check_batches(batches, max_batches)
        self.batches, self.max_batches = batches, max_batches
        self.forward: Callable[[LightningModule, Any], object] | None = forward
        self._training_data: Any = batches
        self._limit = max_batches
        self._trained: nn.Module | None = None  # the module, if it trained since the last update
        self._updated: tuple[nn.Module, list[float]] | None = None  # with its checksums then
        self._frozen: list[nn.Module] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the training data, which may change in each epoch."""
        if self.batches is None:
            check_loader(trainer.train_dataloader)
            self._training_data = trainer.train_dataloader
            per_epoch = trainer.num_training_batches  # infinite if the data has no length
            limits = [n for n in (self.max_batches, per_epoch) if n is not None and n != math.inf]
            self._limit = int(min(limits)) if limits else None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record that the module trains, and which of its layers are frozen."""
        self._trained = pl_module
        self._frozen = [m for m in pl_module.modules() if not m.training]

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Check early that the model can be called with such batches, not only at an update."""
        if batch_idx > 0 or self.forward is not None or not self._trainable(pl_module):
            return
        if self.batches is None:
            check_batch(pl_module, batch)
        elif isinstance(self.batches, Sequence) and self.batches:
            check_batch(pl_module, self.batches[0])

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Use the statistics of the checkpoint."""
        self._trained = self._updated = None

    # The first batch comes after `on_validation_epoch_start`, where `WeightAveraging` puts the
    # averaged weights into the module.

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Update before the first batch."""
        self._before_batch(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the statistics that `WeightAveraging` moved back with its weights."""
        if self._updated is None:
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for average in [value for callback in callbacks for value in vars(callback).values()]:
            if isinstance(average, AveragedModel) and _checksums(average) == self._updated[1]:
                _mark_fresh(average)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the statistics that `WeightAveraging` moved into the module with its weights."""
        if self._trained is not None or self._updated is None:
            return
        if _checksums(pl_module) == self._updated[1]:
            _mark_fresh(pl_module)

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Update before the first batch."""
        self._before_batch(trainer, pl_module)

    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Update before the first batch."""
        self._before_batch(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Update, and put the statistics into the checkpoint."""
        if self._trained is pl_module and self._update(trainer, pl_module):
            names = [
                f"{name}.{buffer}"
                for name, module in pl_module.named_modules()
                if isinstance(module, PopulationStatistics)
                for buffer in ("mean", "var", "count")
            ]
            # `WeightAveraging` saves the module's own state under "current_model_state".
            state = checkpoint.get("current_model_state", checkpoint["state_dict"])
            state.update({name: pl_module.get_buffer(name) for name in names if name in state})

    def _before_batch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._trained is pl_module:
            self._update(trainer, pl_module)
        elif self._updated is not None and trainer.state.fn != "fit":
            # Callbacks that average weights copy the average into the module after training.
            module, weights = self._updated
            self._updated = None
            if module is pl_module and weights != _checksums(pl_module):
                self._update(trainer, pl_module)

    def _trainable(self, pl_module: LightningModule) -> bool:
        """Whether the module has statistics that are not all frozen."""
        statistics = [m for m in pl_module.modules() if isinstance(m, PopulationStatistics)]
        return not set(self._frozen).issuperset(statistics)

    def _update(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Compute the statistics, unless all layers that have statistics are frozen."""
        self._trained = None
        if not self._trainable(pl_module):
            return False
        run = self.forward or default_forward(None, trained_with_lengths(pl_module))
        precision, strategy = trainer.precision_plugin, trainer.strategy

        def forward(model: nn.Module, batch: Any) -> None:
            batch = strategy.batch_to_device(precision.convert_input(batch))
            with precision.forward_context():
                run(pl_module, batch)

        modes = {module: module.training for module in pl_module.modules()}
        try:
            pl_module.train()  # evaluation has put all layers into eval()
            for module in self._frozen:
                module.training = False
            with kept_random_state(), torch.inference_mode(False):
                batches = read(self._training_data, self._limit)
                update_population_stats(pl_module, batches, forward=forward)
        finally:
            for module, mode in modes.items():
                module.training = mode
        self._updated = pl_module, _checksums(pl_module)
        return True


def _mark_fresh(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, BatchNormalized):
            layer.mark_fresh()


def _checksums(module: nn.Module) -> list[float]:
    """The norms of the parameters, to detect changed weights."""
    return [float(p.detach().double().norm()) for p in module.parameters()]
