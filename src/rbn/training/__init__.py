"""Optimising a model and watching it."""

from rbn.training.loop import Examples, Record, accuracy, train

__all__ = ["Examples", "Record", "accuracy", "train"]
