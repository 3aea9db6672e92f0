"""Hugging Face Transformers: exact statistics in `Trainer`, resizing in `from_pretrained`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from rbn.integrations.training_batches import (
    check_batches,
    check_loader,
    kept_random_state,
    read,
)
from rbn.nn.batch_forms import default_forward, trained_with_lengths
from rbn.nn.match import match_statistics
from rbn.nn.population import Batch, update_population_stats

try:
    from transformers import TrainerCallback, TrainerControl, TrainingArguments
except ImportError as error:
    raise ImportError(
        "rbn.integrations.transformers needs transformers: pip install transformers"
    ) from error


class ExactStatistics(TrainerCallback):
    """Computes exact population statistics before evaluation and saving, and after training.

    Without it, a batch-normalized layer evaluates with statistics estimated from its last training
    batches. This callback instead runs the model on the training data, at the current weights, with
    `rbn.update_population_stats`. Training gives the same results with and without it: random
    states, the order of the training data and its position in the epoch do not change.

    Args:
        batches: the training data; by default the trainer's training dataloader. Each update makes
            one pass, so it must be an iterable that can be read many times.
        max_batches: how many batches each update reads, in each process; all by default.
        forward: ``forward(model, batch)`` runs the model on a batch. By default moves the batch to
            the trainer's device and calls the model, as `rbn.update_population_stats` does.
    """

    def __init__(
        self,
        batches: Iterable[Batch] | None = None,
        max_batches: int | None = None,
        forward: Callable[[nn.Module, Batch], object] | None = None,
    ) -> None:
        check_batches(batches, max_batches)
        self.batches, self.max_batches = batches, max_batches
        self.forward: Callable[[nn.Module, Any], object] | None = forward
        self._trained = False  # since the last update

    def on_train_begin(self, *_: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Check the training data."""
        if self.batches is None:
            check_loader(train_dataloader)

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        """Record that the model trains."""
        self._trained = True

    def on_step_end(
        self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update if an evaluation or a checkpoint comes next."""
        if control.should_evaluate or control.should_save:
            self._update(args, **kwargs)

    def on_epoch_end(
        self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update if an evaluation or a checkpoint comes next."""
        if control.should_evaluate or control.should_save:
            self._update(args, **kwargs)

    def on_train_end(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Update for use after the training."""
        self._update(args, **kwargs)

    def _update(
        self, args: TrainingArguments, model: nn.Module, train_dataloader: Any, **_: Any
    ) -> None:
        if not self._trained:
            return
        self._trained = False
        data = train_dataloader if self.batches is None else self.batches
        run = self.forward or default_forward(args.device, trained_with_lengths(model))
        with kept_random_state():
            update_population_stats(model, read(data, self.max_batches), forward=run)


class GrowingStatistics:
    """Base for a `PreTrainedModel` whose batch-normalized layers have no `max_length`.

    `from_pretrained` compares the shapes of a checkpoint with those of the new model, whose
    statistics have no time steps yet. Inherit from this class first, and the statistics are resized
    to match the checkpoint: ``class MyModel(GrowingStatistics, PreTrainedModel)``.
    """

    @classmethod
    def _load_pretrained_model(cls, *args: Any, **kwargs: Any) -> Any:
        load = super()._load_pretrained_model  # type: ignore[misc]
        given = inspect.signature(load).bind(*args, **kwargs).arguments
        parts = given.get("checkpoint_files") or []
        if given.get("state_dict") is not None:
            parts = [given["state_dict"]]
        for part in parts:
            match_statistics(given["model"], part)
        return load(*args, **kwargs)
