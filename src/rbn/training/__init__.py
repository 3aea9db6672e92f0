"""Optimising a model and watching it."""

from rbn.training.adam import Adam, AdamW
from rbn.training.checkpoint import CheckpointError
from rbn.training.launcher import RankLost, in_touch, launch
from rbn.training.ranks import Ranks
from rbn.training.schedule import Progress, Schedule
from rbn.training.together import Diverged, Interrupted, train_together
from rbn.training.trainer import Task, Trainer
from rbn.training.world import World, check_devices, make_fabric

__all__ = [
    "Adam",
    "AdamW",
    "CheckpointError",
    "Diverged",
    "Interrupted",
    "Progress",
    "RankLost",
    "Ranks",
    "Schedule",
    "Task",
    "Trainer",
    "World",
    "check_devices",
    "in_touch",
    "launch",
    "make_fabric",
    "train_together",
]
