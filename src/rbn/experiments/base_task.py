"""The base class of all tasks: evaluation with minibatch and with population statistics."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rbn.experiments.config import Config
from rbn.experiments.task_kinds import TaskKind
from rbn.nn import (
    PopulationStatistics,
    batch_statistics,
    kept_statistics,
    own_statistics,
    update_population_stats,
)
from rbn.training import Ranks

ESTIMATE = 50  # minibatches behind the population statistics of an evaluation


def has_statistics(model: nn.Module) -> bool:
    """Whether a model has population statistics."""
    return any(isinstance(module, PopulationStatistics) for module in model.modules())


def draws_noise(model: nn.Module) -> bool:
    """Whether a model adds noise to its initial states in training."""
    return any(getattr(module, "hidden_noise", 0) > 0 for module in model.modules())


def draws_masks(model: nn.Module) -> bool:
    """Whether a model has zoneout, whose masks are drawn in training."""
    return any(max(getattr(module, "zoneout", (0.0,))) > 0 for module in model.modules())


class Measurement(NamedTuple):
    """The results of one pass over a split of the data.

    Attributes:
        value: the task's metric.
        nats: the mean cross-entropy of the same outputs; None if that is the metric.
    """

    value: float
    nats: float | None = None


class BaseTask(abc.ABC):
    """A model and its data, evaluated with minibatch statistics and with population statistics.

    Several processes that train one run share the minibatches of an evaluation or estimate; the
    results are those of a single process.

    Attributes:
        kind: the metric and its units.
        model: accepts what `batch` returns; see the subclasses.
        batch_size: rows per minibatch.
        batches_per_epoch: minibatches per epoch.
        items_per_step: images, characters or questions per minibatch.
        row_dims: the batch dimension of each tensor of a minibatch.
        estimate: number of minibatches for the population statistics of an evaluation; None uses
            the running averages.
        population_batch: batch size for these statistics. It should be the size used for the final
            statistics, because small batches underestimate variances. None: the training batch
            size.
        metric: ``"valid_batch"`` or ``"valid_population"``, which selects the best model.
        estimates_with_masks: whether population statistics are estimated with the masks of zoneout,
            as layers do by default.
    """

    kind: ClassVar[TaskKind]
    model: nn.Module
    batch_size: int
    row_dims: tuple[int, ...]
    estimate: int | None = ESTIMATE
    population_batch: int | None = None
    metric = "valid_population"
    estimates_with_masks: ClassVar[bool] = True
    forward: Callable[[nn.Module, Any], object] | None = None  # runs one of `population_batches`

    # A task from a config ------------------------------------------------------------------------

    @staticmethod
    @abc.abstractmethod
    def load_data(config: Config, root: Path | None = None) -> Any:
        """The data of a config, on the CPU. root: the data folder; ``RBN_DATA`` by default."""

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Config, data: Any, seed: int, device: torch.device) -> BaseTask:
        """Make the task of a run. data: the result of `load_data`, on the device."""

    @staticmethod
    @abc.abstractmethod
    def check_model(config: Config) -> nn.Module:
        """Build the model, which rejects invalid options. The config has a small `hidden_size`."""

    # Training ------------------------------------------------------------------------------------

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the metric is better."""
        return self.kind.higher_is_better

    @property
    @abc.abstractmethod
    def batches_per_epoch(self) -> int:
        """Minibatches per epoch."""

    @property
    @abc.abstractmethod
    def items_per_step(self) -> int:
        """Images, characters or questions per minibatch."""

    @abc.abstractmethod
    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Minibatch number `step`, counted from 0."""

    @abc.abstractmethod
    def loss(self, *batch: Any, **options: Any) -> Tensor:
        """The mean cross-entropy of a minibatch, in nats."""

    def write_files(self, folder: Path) -> None:  # noqa: B027
        """Write what a run's folder needs besides checkpoints. Called before training."""

    # Evaluation ----------------------------------------------------------------------------------

    @property
    def split_names(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return ("train", "valid", "test")

    @abc.abstractmethod
    def measure(self, split: str) -> Measurement:
        """The metric on one split, with the statistics that the model currently uses."""

    @abc.abstractmethod
    def population_batches(self, batch_size: int) -> Iterator[Any]:
        """One pass over the training inputs, for exact population statistics."""

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The validation metric with minibatch statistics and with population statistics.

        Returns ``valid_batch`` and ``valid_population``, which are equal for models without
        statistics. If the metric is not the cross-entropy, also returns that, as
        ``valid_batch_nats`` and ``valid_population_nats``.

        During training, running averages lag behind the model. So population statistics are
        estimated from a few minibatches with the current model; the running averages do not change.
        """
        if not has_statistics(self.model):
            measurement = self._measure("valid", "population")
            return _record(measurement, measurement)
        batch = self._measure("valid", "batch")
        if self.estimate is None:
            return _record(batch, self._measure("valid", "population"))
        size = self.population_batch or self.batch_size
        with kept_statistics(self.model):
            self.estimate_population(size, math.ceil(self.estimate * self.batch_size / size))
            return _record(batch, self._measure("valid", "population"))

    @torch.no_grad()
    def estimate_population(self, batch_size: int, count: int | None = None) -> None:
        """Estimate population statistics of the current model, from all or `count` minibatches.

        Models with zoneout, or with noise in the initial states, are estimated as in training: that
        randomness may be all there is to normalize in the first steps, where all images have
        identical pixels. Others are estimated without dropout, as in evaluation.
        """
        batches = Ranks.here().share(itertools.islice(self.population_batches(batch_size), count))
        as_in_training = draws_noise(self.model) or (
            self.estimates_with_masks and draws_masks(self.model)
        )
        with own_statistics(self.model):
            update_population_stats(
                self.model, batches, forward=self.forward, train_mode=as_in_training
            )

    @torch.no_grad()
    def measure_with(self, split: str, statistics: str) -> float:
        """The metric on one split, with ``"batch"`` or ``"population"`` statistics."""
        return self._measure(split, statistics).value

    def default_length(self, split: str, statistics: str) -> str | None:
        """The default length of ``rbn evaluate``; None if the task has no choice of length."""
        return None

    def check_length(self, length: str, statistics: str) -> None:
        """Reject a length that `measure_at_length` cannot measure."""
        raise ValueError(f"length is for texts, not for {self.kind.items}, got {length}")

    def measure_at_length(self, split: str, statistics: str, length: str) -> float:
        """The metric on windows of a length; ``"full"`` treats a text as one sequence."""
        self.check_length(length, statistics)  # always raises here: only texts have a length
        return self.measure_with(split, statistics)

    def final_metrics(self) -> dict[str, float]:
        """The metrics of a finished run, on the validation and test data."""
        return {
            "valid": self.measure_with("valid", "population"),
            "valid_batch": self.measure_with("valid", "batch"),
            "test_batch": self.measure_with("test", "batch"),
            "test": self.measure_with("test", "population"),
        }

    def model_metadata(self) -> dict[str, Any]:
        """What is saved with the final model. Default: nothing."""
        return {}

    def _measure(self, split: str, statistics: str) -> Measurement:
        was_training = self.model.training
        self.model.eval()
        try:
            if statistics == "batch" and has_statistics(self.model):
                with batch_statistics(self.model):
                    return self.measure(split)
            return self.measure(split)
        finally:
            self.model.train(was_training)


def _record(batch: Measurement, population: Measurement) -> dict[str, float]:
    """The record of an evaluation on the validation data."""
    record = {"valid_batch": batch.value, "valid_population": population.value}
    if batch.nats is not None and population.nats is not None:
        record |= {"valid_batch_nats": batch.nats, "valid_population_nats": population.nats}
    return record
