"""Short trainings on embedded data, for what the paper states without a figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from rbn.experiments import config as configs
from rbn.experiments.base_task import BaseTask
from rbn.experiments.config import Config
from rbn.experiments.optimizers import make_optimizer

CPU = torch.device("cpu")
Tick = Callable[[], None]


@dataclass
class Trace:
    """What a short training went through: a norm of the gradient and a loss for each step."""

    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Steps whose gradient was not finite."""
        return sum(not math.isfinite(norm) for norm in self.norms)


def fit(task: BaseTask, config: Config, steps: int, tick: Tick | None = None) -> Trace:
    """Train for some steps; a gradient that is not finite is left out and counted."""
    trace = Trace()
    optimizer = make_optimizer(config, task.model)
    task.model.train()
    for step in range(steps):
        loss = task.loss(*task.batch(step))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(task.model.parameters(), config.clip or math.inf)
        trace.norms.append(float(norm))
        trace.losses.append(float(loss.detach()))
        if norm.isfinite():
            optimizer.step()
        if tick:
            tick()
    return trace


def on_digits(*settings: str) -> Config:
    """The settings of the digits, with others put in."""
    config = configs.from_mapping(configs.published("digits"))
    return configs.with_settings(config, settings)
