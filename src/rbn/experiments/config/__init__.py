"""The hyperparameters of runs: read from files, checked, overridden on the command line."""

from rbn.experiments.config.config_files import CONFIGS, find, for_model, names, published
from rbn.experiments.config.overrides import flat, parse_settings, with_settings, with_values
from rbn.experiments.config.settings import Config, from_mapping
from rbn.experiments.config.validation import (
    LARGEST,
    LARGEST_RATE,
    check_names,
    check_seed,
    is_number,
)
from rbn.experiments.config.yaml_loader import parse_yaml, read_yaml

__all__ = [
    "CONFIGS",
    "LARGEST",
    "LARGEST_RATE",
    "Config",
    "check_names",
    "check_seed",
    "find",
    "flat",
    "for_model",
    "from_mapping",
    "is_number",
    "names",
    "parse_settings",
    "parse_yaml",
    "published",
    "read_yaml",
    "with_settings",
    "with_values",
]
