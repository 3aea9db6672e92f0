"""Training: the loop, checkpoints, Adam, and several processes."""

from rbn.training.adam import Adam, AdamW
from rbn.training.checkpoint import CheckpointError
from rbn.training.interleaved import train_interleaved
from rbn.training.interrupt import Interrupted
from rbn.training.launcher import RankLost, launch, process_group
from rbn.training.ranks import Ranks
from rbn.training.schedule import Progress, Schedule
from rbn.training.trainer import Diverged, Task, Trainer
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
    "launch",
    "make_fabric",
    "process_group",
    "train_interleaved",
]
