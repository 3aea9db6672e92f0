"""Tasks are measured with two kinds of statistics, and how that is written down."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from rbn.nn import (
    PopulationStatistics,
    batch_statistics,
    kept_statistics,
    own_statistics,
    update_population_stats,
)
from rbn.training import Ranks

ESTIMATE = 50  # minibatches behind the population statistics of a look at the validation data


def has_statistics(model: nn.Module) -> bool:
    """Whether a model normalizes over batches."""
    return any(isinstance(module, PopulationStatistics) for module in model.modules())


def draws_noise(model: nn.Module) -> bool:
    """Whether initial states are noisy while training."""
    return any(getattr(module, "hidden_noise", 0) > 0 for module in model.modules())


class Measurement(NamedTuple):
    """What one pass over a part of the data gives.

    Attributes:
        value: the task's figure.
        nats: the mean cross-entropy, of the same outputs; None where the figure is that already.
    """

    value: float
    nats: float | None = None


class Measured(abc.ABC):
    """A task that is measured with minibatch statistics and with population statistics.

    Of several processes that train together each measures and estimates with some of the
    minibatches, whole ones, so that the figures are those of one process.

    Attributes:
        estimate: minibatches behind the population statistics of an evaluation; None takes the
            running averages.
        population_batch: rows of the batches that these are cut into, which should be those of the
            final statistics: small ones understate a variance. None: the training minibatches'.
        metric: ``"valid_batch"`` or ``"valid_population"``, which of them names the best model.
        row_dims: along which dimension of each tensor of a minibatch its rows lie.
    """

    model: nn.Module
    batch_size: int
    estimate: int | None = ESTIMATE
    population_batch: int | None = None
    row_dims: tuple[int, ...]
    metric = "valid_population"
    forward: Callable[[nn.Module, Any], object] | None = None  # on one of `population_batches`

    @abc.abstractmethod
    def measure(self, part: str) -> Measurement:
        """The figures on one part of the data, with the statistics that the model uses now."""

    @abc.abstractmethod
    def population_batches(self, batch_size: int) -> Iterator[Any]:
        """The training inputs once, for exact population statistics."""

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The validation figures with both kinds of statistics; once where there are none.

        ``valid_batch`` and ``valid_population`` are the task's figure; where it is not the
        cross-entropy, that follows as ``valid_batch_nats`` and ``valid_population_nats``.

        While the model moves, the running averages lag behind it. So the population statistics are
        estimated from a few minibatches at the model as it is; the running ones stay as they are.
        """
        if not has_statistics(self.model):
            found = self._measured("valid", "population")
            return _recorded(found, found)
        batch = self._measured("valid", "batch")
        if self.estimate is None:
            return _recorded(batch, self._measured("valid", "population"))
        size = self.population_batch or self.batch_size
        with kept_statistics(self.model):
            self.estimate_population(size, math.ceil(self.estimate * self.batch_size / size))
            return _recorded(batch, self._measured("valid", "population"))

    @torch.no_grad()
    def estimate_population(self, batch_size: int, count: int | None = None) -> None:
        """Population statistics at the model as it is, of all training data or some minibatches.

        Without dropout and zoneout, as it is evaluated. But with the noise that in-order MNIST has
        in its initial states: while all images are alike, that noise is all there is to normalize,
        and the first images to differ would be many deviations away without it.
        """
        batches = Ranks.here().share(itertools.islice(self.population_batches(batch_size), count))
        with own_statistics(self.model):
            update_population_stats(
                self.model, batches, forward=self.forward, train_mode=draws_noise(self.model)
            )

    @torch.no_grad()
    def measure_with(self, part: str, statistics: str) -> float:
        """The figure on one part, with ``"batch"`` or ``"population"`` statistics."""
        return self._measured(part, statistics).value

    def _measured(self, part: str, statistics: str) -> Measurement:
        was_training = self.model.training
        self.model.eval()
        try:
            if statistics == "batch" and has_statistics(self.model):
                with batch_statistics(self.model):
                    return self.measure(part)
            return self.measure(part)
        finally:
            self.model.train(was_training)


def _recorded(batch: Measurement, population: Measurement) -> dict[str, float]:
    """A look at the validation data as it is written down."""
    found = {"valid_batch": batch.value, "valid_population": population.value}
    if batch.nats is not None and population.nats is not None:
        found |= {"valid_batch_nats": batch.nats, "valid_population_nats": population.nats}
    return found
