"""`rbn demo`: a plain and a batch-normalized LSTM learn the same digits, side by side."""

from rbn.experiments.demo.result import Result, Settings, Trained
from rbn.experiments.demo.run import run_demo

__all__ = ["Result", "Settings", "Trained", "run_demo"]
