"""Optimising a model and watching it."""

from rbn.training.checkpoint import CheckpointError
from rbn.training.loop import Examples, Record, accuracy, train
from rbn.training.trainer import (
    Diverged,
    Progress,
    Schedule,
    Task,
    Trainer,
    train_together,
)

__all__ = [
    "CheckpointError",
    "Diverged",
    "Examples",
    "Progress",
    "Record",
    "Schedule",
    "Task",
    "Trainer",
    "accuracy",
    "train",
    "train_together",
]
