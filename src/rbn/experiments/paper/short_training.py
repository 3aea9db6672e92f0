"""Short training runs on embedded data, for the paper's claims without a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from rbn.experiments import config as configs
from rbn.experiments.base_task import BaseTask
from rbn.experiments.config import Config
from rbn.experiments.optimizers import make_optimizer

CPU = torch.device("cpu")


@dataclass
class Trace:
    """The gradient norm and the loss at each step of a short run."""

    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def non_finite(self) -> int:
        """The number of steps with a non-finite gradient."""
        return sum(not math.isfinite(norm) for norm in self.norms)


def fit(task: BaseTask, config: Config, steps: int) -> Trace:
    """Train for some steps, skipping those with a non-finite gradient."""
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
    return trace


def on_digits(*settings: str) -> Config:
    """The config of the digits with some settings changed."""
    config = configs.from_mapping(configs.published("digits"))
    return configs.with_settings(config, settings)
