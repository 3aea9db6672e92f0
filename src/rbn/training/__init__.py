"""Optimising a model and watching it."""

from rbn.training.checkpoint import CheckpointError
from rbn.training.loop import Examples, Record, accuracy, train
from rbn.training.schedule import Progress, Schedule
from rbn.training.together import train_together
from rbn.training.trainer import Diverged, Task, Trainer, make_fabric

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
    "make_fabric",
    "train",
    "train_together",
]
